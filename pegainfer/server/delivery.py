"""Bringing answers to a client: whole or as a stream, kept alive in silence, stopped when it leaves."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pegainfer.engine.output import Collector
from pegainfer.errors import EngineDeadError, RequestError
from pegainfer.log import get_logger
from pegainfer.server.answers import Answers, Choice, News
from pegainfer.server.protocol.errors import as_request_error
from pegainfer.server.streaming import DONE, KEEP_ALIVE, EventWriter, error_event

__all__ = ["ClientLeft", "EventStream", "collect"]

_logger = get_logger(__name__)

_STREAM_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies must pass events on at once
}


class ClientLeft(Exception):
    """Nobody is there to read the answer any more."""


async def collect(answers: Answers, receive: Receive) -> list[tuple[Choice, Collector]]:
    """All answers of a call, complete. Raises `RequestError`, `EngineDeadError`, `ClientLeft`."""
    outputs = {choice.index: (choice, Collector()) for choice in answers.choices}
    gone = asyncio.ensure_future(_left(receive))
    try:
        while (news := await _next(answers, gone)) is not None:
            for choice, delta in news:
                outputs[choice.index][1].add(delta)
    finally:
        gone.cancel()
        answers.close()
    return [outputs[index] for index in sorted(outputs)]


class EventStream(Response):
    """Answers as server-sent events.

    `start` must have been awaited: what fails before a client has seen any byte fails with a status of its
    own. A client that reads slowly holds up nobody: what it has not fetched is merged where it waits.
    """

    media_type = "text/event-stream"

    def __init__(self, answers: Answers, writer: EventWriter, *, ping_interval: float) -> None:
        super().__init__(headers=_STREAM_HEADERS)
        del self.headers["content-length"]
        self._answers = answers
        self._writer = writer
        self._ping = ping_interval if ping_interval > 0 else None
        self._first: asyncio.Future[News] | None = None

    async def start(self) -> None:
        """Wait for the first news, at most as long as silence may last. Raises what made the call fail."""
        self._first = asyncio.ensure_future(self._answers.__anext__())
        try:
            await asyncio.wait({self._first}, timeout=self._ping)
            if self._first.done() and not isinstance(self._first.exception(), StopAsyncIteration):
                self._first.result()
        except BaseException:
            self._first.cancel()
            self._answers.close()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until all choices have ended or the client has left."""
        gone = asyncio.ensure_future(_left(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send_events(send, gone)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientLeft:
            _logger.debug("a client left its stream")
        finally:
            gone.cancel()
            if self._first is not None:
                self._first.cancel()
            self._answers.close()

    async def _send_events(self, send: Send, gone: asyncio.Future[None]) -> None:
        async def write(data: bytes) -> None:
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})

        waiting, self._first = self._first, None
        try:
            while True:
                if waiting is None:
                    waiting = asyncio.ensure_future(self._answers.__anext__())
                either: set[asyncio.Future[Any]] = {waiting, gone}
                await asyncio.wait(either, timeout=self._ping, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    raise ClientLeft
                if not waiting.done():
                    await write(KEEP_ALIVE)
                    continue
                done, waiting = waiting, None
                await write(self._writer.push(done.result()))
        except StopAsyncIteration:
            await write(self._writer.end())
        except (RequestError, EngineDeadError) as error:
            await write(error_event(as_request_error(error)) + DONE)
        finally:
            if waiting is not None:
                waiting.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await waiting


async def _left(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _next(answers: Answers, gone: asyncio.Future[None]) -> News | None:
    """The next news; None when there will be no more. Raises `ClientLeft`."""
    news = asyncio.ensure_future(answers.__anext__())
    either: set[asyncio.Future[Any]] = {news, gone}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    if not news.done():
        news.cancel()
        raise ClientLeft
    try:
        return news.result()
    except StopAsyncIteration:
        return None
