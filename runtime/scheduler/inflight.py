"""Prompts being computed right now, so that no prefix is computed twice at the same time.

A waiting request whose prompt continues a running prefill beyond what the tree already holds is
better off waiting until those pages are published. Candidates are found by their first page.

This module does not admit or delay anybody; it answers how long a shared prefix is.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from statewise.radix import Namespace
from statewise.runtime.scheduler.request import Request


def common_prefix_len(a: Request, b: Request) -> int:
    """Tokens that the known tokens of both requests share from the start."""
    n = min(a.num_tokens, b.num_tokens)
    differ = np.flatnonzero(a.tokens[:n] != b.tokens[:n])
    return int(differ[0]) if len(differ) else n


class InflightPrefixes:
    """Running prefills by whose state they share, and first page."""

    def __init__(
        self, page_size: int, running: Iterable[Request], *, exact_apart: bool = False
    ) -> None:
        """`exact_apart`: requests that insist on exact state share only with their like."""
        self._page_size = page_size
        self._exact_apart = exact_apart
        self._by_first_page: dict[tuple[Namespace, bytes], list[Request]] = {}
        for request in running:
            self.add(request)

    def _key(self, request: Request) -> tuple[Namespace, bytes]:
        cache = request.message.cache
        whose = Namespace(cache.salt, cache.adapter, cache.exact and self._exact_apart)
        return whose, request.tokens[: self._page_size].tobytes()

    def add(self, request: Request) -> None:
        """Register a running request that is still computing known tokens."""
        if not request.is_decoding and request.num_tokens >= self._page_size:
            self._by_first_page.setdefault(self._key(request), []).append(request)

    def provider_of(self, request: Request, reusable_len: int) -> tuple[Request, int] | None:
        """The running prefill that will publish more of `request`'s prefix, and up to where.

        `reusable_len` is what the tree offers now. None when nothing in flight beats it. The
        position is page-aligned and below the request's own reuse limit.
        """
        best: tuple[Request, int] | None = None
        for other in self._by_first_page.get(self._key(request), ()):
            shared = min(common_prefix_len(request, other), request.reuse_limit)
            shared -= shared % self._page_size
            if shared > max(reusable_len, other.num_computed) and (
                best is None or shared > best[1]
            ):
                best = (other, shared)
        return best
