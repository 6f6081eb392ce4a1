"""Open the tokenizer of a model: from a Hugging Face directory, a GGUF file, or a known name.

    load_tokenizer(path or name, chat_template) -> Tokenizer

A directory needs tokenizer.json; the chat template is in chat_template.jinja, chat_template.json or
tokenizer_config.json (in this order). No torch.

This module does not encode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from statewise.runtime.clock import SystemClock
from statewise.runtime.errors import ModelLoadError
from statewise.runtime.models.gguf_file import GgufFile
from statewise.runtime.models.inspection import read_json
from statewise.runtime.models.locate import locate_model
from statewise.runtime.tokenizer.gguf_vocabulary import read_vocabulary
from statewise.runtime.tokenizer.hf_codec import codec_from_json, special_tokens
from statewise.runtime.tokenizer.template import ChatTemplate
from statewise.runtime.tokenizer.tokenizer import Tokenizer

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


def load_tokenizer(
    path_or_name: str | Path,
    *,
    chat_template: str | Path = "",
    now: Callable[[], float] | None = None,
) -> Tokenizer:
    """Open a model's tokenizer.

    `chat_template` is a file that replaces the model's own template; `now` is what templates see
    as the time (seconds since the epoch). Raises ModelLoadError for what is absent or unknown.
    """
    files = locate_model(path_or_name)
    template_file = Path(chat_template) if chat_template else None
    clock = now or SystemClock().wall
    if files.format == "gguf":
        return _from_gguf(GgufFile(files.path), template_file, clock)
    return _from_directory(files.path, template_file, clock)


def _from_gguf(file: GgufFile, template_file: Path | None, now: Callable[[], float]) -> Tokenizer:
    vocabulary = read_vocabulary(file)
    tokens = file.get("tokenizer.ggml.tokens")
    texts = {name: tokens[i] for name, i in vocabulary.special_names.items()}
    return Tokenizer(
        vocabulary.codec,
        vocabulary.specials,
        special_names=vocabulary.special_names,
        prefix_ids=vocabulary.prefix_ids,
        suffix_ids=vocabulary.suffix_ids,
        template=_template(vocabulary.chat_template, template_file, texts, now),
    )


def _from_directory(
    directory: Path, template_file: Path | None, now: Callable[[], float]
) -> Tokenizer:
    file = directory / "tokenizer.json"
    if not file.is_file():
        raise ModelLoadError(f"{file}: file is missing (the only tokenizer format read here)")
    text = file.read_text(encoding="utf-8")
    codec = codec_from_json(text, str(file))
    specials = special_tokens(text)
    config = _optional_json(directory / "tokenizer_config.json")
    texts = _special_texts(_optional_json(directory / "special_tokens_map.json") | config)
    ids = {token.text: token.id for token in specials}
    prefix, suffix = codec.special_affixes()
    return Tokenizer(
        codec,
        specials,
        special_names={name: ids[text] for name, text in texts.items() if text in ids},
        prefix_ids=prefix,
        suffix_ids=suffix,
        template=_template(_directory_template(directory, config), template_file, texts, now),
    )


def _optional_json(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


def _special_texts(config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of the special tokens by role; a value is a string or an object with `content`."""
    values = {name: config.get(name) for name in SPECIAL_NAMES}
    texts = {n: v.get("content") if isinstance(v, dict) else v for n, v in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _directory_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    jinja = directory / "chat_template.jinja"
    if jinja.is_file():
        return jinja.read_text(encoding="utf-8")
    value = _optional_json(directory / "chat_template.json").get("chat_template")
    value = config.get("chat_template") if value is None else value
    if isinstance(value, list):  # several named templates
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _template(
    source: str | None,
    template_file: Path | None,
    special_texts: Mapping[str, str],
    now: Callable[[], float],
) -> ChatTemplate | None:
    if template_file is not None:
        try:
            source = template_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelLoadError(f"{template_file}: cannot read the template: {error}") from error
    return None if source is None else ChatTemplate(source, special_texts, now)
