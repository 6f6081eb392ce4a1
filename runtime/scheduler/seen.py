"""The tokens that a request has seen, kept up as it generates: what penalties are applied to.

Sorting prompt and output for every token costs more than the rest of sampling once a prompt is
long. Here the prompt is sorted once, when penalties are first asked for, and each output token is
added once. The order of tokens means nothing: each of them appears once.

This module does not penalize.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class SeenTokens:
    """Distinct tokens of one request's prompt and output; output may only grow."""

    def __init__(self, prompt_ids: Int32) -> None:
        self._array: Int64 = np.unique(prompt_ids).astype(np.int64)
        self._known: set[int] = set(self._array.tolist())
        self._num_output = 0

    def ids(self, output_ids: Sequence[int]) -> Int64:
        """[n] each token of prompt and output once."""
        assert len(output_ids) >= self._num_output, "output tokens are never taken back"
        new = [t for t in dict.fromkeys(output_ids[self._num_output :]) if t not in self._known]
        self._num_output = len(output_ids)
        if new:
            self._known.update(new)
            self._array = np.append(self._array, np.array(new, dtype=np.int64))
        return self._array
