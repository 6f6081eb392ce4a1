"""What transformers computes for a tiny checkpoint: the reference of the hybrid models' tests.

One sequence at a time, without padding and without a cache, so that nothing but the model's
formulas is compared.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from statewise.runtime.models.tiny import VOCAB_SIZE

transformers.utils.logging.disable_progress_bar()


@functools.cache
def oracle(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    ).eval()


@torch.no_grad()
def oracle_logits(path: Path, ids: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits [n, V] of every position of one full forward pass."""
    logits: Tensor = oracle(path, dtype)(ids.unsqueeze(0), use_cache=False).logits[0]
    return logits


def token_ids(length: int, seed: int = 0) -> Tensor:
    """Random token ids [length]."""
    return torch.randint(0, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed))


def pieces(ids: Tensor, sizes: Iterable[int]) -> Iterator[Tensor]:
    """Cut ids into pieces of the given sizes, the last size again and again."""
    at, size = 0, 1
    for size in sizes:
        if at < len(ids):
            yield ids[at : at + size]
            at += size
    while at < len(ids):
        yield ids[at : at + size]
        at += size


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-4) -> None:
    """Every logit within the tolerance, and logits that are worth comparing."""
    assert ours.shape == theirs.shape
    assert float(theirs.std()) > 0.1
    difference = float((ours.double() - theirs.double()).abs().max())
    assert difference <= tolerance, f"max |difference| {difference:.3g}"
