"""Text from a growing list of token ids, whole characters only.

Bytes that may be the beginning of a character are held back until the character is complete. Bytes that
cannot be part of one become U+FFFD at once. What is still held at the end is dropped, so that a streamed
answer and one in a single piece are the same text.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from pegainfer.tokenizer.tokenizer import Tokenizer

__all__ = ["Detokenizer"]


class Detokenizer:
    """The state of one output. Work per token does not depend on the length of the text."""

    __slots__ = ("_decoder", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped: frozenset[int] = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; may be empty."""
        token_bytes, skipped = self._tokenizer.token_bytes, self._skipped
        return self._decoder.decode(b"".join(token_bytes(i) for i in token_ids if i not in skipped))
