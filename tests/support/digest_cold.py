"""The digest model run token by token with nothing cached: the oracle of every simulation.

Plain integers and plain lists, written as the definition reads; no formula is shared with the
worker beyond the arithmetic of single words.
"""

from __future__ import annotations

from collections import defaultdict

from statewise.radix.schema import CacheSchema, GroupKind, StateGroupSpec
from support.digest import (
    MASK,
    STEP,
    Compressor,
    key_of,
    layer_plans,
    mix_int,
    next_token,
    odd_int,
)

Place = tuple[int, int]  # (group, layer)


class ColdRun:
    """One sequence from its first token on; `feed` returns the last hidden digest."""

    def __init__(self, schema: CacheSchema, owner: int) -> None:
        self.schema = schema
        self.owner = owner
        self.plans = layer_plans(schema)
        self.num_tokens = 0
        self.entries: dict[Place, list[int]] = defaultdict(list)  # weighted
        self.total: dict[Place, int] = defaultdict(int)  # sum of all entries
        self.raw: dict[Place, list[int]] = defaultdict(list)  # weighted
        self.routed: dict[tuple[Place, int], int] = defaultdict(int)  # by bit
        self.state: dict[Place, int] = defaultdict(int)

    def feed(self, token: int) -> int:
        """Compute the next token's position."""
        t = self.num_tokens
        self.num_tokens += 1
        hidden = mix_int(token, t, self.owner)
        for layer, plan in enumerate(self.plans):
            parts = []
            for group, owner, mine in plan.paged:
                if mine:
                    self._append((group, layer), mix_int(hidden, t, key_of(group, layer)), t)
                parts.append(self._window((group, owner), t))
            parts += [self._compressed(c, layer, hidden, t) for c in plan.compressors]
            for group in plan.recurrent:
                entry = mix_int(hidden, t, key_of(group, layer))
                state = (self.state[group, layer] * STEP + entry) & MASK
                self.state[group, layer] = state
                parts.append(mix_int(state))
            hidden = mix_int(hidden, *parts, layer)
        return hidden

    def _append(self, place: Place, entry: int, position: int) -> None:
        weighted = entry * odd_int(position) & MASK
        self.entries[place].append(weighted)
        self.total[place] += weighted

    def _window(self, place: Place, t: int) -> int:
        spec, entries = self.schema.groups[place[0]], self.entries[place]
        if spec.kind is GroupKind.FULL:
            return self.total[place] & MASK
        first = first_visible(spec, t)
        return (sum(entries[first : t + 1]) + sum(entries[: min(spec.sinks, first)])) & MASK

    def _compressed(self, c: Compressor, layer: int, hidden: int, t: int) -> int:
        spec, tail = self.schema.groups[c.entries], self.schema.groups[c.tail]
        raw = self.raw[c.tail, layer]
        raw.append(mix_int(hidden, t, key_of(c.tail, layer)) * odd_int(t) & MASK)
        if (t + 1) % spec.ratio == 0:
            fold = sum(raw[max(0, t + 1 - spec.ratio - tail.overlap) :]) & MASK
            entry = mix_int(fold, key_of(c.entries, layer))
            routes = mix_int(fold, key_of(c.index, layer)) if c.index >= 0 else -1
            weighted = entry * odd_int(t // spec.ratio)
            for bit in (0, 1):
                if routes >> bit & 1:
                    self.routed[(c.entries, layer), bit] += weighted
        return self.routed[(c.entries, layer), hidden & 1] & MASK


def first_visible(spec: StateGroupSpec, t: int) -> int:
    """First token of the window that the token at `t` sees."""
    if spec.kind is GroupKind.CHUNKED:
        return t - t % spec.window
    return max(0, t - spec.window + 1)


def cold_output(
    schema: CacheSchema,
    prompt: list[int],
    max_new: int,
    vocab: int,
    *,
    owner: int = 0,
    eos: frozenset[int] = frozenset(),
) -> list[int]:
    """Tokens that a run without any cache generates."""
    run = ColdRun(schema, owner)
    hidden = 0
    for token in prompt:
        hidden = run.feed(token)
    out: list[int] = []
    while len(out) < max_new:
        token = next_token(hidden, vocab)
        out.append(token)
        if token in eos:
            break
        hidden = run.feed(token)
    return out
