"""Text to token ids and back, and conversations to prompts: one class for every kind of model.

    text --cut at control tokens--> pieces --codec--> ids          encode
    conversation --template--> text with origins --cut--> ids      encode_chat
    ids --bytes--> text                                            decode, decoder

Control tokens are recognised in prompts that a program wrote (`encode`), and in conversations only
where the template wrote them (`encode_chat`): no message can end its own turn.

This module does not know file formats (`load` does).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from statewise.runtime.errors import InvalidRequestError
from statewise.runtime.sampling_params import SamplingParams
from statewise.runtime.tokenizer.codec import TextCodec
from statewise.runtime.tokenizer.provenance import TemplateText
from statewise.runtime.tokenizer.specials import SpecialToken, SpecialTokens
from statewise.runtime.tokenizer.surface import IncrementalDecoder, decode_bytes
from statewise.runtime.tokenizer.template import ChatTemplate

SURROGATE = re.compile("[\ud800-\udfff]")


class Tokenizer:
    """A vocabulary, its control tokens and its chat template."""

    def __init__(
        self,
        codec: TextCodec,
        specials: Sequence[SpecialToken],
        *,
        special_names: Mapping[str, int],
        prefix_ids: Sequence[int] = (),
        suffix_ids: Sequence[int] = (),
        template: ChatTemplate | None = None,
    ) -> None:
        """`special_names`: ids by role (bos_token, eos_token, pad_token, unk_token)."""
        self._codec = codec
        self._specials = SpecialTokens(specials)
        self._special_texts = {t.id: t.text for t in specials}
        self.special_ids = self._specials.ids
        self.vocab_size = max(codec.vocab_size, 1 + max(self.special_ids, default=-1))
        self.bos_token_id = special_names.get("bos_token")
        self.eos_token_id = special_names.get("eos_token")
        self.pad_token_id = special_names.get("pad_token")
        self._prefix_ids = list(prefix_ids)
        self._suffix_ids = list(suffix_ids)
        self._template = template

    @property
    def chat_template(self) -> str | None:
        """Source of the chat template; None for a base model."""
        return None if self._template is None else self._template.source

    # ------------------------------------------------------------- text to ids

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of a text in which control tokens count.

        `add_special` adds what the vocabulary puts around a prompt (BOS, rarely EOS).
        """
        ids = self._encode(text, None)
        return self._prefix_ids + ids + self._suffix_ids if add_special else ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text in which nothing is a control token, and to which nothing is added."""
        return self._codec.encode(_valid(text), True)

    def encode_chat(self, chat: Mapping[str, Any]) -> list[int]:
        """Ids of a conversation: its prompt, in which only the template writes control tokens.

        `chat`: "messages", and optionally "tools", "continue" (the last message is left open),
        "generation_prompt" (default true) and "variables" of the template. Raises
        InvalidRequestError for a model without template, or what the template refuses.
        """
        text = self.render_chat(chat)
        return self._encode(text.plain, text.trust)

    def render_chat(self, chat: Mapping[str, Any]) -> TemplateText:
        """Prompt of a conversation as text; see `encode_chat`."""
        if self._template is None:
            raise InvalidRequestError(
                "the model has no chat template (it is a base model): "
                "use a completion, or give the server a --chat-template"
            )
        return self._template.render(
            chat["messages"],
            tools=chat.get("tools"),
            generation_prompt=chat.get("generation_prompt", True),
            continue_last=chat.get("continue", False),
            variables=chat.get("variables"),
        )

    def _encode(self, text: str, trust: bytes | None) -> list[int]:
        ids: list[int] = []
        for piece in self._specials.cut(_valid(text), trust):
            if piece.token_id >= 0:
                ids.append(piece.token_id)
            else:
                ids += self._codec.encode(piece.text, piece.start == 0)
        return ids

    # ------------------------------------------------------------- ids to text

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids that stand alone; ids outside the vocabulary give nothing."""
        data = b"".join(self._shown_bytes(i, skip_special) for i in token_ids)
        text = decode_bytes(data)
        return text.removeprefix(" ") if self._codec.strips_space else text

    def decoder(self, sampling: SamplingParams) -> IncrementalDecoder:
        """Return a decoder for one output that continues a prompt."""
        skips = sampling.skip_special_tokens
        return IncrementalDecoder(lambda token_id: self._shown_bytes(token_id, skips))

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; of a control token its name's."""
        name = self._special_texts.get(token_id)
        return self._codec.token_bytes(token_id) if name is None else name.encode()

    def token_text(self, token_id: int) -> str:
        """One token's text on its own; part of a character shows as U+FFFD."""
        return decode_bytes(self.token_bytes(token_id))

    def all_token_bytes(self) -> list[bytes]:
        """Bytes of every token by id (what grammars are compiled against)."""
        return [self.token_bytes(i) for i in range(self.vocab_size)]

    def _shown_bytes(self, token_id: int, skips_special: bool) -> bytes:
        if token_id in self.special_ids:
            return b"" if skips_special else self.token_bytes(token_id)
        return self._codec.token_bytes(token_id)


def _valid(text: str) -> str:
    """Text of the same length without surrogates (which UTF-8 cannot hold): U+FFFD instead."""
    return text if text.isascii() else SURROGATE.sub("\ufffd", text)
