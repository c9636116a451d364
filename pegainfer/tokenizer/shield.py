"""Keeping client text from spelling control tokens in a rendered chat.

Before rendering, every special token's text inside client strings is replaced by one private character; what
still spells a special token after rendering is the template's own. Templates may trim, split and test the
strings as usual.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pegainfer.tokenizer.tokenizer import Tokenizer

__all__ = ["Shield"]

_PRIVATE = range(0x100000, 0x10FFFE)


class Shield:
    """One rendering's replacements. `protect` client values, render, then `encode` and `restore` the text."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        longest_first = sorted((token for token in special_tokens if token), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._characters: dict[str, str] = {}
        self._originals: dict[str, str] = {}
        self._free: Iterator[int] = iter(())

    def protect(self, values: Any) -> Any:
        """A copy of nested lists and objects whose strings (and keys) spell no special token, not even across
        neighbouring strings.
        """
        texts = list(_strings(values))
        taken = {ord(char) for char in set("".join(texts)) if char >= chr(_PRIVATE.start)}
        self._free = (code for code in _PRIVATE if code not in taken)
        if self._special is None:
            return values
        changed = False
        while spans := [match.span() for match in self._special.finditer("".join(texts))]:
            texts, changed = self._replace(texts, spans), True
        return _rebuild(values, iter(texts)) if changed else values

    def marker(self) -> str:
        """A character that no client string contains."""
        return chr(next(self._free))

    def restore(self, text: str) -> str:
        """`text` with what the private characters stand for."""
        return text.translate({ord(char): original for char, original in self._originals.items()})

    def encode(self, text: str, tokenizer: Tokenizer) -> list[int]:
        """Token ids of a rendered text. Only special tokens that the template wrote are control tokens."""
        if not self._originals or self._special is None:
            return tokenizer.encode(text, add_special_tokens=False)
        private = re.compile("[" + "".join(self._originals) + "]")
        ids: list[int] = []
        trusted, position = "", 0
        # Text between two control tokens is encoded as a whole, so that it splits into words as always.
        for match in [*self._special.finditer(text), None]:
            run = text[position : match.start() if match else len(text)]
            if private.search(run):
                ids += tokenizer.encode(trusted, add_special_tokens=False)
                ids += tokenizer.encode(self.restore(run), add_special_tokens=False, parse_special=False)
                trusted = ""
            else:
                trusted += run
            if match:
                trusted += match[0]
                position = match.end()
        return ids + tokenizer.encode(trusted, add_special_tokens=False)

    def _replace(self, texts: list[str], spans: list[tuple[int, int]]) -> list[str]:
        """`texts` with the parts of them that lie in `spans` of their concatenation replaced."""
        replaced, start = [], 0
        for text in texts:
            pieces, position = [], 0
            for low, high in spans:
                low, high = max(low - start, 0), min(high - start, len(text))
                if low < high:
                    pieces += [text[position:low], self._character(text[low:high])]
                    position = high
            replaced.append("".join([*pieces, text[position:]]))
            start += len(text)
        return replaced

    def _character(self, original: str) -> str:
        if original not in self._characters:
            character = self.marker()
            self._characters[original] = character
            self._originals[character] = original
        return self._characters[original]


def _strings(value: Any) -> Iterator[str]:
    """All strings and keys, in the order of `_rebuild`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _rebuild(value: Any, texts: Iterator[str]) -> Any:
    if isinstance(value, str):
        return next(texts)
    if isinstance(value, Mapping):
        return {next(texts): _rebuild(item, texts) for item in value.values()}
    if isinstance(value, list | tuple):
        return [_rebuild(item, texts) for item in value]
    return value
