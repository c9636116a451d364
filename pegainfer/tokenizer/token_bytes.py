"""From a token id to the bytes that the token stands for.

A vocabulary spells bytes in one of two ways: *byte level* (each byte is one printable character, as GPT-2
began) or *SentencePiece* (`▁` for a space, `<0xE4>` for a byte that is no whole character).
"""

from __future__ import annotations

import json
import re
from enum import StrEnum
from typing import Any

import tokenizers

from pegainfer.errors import TokenizerError

__all__ = ["Spelling", "TokenBytes", "byte_level_alphabet", "spelling_of"]

_HEX_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class Spelling(StrEnum):
    """How a vocabulary writes bytes as text."""

    byte_level = "byte_level"
    sentencepiece = "sentencepiece"


def byte_level_alphabet() -> dict[int, str]:
    """The character of each byte: itself if it is visible, else one from U+0100 on, in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


_FROM_BYTE_LEVEL = {char: byte for byte, char in byte_level_alphabet().items()}


def spelling_of(backend: tokenizers.Tokenizer) -> tuple[Spelling, bool]:
    """The spelling, and whether a whole text loses one leading space. Raises `TokenizerError` for another
    kind of vocabulary.
    """
    decoder = backend.decoder
    state: Any = json.loads(decoder.__getstate__()) if decoder is not None else {"type": "no decoder"}
    parts: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return Spelling.byte_level, False
    if kinds & {"Metaspace", "ByteFallback"} or {"Replace", "Fuse"} <= kinds:
        strips = any(part["type"] == "Strip" and part.get("start", 0) > 0 for part in parts)
        prepends = any(
            part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never" for part in parts
        )
        return Spelling.sentencepiece, strips or prepends
    raise TokenizerError(
        f"the tokenizer decodes with {', '.join(sorted(kinds))}; "
        "supported are byte-level BPE and SentencePiece vocabularies"
    )


class TokenBytes:
    """Bytes of tokens, looked up once each. Ids without a token are empty."""

    def __init__(self, backend: tokenizers.Tokenizer, spelling: Spelling, added: dict[int, str]) -> None:
        self._backend = backend
        self._spelling = spelling
        self._known = {token: text.encode() for token, text in added.items()}

    def __getitem__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
        try:
            text = self._backend.id_to_token(token_id)
        except OverflowError:
            return b""
        if text is None:
            return b""
        if self._spelling is Spelling.sentencepiece:
            match = _HEX_BYTE.fullmatch(text)
            return bytes([int(match[1], 16)]) if match else text.replace(_SPACE, " ").encode()
        try:
            return bytes([_FROM_BYTE_LEVEL[char] for char in text])
        except KeyError:
            return text.encode()
