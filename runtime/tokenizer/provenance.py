"""Text that knows, character by character, whether the template or a client wrote it.

A chat prompt mixes the template's text, which may contain control tokens, and text from clients,
which may not: a message that spells "<|im_end|>" must stay seven harmless tokens. So every
character of a rendered prompt carries its origin, and control tokens are recognised only where the
template wrote every character of them.

    value   <|im_start|>user: Ignore <|im_end|> this<|im_end|>
    trust   ##################.....................##########

`TemplateText` is a `str` (comparisons, searches and lookups are those of its value) that carries
`trust` through concatenation, slicing, stripping, splitting, joining and replacing. Whatever other
operation makes a new string gives a plain `str`, which counts as a client's: an operation that is
not covered here can lose a control token, never forge one.

This module does not render templates and does not know tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsIndex

from typing_extensions import override

TRUSTED, UNTRUSTED = b"\x01", b"\x00"


def trust_of(text: str) -> bytes:
    """One byte per character: 1 where the template wrote it."""
    return text.trust if isinstance(text, TemplateText) else UNTRUSTED * len(text)


def join_texts(parts: Iterable[str]) -> TemplateText:
    """Concatenate, keeping the origin of every character."""
    texts = list(parts)
    return TemplateText("".join(texts), b"".join(trust_of(t) for t in texts))


class TemplateText(str):
    """A string with the origin of each character."""

    __slots__ = ("trust",)
    trust: bytes

    def __new__(cls, value: str = "", trust: bytes | None = None) -> TemplateText:
        """Text of a client, unless `trust` (one byte per character) says otherwise."""
        self = super().__new__(cls, value)
        self.trust = UNTRUSTED * len(value) if trust is None else trust
        assert len(self.trust) == len(value)
        return self

    @classmethod
    def trusted(cls, value: str) -> TemplateText:
        """Text of the template."""
        return cls(value, TRUSTED * len(value))

    @property
    def plain(self) -> str:
        """The value alone."""
        return super().__getitem__(slice(None))

    def _part(self, start: int, stop: int) -> TemplateText:
        return TemplateText(str.__getitem__(self, slice(start, stop)), self.trust[start:stop])

    @override
    def __str__(self) -> str:
        return self

    @override
    def __add__(self, other: str) -> TemplateText:
        return join_texts((self, other))

    def __radd__(self, other: str) -> TemplateText:
        """Concatenate with a plain string on the left."""
        return join_texts((other, self))

    @override
    def __mul__(self, count: SupportsIndex) -> TemplateText:
        return TemplateText(super().__mul__(count), self.trust * count.__index__())

    @override
    def __rmul__(self, count: SupportsIndex) -> TemplateText:
        return self * count

    @override
    def __getitem__(self, key: SupportsIndex | slice) -> TemplateText:
        value = super().__getitem__(key)
        if isinstance(key, slice):
            return TemplateText(value, self.trust[key])
        index = key.__index__()
        return TemplateText(value, self.trust[index : index + 1 or None])

    @override
    def strip(self, chars: str | None = None) -> TemplateText:
        return self.lstrip(chars).rstrip(chars)

    @override
    def lstrip(self, chars: str | None = None) -> TemplateText:
        return self._part(len(self) - len(super().lstrip(chars)), len(self))

    @override
    def rstrip(self, chars: str | None = None) -> TemplateText:
        return self._part(0, len(super().rstrip(chars)))

    @override
    def removeprefix(self, prefix: str, /) -> TemplateText:
        return self._part(len(prefix) if self.startswith(prefix) else 0, len(self))

    @override
    def removesuffix(self, suffix: str, /) -> TemplateText:
        return self._part(0, len(self) - (len(suffix) if self.endswith(suffix) else 0))

    def _align(self, parts: list[str]) -> list[str]:
        """Give parts that occur in this text in this order their origins."""
        at, out = 0, []
        for part in parts:
            at = self.index(part, at)
            out.append(self._part(at, at + len(part)))
            at += len(part)
        return list(out)

    @override
    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        if sep is None:
            return self._align(super().split(None, maxsplit))
        return self._cut(super().split(sep, maxsplit), len(sep))

    @override
    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        if sep is None:
            return self._align(super().rsplit(None, maxsplit))
        return self._cut(super().rsplit(sep, maxsplit), len(sep))

    @override
    def splitlines(self, keepends: bool = False) -> list[str]:
        at, out = 0, []
        for kept, line in zip(super().splitlines(True), super().splitlines(), strict=True):
            out.append(self._part(at, at + len(kept if keepends else line)))
            at += len(kept)
        return list(out)

    @override
    def partition(self, sep: str, /) -> tuple[str, str, str]:
        head, middle, _ = super().partition(sep)
        cut = len(head) + len(middle)
        return self._part(0, len(head)), self._part(len(head), cut), self._part(cut, len(self))

    @override
    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        head, middle, _ = super().rpartition(sep)
        cut = len(head) + len(middle)
        return self._part(0, len(head)), self._part(len(head), cut), self._part(cut, len(self))

    def _cut(self, parts: list[str], gap: int) -> list[str]:
        """Give parts that are `gap` characters apart their origins."""
        at, out = 0, []
        for part in parts:
            out.append(self._part(at, at + len(part)))
            at += len(part) + gap
        return list(out)

    @override
    def join(self, parts: Iterable[str], /) -> TemplateText:
        pieces: list[str] = []
        for i, part in enumerate(parts):
            pieces += [self, part] if i else [part]
        return join_texts(pieces)

    @override
    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> TemplateText:
        if old == "":
            return TemplateText(super().replace(old, new, count))
        replacement = new if isinstance(new, TemplateText) else TemplateText(new)
        return replacement.join(self.split(old, count))

    def _mapped(self, value: str) -> TemplateText:
        """Keep the origins of a value mapped character by character; else it is a client's."""
        return TemplateText(value, self.trust if len(value) == len(self) else None)

    @override
    def lower(self) -> TemplateText:
        return self._mapped(super().lower())

    @override
    def upper(self) -> TemplateText:
        return self._mapped(super().upper())

    @override
    def capitalize(self) -> TemplateText:
        return self._mapped(super().capitalize())

    @override
    def title(self) -> TemplateText:
        return self._mapped(super().title())
