"""How far bounded replay is from exact: log probabilities and text, by tokens replayed.

    python tools/bounded_error.py [--prompts 8]

Prompts of a random tiny model are served, their windows and tails are dropped, and they are served
again with `--bounded-replay N`. Differences are those of log probabilities of the tokens generated
up to the first one that differs. Random weights forget slowly: trained models are expected to err
less; no figure of one is given here.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from statewise.runtime.models.tiny import TinySize, make_tiny_model  # noqa: E402
from support.model_recovery import Scene, Served  # noqa: E402

TRAILING = {"deepseek-v4": ("swa", "csa_tail", "hca_tail"), "gemma3": ("window",)}
REPLAYED = (16, 32, 48, 64)
LAYERS, WINDOW, LENGTH, NEW = 8, 16, 325, 24


def common(whole: Served, bounded: Served) -> int:
    """Tokens up to the first that differs."""
    pairs = zip(whole.tokens, bounded.tokens, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), NEW)


def measure(model: Path, arch: str, num_tokens: int, num_prompts: int) -> str:
    """One line: levels, largest and mean difference, prompts with the same text."""
    rng = random.Random(3)
    scene = Scene(
        model_path=str(model), page_size=16, max_total_tokens=4096, chunked_prefill_size=64,
        checkpoint_policy="ends", bounded_replay=num_tokens,
    )  # fmt: skip
    differences: list[float] = []
    same, levels = 0, set()
    for _ in range(num_prompts):
        prompt = [rng.randrange(256) for _ in range(LENGTH)]
        whole = scene.serve(prompt, NEW)
        for group in TRAILING[arch]:
            scene.lose(prompt, group)
        bounded = scene.serve(prompt, NEW)
        levels.add(bounded.report.level)
        count = common(whole, bounded)
        same += count == NEW
        pairs = list(zip(whole.logprobs, bounded.logprobs, strict=True))[: max(count, 1)]
        differences += [abs(a - b) for a, b in pairs]
    mean = sum(differences) / len(differences)
    return (
        f"| {arch} | {num_tokens} | {', '.join(sorted(levels))} | {max(differences):.4f} "
        f"| {mean:.5f} | {same} of {num_prompts} |"
    )


def table(num_prompts: int) -> Iterator[str]:
    """Markdown."""
    yield "| model | replayed | level | largest | mean | same text |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for arch in TRAILING:
        with tempfile.TemporaryDirectory() as directory:
            size = TinySize(layers=LAYERS, window=WINDOW)
            model = make_tiny_model(arch, Path(directory) / arch, size=size)
            for num_tokens in REPLAYED:
                yield measure(model, arch, num_tokens, num_prompts)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--prompts", type=int, default=8)
    args = parser.parse_args()
    for line in table(args.prompts):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
