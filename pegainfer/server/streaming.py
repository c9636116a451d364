"""Updates of answers as server-sent events, byte for byte. No I/O.

Per choice: (chat) a role event, together with the first token; what the tokens add; one event with the finish
reason and nothing else. Then the usage, where it was asked for, and `[DONE]`. Every event of a choice has
`logprobs` and `finish_reason`, null where there is none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import orjson

from pegainfer.engine.output import OutputDelta, Usage
from pegainfer.errors import RequestError
from pegainfer.scheduler.plan import TokenLogprobs
from pegainfer.server.answers import Choice, News
from pegainfer.server.protocol.chat import ChatRequest
from pegainfer.server.protocol.completions import CompletionRequest
from pegainfer.server.protocol.errors import error_body
from pegainfer.server.protocol.logprobs import CompletionLogprobs, TokenNames, chat_logprobs, joined
from pegainfer.server.protocol.options import GenerationOptions
from pegainfer.server.responses import ResponseHead, finish_name, usage_json

__all__ = ["DONE", "KEEP_ALIVE", "ChatEvents", "CompletionEvents", "EventWriter", "error_event"]

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

_dumps = orjson.dumps


def error_event(error: RequestError) -> bytes:
    """What a client reads when a stream that has begun fails."""
    return b"data: " + _dumps(error_body(error)) + b"\n\n"


class _ChoiceState:
    """How far one choice's events are. `head` is the beginning of all of them."""

    __slots__ = ("echoed", "has_started", "head", "logprobs")

    def __init__(self, head: bytes) -> None:
        self.head = head
        self.has_started = False
        self.echoed: list[TokenLogprobs] = []
        self.logprobs: CompletionLogprobs | None = None


class EventWriter(ABC):
    """The events of one streamed response. `usage` counts the tokens so far."""

    kind: ClassVar[str]

    def __init__(
        self,
        head: ResponseHead,
        options: GenerationOptions,
        *,
        names: TokenNames,
        usage: Callable[[], Usage],
    ) -> None:
        self._options = options
        self._names = names
        self._usage = usage
        opening = {"id": head.id, "object": self.kind, "created": head.created, "model": head.model}
        self._head = b"data: " + _dumps(opening)[:-1] + b',"choices":['
        self._states: dict[int, _ChoiceState] = {}

    def push(self, news: News) -> bytes:
        """The events of what has happened; may be empty."""
        return b"".join([self._events(choice, delta) for choice, delta in news])

    def end(self) -> bytes:
        """What follows when all choices have ended."""
        if not self._options.include_usage:
            return DONE
        return self._head + b'],"usage":' + _dumps(usage_json(self._usage())) + b"}\n\n" + DONE

    def _events(self, choice: Choice, delta: OutputDelta) -> bytes:
        state = self._states.get(choice.index)
        if state is None:
            state = self._states[choice.index] = self._open(choice)
        if delta.prompt_logprobs is not None:
            state.echoed += delta.prompt_logprobs
        finish, tokens = delta.finish_reason, delta.token_ids
        events = b""
        if not state.has_started:
            if not tokens and finish is None:
                return b""
            state.has_started = True
            events = self._first(choice, state)
        logprobs = None
        if tokens and delta.logprobs is not None:
            logprobs = self._logprobs(state, delta.logprobs)
        extra = b""
        if tokens and self._options.return_token_ids:
            extra = b',"token_ids":' + _dumps(tokens)
        # The end itself is an event of its own; a last token without text needs no other.
        if delta.text or (tokens and (finish is None or logprobs is not None or extra)):
            events += self._event(state, self._content(delta.text), logprobs=logprobs, extra=extra)
        if finish is not None:
            reason = b',"stop_reason":' + _dumps(delta.stop_reason)
            events += self._event(state, self._last, finish=_dumps(finish_name(finish)), extra=reason)
        return events

    def _event(
        self,
        state: _ChoiceState,
        body: bytes,
        *,
        logprobs: dict[str, Any] | None = None,
        finish: bytes = b"null",
        extra: bytes = b"",
        outer: bytes = b"",
    ) -> bytes:
        """One event of a choice. `extra` are further fields of the choice, `outer` of the event."""
        scores = b"null" if logprobs is None else _dumps(logprobs)
        if self._options.usage_in_every_chunk:
            outer += b',"usage":' + _dumps(usage_json(self._usage()))
        return b'%s%s,"logprobs":%s,"finish_reason":%s%s}]%s}\n\n' % (
            *(state.head, body, scores, finish, extra, outer),
        )

    def _open(self, choice: Choice) -> _ChoiceState:
        return _ChoiceState(self._head + b'{"index":%d,' % choice.index)

    def _prompt_ids(self, choice: Choice) -> bytes:
        if not self._options.return_token_ids:
            return b""
        return b',"prompt_token_ids":' + _dumps(choice.prompt.token_ids)

    _last: ClassVar[bytes]
    """The body of the event that ends a choice."""

    @abstractmethod
    def _first(self, choice: Choice, state: _ChoiceState) -> bytes:
        """What goes ahead of a choice's first token."""

    @abstractmethod
    def _content(self, text: str) -> bytes:
        """The body of an event with text."""

    @abstractmethod
    def _logprobs(self, state: _ChoiceState, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """The wire form of log-probabilities."""


class CompletionEvents(EventWriter):
    """Events of `/v1/completions`."""

    kind = "text_completion"
    _last = b'"text":""'

    def __init__(
        self, head: ResponseHead, request: CompletionRequest, *, names: TokenNames, usage: Callable[[], Usage]
    ) -> None:
        super().__init__(head, request.options, names=names, usage=usage)
        self._echo = request.echo

    def _open(self, choice: Choice) -> _ChoiceState:
        state = super()._open(choice)
        if self._options.params.logprobs is not None:
            skip = self._options.params.skip_special_tokens
            state.logprobs = CompletionLogprobs(self._names, skip_special_tokens=skip)
        return state

    def _first(self, choice: Choice, state: _ChoiceState) -> bytes:
        ids = self._prompt_ids(choice)
        if not self._echo:
            return self._event(state, self._last, extra=ids) if ids else b""
        scores = None
        if state.logprobs is not None:
            start = state.logprobs.start(choice.prompt.token_ids[0])
            scores = joined([start, state.logprobs.add(state.echoed)])
        return self._event(state, self._content(choice.prompt.text or ""), logprobs=scores, extra=ids)

    def _content(self, text: str) -> bytes:
        return b'"text":' + _dumps(text)

    def _logprobs(self, state: _ChoiceState, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
        assert state.logprobs is not None
        return state.logprobs.add(entries)


class ChatEvents(EventWriter):
    """Events of `/v1/chat/completions`."""

    kind = "chat.completion.chunk"
    _last = b'"delta":{}'

    def __init__(
        self, head: ResponseHead, request: ChatRequest, *, names: TokenNames, usage: Callable[[], Usage]
    ) -> None:
        super().__init__(head, request.options, names=names, usage=usage)
        self._prefix = request.prefix

    def _first(self, choice: Choice, state: _ChoiceState) -> bytes:
        role = b'"delta":{"role":"assistant","content":""}'
        events = self._event(state, role, outer=self._prompt_ids(choice))
        return events + self._event(state, self._content(self._prefix)) if self._prefix else events

    def _content(self, text: str) -> bytes:
        return b'"delta":{"content":' + _dumps(text) + b"}"

    def _logprobs(self, state: _ChoiceState, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
        return chat_logprobs(self._names, entries)
