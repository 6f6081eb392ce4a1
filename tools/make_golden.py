"""Write the golden files of real models: what transformers makes of texts, chats and prompts.

    python tools/make_golden.py smollm2-135m gemma3-270m

Loading a GGUF file with transformers takes up to a minute, so its answers are kept in
tests/differential/golden/<name>.json: token ids of varied texts and conversations, and 64 greedy
tokens in float32 for ten prompts, each with the gap between the two highest logits, so that a test
can tell a near tie from an error. Needs the development dependencies.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from statewise.runtime.models.locate import locate_model

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "differential" / "golden"
NUM_TOKENS = 64

TEXTS = [
    "",
    " ",
    "a",
    " a",
    "Hello, world!",
    "hello  two   spaces    four",
    "tabs\tand\nnewlines\r\nand\n\n\nmore\n",
    " leading and trailing ",
    "      ",
    "\n",
    "\n\n \n",
    "The quick brown fox jumps over the lazy dog.",
    "don't won't I'll they've you're it's HE'S DON'T",
    "1 12 123 1234 12345 1,234.56 0xFF 3.14159e-10",
    "x=1;y=x+2**3//4%5<<6>>7&8|9^10~11",
    "def f(a, b=None):\n    return a if b is None else b\n",
    "for (int i = 0; i < n; ++i) { sum += a[i]; }",
    '{"key": ["value", 1, true, null], "nested": {"a": "b\\n"}}',
    "<html><body class='x'>Text &amp; more</body></html>",
    "https://example.com/path?query=1&other=two#fragment",
    "someone@example.org, C:\\Users\\name\\file.txt",
    "naïve café déjà vu, Ångström, Straße, ﬁligree",
    "e\u0301 versus é, A\u030a versus Å",
    "Привет, мир! Как дела?",
    "你好，世界。今天天气很好。",
    "こんにちは世界。カタカナとひらがな。",
    "안녕하세요 세계",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "Ελληνικά γράμματα",
    "🙂🙃🚀👩‍👩‍👧‍👦🏳️‍🌈 emoji",
    "math: ∑ᵢ xᵢ² ≤ ∞, α→β, ½ ¾ ² ³",
    "zero\u200bwidth\u00a0nbsp\u2003em\u3000ideographic\ufeffbom",
    "quotes “curly” ‘single’ «guillemets» … — –",
    "\u0000\u0001\u001b[31mcontrol\u007f",
    "CamelCaseWord snake_case_word kebab-case-word SCREAMING_CASE",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "!!!???...,,,;;;:::---___===+++***###@@@$$$%%%^^^&&&",
    "▁underscore▁metaspace ▁▁",
    "<0x41> <0x0A> looks like bytes",
    "<unused1> <mask> [multimodal] <table><b>",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝓼𝓬𝓻𝓲𝓹𝓽 𝟙𝟚𝟛",
    "mixed العربية and עברית with English 中文",
]
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is 2 + 3?"}],
    [
        {"role": "system", "content": "You answer briefly."},
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "  Another one?\n"},
    ],
]
PROMPTS = [
    "The capital of France is",
    "The three primary colors are",
    "Water boils at a temperature of",
    "Once upon a time, there was a little girl who",
    "def fibonacci(n):\n",
    "In 1969, the first humans",
    "Question: What do bees make?\nAnswer:",
    "List of fruits: apple, banana,",
    "Les langues parlées en Suisse sont",
    "The mitochondria is",
]


def main() -> None:
    """Write one golden file for each name."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "names", nargs="+", metavar="NAME", help="a model, as --model-path takes it"
    )
    for name in parser.parse_args().names:
        GOLDEN.mkdir(parents=True, exist_ok=True)
        text = json.dumps(golden(name), ensure_ascii=True, indent=1)
        (GOLDEN / f"{name}.json").write_text(text + "\n")


@torch.no_grad()
def golden(name: str) -> dict[str, Any]:
    """Return what transformers says about one model."""
    path = locate_model(name).path
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    model.eval()
    chats = CHATS if tokenizer.chat_template else []
    return {
        "model": name,
        "oracle": f"transformers {transformers.__version__}, float32",
        "texts": [{"text": t, "ids": tokenizer(t).input_ids} for t in TEXTS],
        "chats": [{"messages": c, "ids": _chat_ids(tokenizer, c)} for c in chats],
        "greedy": [greedy(model, tokenizer, prompt) for prompt in PROMPTS],
    }


def greedy(model: Any, tokenizer: Any, prompt: str) -> dict[str, Any]:
    """Greedy continuation of one prompt; it does not stop at the end of a text."""
    prompt_ids = tokenizer(prompt).input_ids
    cache = DynamicCache(config=model.config)
    ids: list[int] = []
    gaps: list[float] = []
    step = torch.tensor([prompt_ids])
    for _ in range(NUM_TOKENS):
        logits = model(step, past_key_values=cache, use_cache=True).logits[0, -1]
        top = logits.topk(2)
        ids.append(int(top.indices[0]))
        gaps.append(round(float(top.values[0] - top.values[1]), 6))
        step = torch.tensor([[ids[-1]]])
    return {"prompt": prompt, "prompt_ids": prompt_ids, "ids": ids, "gaps": gaps}


def _chat_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


if __name__ == "__main__":
    main()
