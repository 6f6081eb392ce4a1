"""How byte-level vocabularies split text before merging, by the name GGUF files give it.

The expressions are those of the models' published tokenizer.json files; merges never cross a split,
so a wrong one gives other tokens for the same text. A name not listed here is refused.

This module does not build tokenizers' vocabularies.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|{WORD}|\p{{N}}{{1,3}}|{REST}"
QWEN2 = rf"{CONTRACTIONS}|{WORD}|\p{{N}}|{REST}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
EDGE = r"[^\r\n\p{L}\p{N}]?"
TEKKEN = rf"{EDGE}{UPPER}*{LOWER}+|{EDGE}{UPPER}+{LOWER}*|\p{{N}}|{REST_WITH_SLASH}"
GPT4O = (
    rf"{EDGE}{UPPER}*{LOWER}+{CONTRACTIONS}?|{EDGE}{UPPER}+{LOWER}*{CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{REST_WITH_SLASH}"
)
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True)
class PreTokenizer:
    """A way to split. `patterns` empty: GPT-2's expression, which the library has built in."""

    patterns: tuple[str, ...] = ()
    splits_digits: bool = False  # before everything else, each digit is alone
    ignores_merges: bool = False  # a split that is a token needs no merges
    normalises: bool = False  # to Unicode NFC
    adds_bos: bool = False  # where the file does not say

    def normalizer(self) -> normalizers.Normalizer | None:
        """Return what is done to the text first."""
        return normalizers.NFC() if self.normalises else None

    def splitter(self) -> pre_tokenizers.PreTokenizer:
        """Return the splits, ending in the byte-level alphabet."""
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.splits_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps += [pre_tokenizers.Split(Regex(p), "isolated") for p in self.patterns]
        uses_builtin = not self.patterns
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=uses_builtin))
        return pre_tokenizers.Sequence(steps)


GPT2_LIKE = PreTokenizer()
DIGITS_LIKE = PreTokenizer(splits_digits=True)
LLAMA3_LIKE = PreTokenizer((LLAMA3,), ignores_merges=True, adds_bos=True)
QWEN2_LIKE = PreTokenizer((QWEN2,), normalises=True)

PRE_TOKENIZERS = {
    "gpt-2": GPT2_LIKE,
    "gpt2": GPT2_LIKE,
    "olmo": GPT2_LIKE,
    "jais": GPT2_LIKE,
    "mpt": GPT2_LIKE,
    "smollm": DIGITS_LIKE,
    "starcoder": DIGITS_LIKE,
    "refact": DIGITS_LIKE,
    "command-r": DIGITS_LIKE,
    "codeshell": DIGITS_LIKE,
    "exaone": DIGITS_LIKE,
    "llama3": LLAMA3_LIKE,
    "llama-v3": LLAMA3_LIKE,
    "llama-bpe": LLAMA3_LIKE,
    "qwen2": QWEN2_LIKE,
    "deepseek-r1-qwen": QWEN2_LIKE,
    "tekken": PreTokenizer((TEKKEN,), ignores_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizer((GPT4O,)),
    "deepseek-v3": PreTokenizer(DEEPSEEK3),
}
