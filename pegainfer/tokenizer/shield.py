"""Keeping client text from spelling control tokens in a rendered chat.

Before rendering, every special token's text inside client strings is replaced by one private character, and
so are the beginnings and ends of one at the edges of a string, which could complete each other. What still
spells a special token after rendering is the template's own. Templates may trim, split and test the strings
as usual.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pegainfer.tokenizer.tokenizer import Tokenizer

__all__ = ["Shield"]

_PRIVATE = range(0x100000, 0x10FFFE)


@dataclass(frozen=True, slots=True)
class _Rules:
    """What to look for: special tokens, proper beginnings and proper ends of them."""

    special: re.Pattern[str]
    heads: frozenset[str]
    tails: frozenset[str]
    longest: int


@lru_cache(maxsize=4)
def _make_rules(special_tokens: tuple[str, ...]) -> _Rules | None:
    longest_first = sorted(filter(None, special_tokens), key=len, reverse=True)
    if not longest_first:
        return None
    return _Rules(
        re.compile("|".join(map(re.escape, longest_first))),
        frozenset(token[:size] for token in longest_first for size in range(1, len(token))),
        frozenset(token[size:] for token in longest_first for size in range(1, len(token))),
        len(longest_first[0]),
    )


class Shield:
    """One rendering's replacements: `protect` client values, render, then `encode` and `restore` the text."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        self._rules = _make_rules(tuple(special_tokens))
        self._characters: dict[str, str] = {}
        self._originals: dict[str, str] = {}
        self._free: Iterator[int] = iter(())

    def protect(self, values: Any) -> Any:
        """A copy of nested lists and objects none of whose strings and keys spells a special token, or a part
        of one at its edge.
        """
        taken = {ord(char) for text in _strings(values) if not text.isascii() for char in text}
        self._free = (code for code in _PRIVATE if code not in taken)
        return self._copy(values) if self._rules is not None else values

    def marker(self) -> str:
        """A character that no client string contains."""
        return chr(next(self._free))

    def restore(self, text: str) -> str:
        """`text` with what the private characters stand for."""
        return text.translate({ord(char): original for char, original in self._originals.items()})

    def encode(self, text: str, tokenizer: Tokenizer) -> list[int]:
        """Token ids of a rendered text. Only special tokens that the template wrote are control tokens."""
        if not self._originals or self._rules is None:
            return tokenizer.encode(text, add_special_tokens=False)
        private = re.compile("[" + "".join(self._originals) + "]")
        ids: list[int] = []
        trusted, position = "", 0
        # Text between two control tokens is encoded as a whole, so that it splits into words as always.
        for match in [*self._rules.special.finditer(text), None]:
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

    def _copy(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._disarm(value)
        if isinstance(value, Mapping):
            return {self._disarm(str(key)): self._copy(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._copy(item) for item in value]
        return value

    def _disarm(self, text: str) -> str:
        """`text` with its dangerous parts replaced."""
        rules = self._rules
        assert rules is not None
        text = rules.special.sub(lambda match: self._character(match[0]), text)
        reach = range(min(rules.longest - 1, len(text)), 0, -1)
        head = next((size for size in reach if text[-size:] in rules.heads), 0)
        if head:
            text = text[:-head] + self._character(text[-head:])
        tail = next((size for size in reach if text[:size] in rules.tails), 0)
        return self._character(text[:tail]) + text[tail:] if tail else text

    def _character(self, original: str) -> str:
        if original not in self._characters:
            character = self.marker()
            self._characters[original] = character
            self._originals[character] = original
        return self._characters[original]


def _strings(value: Any) -> Iterator[str]:
    """All strings and keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
