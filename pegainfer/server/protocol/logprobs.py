"""Log-probabilities as clients read them, in the shapes of both routes and of `prompt_logprobs`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from pegainfer.errors import RequestError
from pegainfer.scheduler.plan import TokenLogprobs
from pegainfer.tokenizer.detokenizer import Detokenizer
from pegainfer.tokenizer.tokenizer import Tokenizer

__all__ = ["CompletionLogprobs", "TokenNames", "chat_logprobs", "joined", "prompt_logprobs"]

_LEAST = -9999.0
"""What stands for minus infinity, which JSON cannot carry."""


class TokenNames:
    """How tokens are called: by their text, or as `token_id:7` if that is asked for or there is no text."""

    __slots__ = ("_as_ids", "tokenizer")

    def __init__(self, tokenizer: Tokenizer | None, *, as_ids: bool = False) -> None:
        self.tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def name(self, token_id: int) -> str:
        """The name of a token."""
        if self._as_ids or self.tokenizer is None:
            return f"token_id:{token_id}"
        return self.tokenizer.token_text(token_id)

    def utf8(self, token_id: int) -> list[int] | None:
        """The bytes that a token really stands for; None without a tokenizer."""
        return None if self.tokenizer is None else list(self.tokenizer.token_bytes(token_id))


class CompletionLogprobs:
    """Log-probabilities of one growing completion. Remembers where in the text the next token begins."""

    __slots__ = ("_detokenizer", "_names", "_offset")

    def __init__(self, names: TokenNames, *, skip_special_tokens: bool) -> None:
        self._names = names
        self._offset = 0
        self._detokenizer = None
        if names.tokenizer is not None:
            self._detokenizer = Detokenizer(names.tokenizer, skip_special_tokens=skip_special_tokens)

    def start(self, first_token_id: int) -> dict[str, list[Any]]:
        """The entry of a prompt's first token, which nothing precedes."""
        return {
            "text_offset": [self._place(first_token_id)],
            "token_logprobs": [None],
            "tokens": [self._names.name(first_token_id)],
            "top_logprobs": [None],
        }

    def add(self, entries: Iterable[TokenLogprobs]) -> dict[str, list[Any]]:
        """The next tokens, as the object that a completion carries."""
        offsets, values, tokens, tops = [], [], [], []
        for entry in entries:
            offsets.append(self._place(entry.token_id))
            values.append(_finite(entry.logprob))
            tokens.append(self._names.name(entry.token_id))
            tops.append(self._top(entry))
        return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}

    def _place(self, token_id: int) -> int:
        start = self._offset
        if self._detokenizer is not None:
            self._offset += len(self._detokenizer.push((token_id,)))
        return start

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens and the one that stands there; of several with one name the likeliest."""
        top: dict[str, float] = {}
        for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
            top.setdefault(self._names.name(token_id), _finite(logprob))
        top.setdefault(self._names.name(entry.token_id), _finite(entry.logprob))
        return top


def joined(parts: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Several objects of `CompletionLogprobs` as one."""
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


def chat_logprobs(names: TokenNames, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """The object that a chat choice carries."""
    return {
        "content": [
            {
                **_named(names, entry.token_id, entry.logprob),
                "top_logprobs": [
                    _named(names, token_id, logprob)
                    for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
                ],
            }
            for entry in entries
        ]
    }


def prompt_logprobs(
    tokenizer: Tokenizer | None, entries: Iterable[TokenLogprobs]
) -> list[dict[str, dict[str, Any]] | None]:
    """By position of the prompt: the first has none, each other one maps ids to what is known of them."""
    positions: list[dict[str, dict[str, Any]] | None] = [None]
    for entry in entries:
        known = {str(entry.token_id): _known(tokenizer, entry.token_id, entry.logprob, entry.rank)}
        for rank, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1):
            known.setdefault(str(token_id), _known(tokenizer, token_id, logprob, rank))
        positions.append(known)
    return positions


def _named(names: TokenNames, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": names.name(token_id), "logprob": _finite(logprob), "bytes": names.utf8(token_id)}


def _known(tokenizer: Tokenizer | None, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
    text = None if tokenizer is None else tokenizer.token_text(token_id)
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}


def _finite(logprob: float) -> float:
    if math.isnan(logprob):
        raise RequestError("the model computed a log-probability that is not a number", status=500)
    return max(logprob, _LEAST)
