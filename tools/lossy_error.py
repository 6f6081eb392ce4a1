"""What lossy copies cost and save on real models: bytes, logits, and how often the choice differs.

    python tools/lossy_error.py [--models smollm2-135m,gemma3-270m] [--prompts 8] [--tokens 512]

A prompt (text of this project's documents) is computed and continued greedily; its state leaves
the device and comes back from host memory, quantised in between. Then, with the same prefix:

    forced   the exact continuation is read over the state that came back: logits of every token of
             it beside the exact ones, and whether the likeliest token is the same
    free     the prompt is continued again: tokens up to the first that differs

The host tier is used because it is at hand; what comes back is the same from every tier.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from statewise.radix import CostModel  # noqa: E402
from statewise.radix.lossy import KINDS  # noqa: E402
from statewise.runtime.clock import SystemClock  # noqa: E402
from statewise.runtime.config import checked  # noqa: E402
from statewise.runtime.engine.build import build_runtime  # noqa: E402
from statewise.runtime.messages import (  # noqa: E402
    LogprobOptions,
    TokenDelta,
    TokenizedRequest,
    pack_ids,
)
from statewise.runtime.sampling_params import SamplingParams  # noqa: E402
from statewise.runtime.tokenizer.load import load_tokenizer  # noqa: E402
from support.tier_engine import SLOW_TOKENS_PER_S, forget_device, settle  # noqa: E402

NEW = 64
NONE = "none"


@dataclass
class Tally:
    """What was seen of one model and kind."""

    saved: float = 0.0  # share of the exact copies' bytes
    rate: float = 0.0  # bytes of blocks per second, on the way back
    largest: list[float] = field(default_factory=list)  # of each token's logits
    mean: list[float] = field(default_factory=list)
    forced: int = 0  # tokens whose likeliest is the same
    free: list[int] = field(default_factory=list)  # tokens up to the first that differs

    def line(self, model: str, kind: str) -> str:
        """One row of the table."""
        num = len(self.largest)
        cells = [
            model, kind, f"{self.saved:.1%}", f"{self.rate / 1e9:.2f}",
            f"{max(self.largest):.3f}", f"{sum(self.mean) / num:.4f}",
            f"{self.forced} of {num}",
            f"{sum(n == NEW for n in self.free)} of {len(self.free)}",
            f"{sum(self.free) / len(self.free):.1f}",
        ]  # fmt: skip
        return "| " + " | ".join(cells) + " |"


class Bench:
    """One engine whose state goes through host memory."""

    def __init__(self, model: str, kind: str, longest: int) -> None:
        settings = {
            "model_path": model, "host_cache_gb": 0.5, "lossy_tiers": kind, "page_size": 16,
            "max_total_tokens": 4 * longest, "max_window_tokens": 4 * longest,
            "skip_tokenizer_init": True,
        }  # fmt: skip
        built = build_runtime(checked(settings))
        self.core = built.core(SystemClock())
        self._model = built.model
        model_cost = self.core.cache.cost.model
        self.rate = float(self.core.stats()["cost_model"]["tiers"]["host"]["bytes_per_s"])
        slow = CostModel.uniform(model_cost.num_layers, SLOW_TOKENS_PER_S, chunk=model_cost.chunk)
        self.core.use_cost(replace(slow, tiers=model_cost.tiers))
        self._num = 0

    @property
    def page_bytes(self) -> int:
        """Bytes of the copies of one page, all groups."""
        assert self.core.cache.tiering is not None
        return sum(shape.block_bytes for shape in self.core.cache.tiering.tiers.shapes)

    def leave(self) -> None:
        """All state goes to the host; nothing stays on the device."""
        settle(self.core)
        forget_device(self.core)

    def go_on(self, prompt: list[int]) -> tuple[list[int], TokenDelta]:
        """Greedy continuation."""
        params = SamplingParams(max_new_tokens=NEW, temperature=0.0, ignore_eos=True)
        return self._run(prompt, params, LogprobOptions())

    def logits(self, prompt: list[int], more: list[int]) -> tuple[torch.Tensor, TokenDelta]:
        """[len(more), V] logits that choose each token of `more`."""
        seen: list[torch.Tensor] = []
        logits = self._model.logits

        def recorded(hidden: torch.Tensor) -> torch.Tensor:
            found = logits(hidden)
            seen.append(found.clone())
            return found

        self._model.logits = recorded  # type: ignore[method-assign]
        try:
            params = SamplingParams(max_new_tokens=0)
            asked = LogprobOptions(enabled=True, start=len(prompt))
            _, last = self._run(prompt + more, params, asked)
        finally:
            self._model.logits = logits  # type: ignore[method-assign]
        return torch.cat(seen)[: len(more)], last

    def _run(
        self, prompt: list[int], params: SamplingParams, logprob: LogprobOptions
    ) -> tuple[list[int], TokenDelta]:
        self._num += 1
        request = TokenizedRequest(f"r{self._num}", pack_ids(prompt), params, logprob=logprob)
        self.core.add_request(request)
        tokens: list[int] = []
        while True:
            for delta in self.core.step():
                tokens += delta.token_ids
                if delta.finish is not None:
                    assert delta.finish.kind == "length", delta.finish
                    return tokens, delta


def prompts(model: str, num: int, length: int) -> list[list[int]]:
    """Pieces of the documents, tokenized."""
    tokenizer = load_tokenizer(model)
    text = "\n".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    ids = tokenizer.encode(text)
    assert len(ids) >= num * length, f"the documents have {len(ids)} tokens"
    step = len(ids) // num
    return [ids[i * step : i * step + length] for i in range(num)]


def measure(model: str, kind: str, texts: list[list[int]], exact_bytes: int) -> tuple[Tally, int]:
    """Figures of one kind; bytes of a page's copies."""
    bench = Bench(model, kind, len(texts[0]) + 2 * NEW)
    tally = Tally(rate=bench.rate)
    for prompt in texts:
        more, _ = bench.go_on(prompt)
        wanted, hit = bench.logits(prompt, more)
        assert hit.report is not None
        assert not hit.report.lossy
        bench.leave()
        found, loaded = bench.logits(prompt, more)
        assert loaded.report is not None
        assert loaded.report.loaded > len(prompt) // 2, loaded.report.reason
        bench.leave()
        again, _ = bench.go_on(prompt)
        difference = (found - wanted).abs()
        tally.largest += difference.amax(-1).tolist()
        tally.mean += difference.mean(-1).tolist()
        tally.forced += int((found.argmax(-1) == wanted.argmax(-1)).sum())
        pairs = zip(more, again, strict=True)
        tally.free.append(next((i for i, (a, b) in enumerate(pairs) if a != b), NEW))
        bench.core.flush()
    size = bench.page_bytes
    tally.saved = 1.0 - size / (exact_bytes or size)
    bench.core.close()
    return tally, size


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--models", default="smollm2-135m,gemma3-270m")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args()
    print("| model | copies | bytes saved | back, GB/s | largest | mean | same choice | same text "
          "| tokens up to a difference |")  # fmt: skip
    print("|" + " --- |" * 9)
    for model in args.models.split(","):
        texts = prompts(model, args.prompts, args.tokens)
        exact_bytes = 0
        for kind in (NONE, *KINDS):
            tally, size = measure(model, kind, texts, exact_bytes)
            exact_bytes = exact_bytes or size
            assert all(math.isfinite(value) for value in tally.largest)
            print(tally.line(model, kind), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
