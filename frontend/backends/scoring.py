"""`select` over the native API: exact at the boundary between prompt and choice.

Text does not split into tokens at the boundary: the choice's first characters can merge with the
prompt's last token, and each choice may merge differently.

    prompt            | The| cap|ital| is| P|
    prompt + "aris"   | The| cap|ital| is| Paris|          merges
    prompt + "orto"   | The| cap|ital| is| P|orto|         does not
                                        c ^

All choices are scored from the longest token prefix common to the prompt and every choice (c), so
that each score covers the same text and the shared prefix is computed once. The prompt's own last
characters are then part of what is scored, equally for all.

The constrained method does the same for generation: it generates from c under a regular expression
that first repeats the prompt's rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from statewise.frontend.choices import ChoicesDecision, ChoicesMethod, ScoredTokens, mean_logprob
from statewise.frontend.errors import BackendError

if TYPE_CHECKING:
    from statewise.frontend.backends.base import CacheHints
    from statewise.frontend.backends.native import NativeBackend

_REGEX_META = frozenset(r"\.+*?()|[]{}^$")


def select_scored(
    backend: NativeBackend,
    text: str,
    choices: Sequence[str],
    method: ChoicesMethod,
    hints: CacheHints,
) -> ChoicesDecision:
    """Pick by the choices' log probabilities after `text`, under the rule `method`.

    Raises `BackendError` where the service fails or returns too few scores.
    """
    rows, common = _tokenized(backend, text, choices)
    shared = rows[0][: max(common - 1, 0)]  # the last common token's logits score the next one
    first = backend.request(_prefill(shared, hints)) if shared else {}
    answers, scored = _scores(backend, rows[1:], common, hints)
    alone: list[ScoredTokens] | None = None
    if method.requires_unconditional_logprobs:
        _, alone = _scores(backend, [row[common:] for row in rows[1:]], 0, hints)
    decision = method(
        choices=list(choices),
        normalized_prompt_logprobs=[mean_logprob(tokens) for tokens in scored],
        input_token_logprobs=scored,
        output_token_logprobs=[_meta(a).get("output_token_logprobs") or [] for a in answers],
        unconditional_token_logprobs=alone,
    )
    figures = {**_total_counts([first, *answers]), **(decision.meta_info or {})}
    return ChoicesDecision(decision.decision, figures)


def select_constrained(
    backend: NativeBackend, text: str, choices: Sequence[str], hints: CacheHints
) -> ChoicesDecision:
    """Pick by one greedy generation that can write nothing but one of the choices."""
    rows, common = _tokenized(backend, text, choices)
    rest = _text_after(backend, rows[0], common)
    prompt: dict[str, Any] = {"input_ids": rows[0][:common]}
    if rest is None or not common:
        prompt, rest = {"text": text}, ""
    regex = escape(rest) + "(" + "|".join(escape(choice) for choice in choices) + ")"
    most = max(len((rest + choice).encode()) for choice in choices) + 1  # a token is a byte or more
    params = {"temperature": 0, "max_new_tokens": most, "regex": regex}
    answer = backend.request(_hinted({**prompt, "sampling_params": params}, hints))
    written = str(answer.get("text", "")).removeprefix(rest)
    if written not in choices:
        raise BackendError(f"the constrained generation wrote {written!r}, which is no choice")
    return ChoicesDecision(written, dict(_meta(answer)))


def _tokenized(
    backend: NativeBackend, text: str, choices: Sequence[str]
) -> tuple[list[list[int]], int]:
    """Token ids of the prompt and of the prompt with each choice, and their common length."""
    rows = backend.tokenize([text, *(text + choice for choice in choices)])
    common = common_prefix_len(rows)
    for row, choice in zip(rows[1:], choices, strict=True):
        if len(row) == common:
            raise BackendError(f"choice {choice!r} adds no token to the prompt")
    return rows, common


def _text_after(backend: NativeBackend, ids: list[int], common: int) -> str | None:
    """Text of `ids` from `common` on; None where the tokenizer cannot say."""
    if common == len(ids):
        return ""
    whole, head = backend.detokenize(ids), backend.detokenize(ids[:common])
    return whole[len(head) :] if whole.startswith(head) else None


def _prefill(ids: list[int], hints: CacheHints) -> dict[str, Any]:
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 0}, "checkpoint": True}
    return _hinted(body, hints)


def _scores(
    backend: NativeBackend, rows: list[list[int]], start: int, hints: CacheHints
) -> tuple[list[Any], list[ScoredTokens]]:
    """Return the service's answers, and for each row the scores of its tokens from `start` on."""
    body = {
        "input_ids": rows,
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "return_text_in_logprobs": True,
        "logprob_start_len": max(start - 1, 0),
    }
    answers = backend.request(_hinted(body, hints))
    if not isinstance(answers, list) or len(answers) != len(rows):
        raise BackendError(f"{len(rows)} prompts were scored, the answer has another number")
    scored: list[ScoredTokens] = []
    for answer, row in zip(answers, rows, strict=True):
        tokens = _meta(answer).get("input_token_logprobs") or []
        wanted = len(row) - start
        if len(tokens) < wanted:
            raise BackendError(f"{wanted} prompt tokens were to be scored, {len(tokens)} came back")
        scored.append(tokens[len(tokens) - wanted :])
    return answers, scored


def _hinted(body: dict[str, Any], hints: CacheHints) -> dict[str, Any]:
    salt = {"cache_salt": hints.salt} if hints.salt else {}
    return {**body, **salt, **({"exact": True} if hints.exact else {})}


def _meta(answer: Any) -> dict[str, Any]:
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise BackendError(f"an answer without meta_info: {answer!r:.200}")
    return meta


def _total_counts(answers: Sequence[Any]) -> dict[str, int]:
    """Token counts of all requests of one selection, under the names of one."""
    metas = [_meta(answer) for answer in answers if answer]
    names = ("prompt_tokens", "cached_tokens", "completion_tokens")
    return {name: sum(int(meta.get(name) or 0) for meta in metas) for name in names}


def escape(text: str) -> str:
    """`text` as a regular expression that matches it alone, in any common dialect."""
    return "".join("\\" + c if c in _REGEX_META else c for c in text)


def common_prefix_len(rows: Sequence[Sequence[int]]) -> int:
    """Length of the longest prefix that all rows share."""
    low, high = min(map(list, rows)), max(map(list, rows))  # lexicographic extremes differ first
    length = 0
    for a, b in zip(low, high, strict=False):
        if a != b:
            break
        length += 1
    return length
