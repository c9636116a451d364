"""`EngineClient`: requests in, streams of updates out, over an engine in a process of its own. asyncio.

One message per step arrives and is taken apart here. A consumer that is slow finds what it missed merged into
one update; it holds nobody up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from enum import StrEnum
from types import TracebackType
from typing import Protocol, TypeVar

import msgspec

from pegainfer.engine.messages import (
    HEARTBEAT_S,
    AbortRequests,
    AddRequest,
    EngineFailed,
    EngineInfo,
    EngineReady,
    EngineStats,
    FinishReason,
    RequestUpdate,
    ResetPrefixCache,
    Shutdown,
    StepUpdates,
    ToEngine,
)
from pegainfer.engine.process import EngineProcess
from pegainfer.errors import EngineDeadError, PegaInferError, RequestError

__all__ = ["EngineClient", "EngineHealth", "Generation", "RequestObserver"]

_T = TypeVar("_T")

_LEAVE_S = 5.0
"""How long an engine may take to leave."""
_LAST_WORDS_S = 0.5
"""How long a message may take after its sender has left in good order."""
_SLOWER_THAN_EVER = 4
"""A step this many times longer than the longest so far counts as hung, if it is over the time limit too."""


class EngineHealth(StrEnum):
    """Whether the engine moves."""

    starting = "starting"
    healthy = "healthy"
    stalled = "stalled"
    dead = "dead"


class RequestObserver(Protocol):
    """Whoever keeps account of the requests and of the engine. `now` is `time.monotonic()`."""

    def on_added(self, request: AddRequest, now: float) -> None: ...

    def on_update(self, update: RequestUpdate, now: float) -> None: ...

    def on_dropped(self, request_id: str, reason: FinishReason, now: float) -> None: ...

    def on_stats(self, stats: EngineStats) -> None: ...


class Generation:
    """The updates of some requests that belong together (the prompts and choices of one call).

    Iterate over it: every item is a list with at most one update per request, what happened since the last
    item. It ends when all requests have. Raises `EngineDeadError`. Leave it with `close`, or use it as a
    context manager: what still runs is aborted then.
    """

    def __init__(self, client: EngineClient, request_ids: Sequence[str]) -> None:
        self._client = client
        self._open = set(request_ids)
        self._news: dict[str, RequestUpdate] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._error: PegaInferError | None = None

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[RequestUpdate]:
        while not self._news:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        news, self._news = self._news, {}
        return list(news.values())

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def end(self, request_id: str, reason: FinishReason = FinishReason.abort) -> None:
        """Stop one request and forget it; nothing happens to one that has ended. `reason` is what metrics
        count (`stop` after a stop string).
        """
        if request_id in self._open:
            self._open.discard(request_id)
            self._news.pop(request_id, None)
            self._client.drop([request_id], reason)
            self._wake()

    def close(self) -> None:
        """Abort whatever still runs. Idempotent."""
        if self._open:
            self._client.drop(list(self._open), FinishReason.abort)
            self._open.clear()
            self._news.clear()

    def put(self, update: RequestUpdate) -> None:
        """Called by the client: something happened."""
        request_id = update.request_id
        old = self._news.get(request_id)
        self._news[request_id] = update if old is None else _merge(old, update)
        if update.finish_reason is not None:
            self._open.discard(request_id)
        self._wake()

    def fail(self, error: PegaInferError) -> None:
        """Called by the client: nothing will happen any more."""
        self._open.clear()
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """One engine in a process of its own, used from one event loop.

    `observer` hears of every request. After the engine's death every call that needs it raises
    `EngineDeadError`.
    """

    def __init__(self, *, observer: RequestObserver | None = None) -> None:
        self.observer = observer
        self.stats = EngineStats()
        """The engine after its last step."""
        self._loop = asyncio.get_running_loop()
        self._process = EngineProcess()
        self._generations: dict[str, Generation] = {}
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self._error: PegaInferError | None = None
        self._info: EngineInfo | None = None
        self._is_closing = False
        self._progress_at = self._alive_at = time.monotonic()
        self._loop.add_reader(self._process.inbox_fd, self._receive)
        self._loop.add_reader(self._process.lifeline.fileno(), self._on_lifeline)

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    @property
    def info(self) -> EngineInfo:
        """What the engine decided at start; known once `ready` has returned."""
        if self._info is None:
            raise RuntimeError("the engine is not ready")
        return self._info

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._generations)

    async def ready(self) -> EngineInfo:
        """Wait until requests are welcome. Raises the `PegaInferError` that stopped the engine, or
        `EngineDeadError`.
        """
        return await asyncio.shield(self._ready)

    async def died(self) -> None:
        """Return when the engine is gone, for whatever reason."""
        await asyncio.shield(self._gone)

    def send(self, message: ToEngine) -> None:
        """Hand a message to the engine; raises what ended it, if it is gone."""
        if self._error is not None:
            raise self._error
        self._process.send(message)

    def generate(self, requests: Sequence[AddRequest]) -> Generation:
        """Start requests that belong together. Raises `RequestError` for an id that is in use,
        `EngineDeadError`.
        """
        if self._error is not None:
            raise self._error
        ids = [request.request_id for request in requests]
        for index, request_id in enumerate(ids):
            if request_id in self._generations or request_id in ids[:index]:
                raise RequestError(f"request id {request_id!r} is in use", param="request_id")
        now = time.monotonic()
        if not self._generations:
            self._progress_at = now
        generation = Generation(self, ids)
        for request in requests:
            self._generations[request.request_id] = generation
            self._process.send(request)
            if self.observer is not None:
                self.observer.on_added(request, now)
        return generation

    def drop(self, request_ids: Sequence[str], reason: FinishReason = FinishReason.abort) -> None:
        """Abort requests whose updates nobody wants any more; unknown ones are ignored."""
        known = [request_id for request_id in request_ids if self._generations.pop(request_id, None)]
        if self._error is None and known:
            self._process.send(AbortRequests(known))
        if self.observer is not None:
            now = time.monotonic()
            for request_id in known:
                self.observer.on_dropped(request_id, reason, now)

    def reset_prefix_cache(self) -> None:
        """Forget every cached block that no request uses."""
        self.send(ResetPrefixCache())

    def health(self, stall_timeout: float) -> EngineHealth:
        """Whether the engine moves: with work to do, it is stalled when no step has ended for `stall_timeout`
        seconds (more, if it is known to take longer steps); without, when its process gave no sign of life.
        """
        if self._error is not None:
            return EngineHealth.dead
        if self._info is None:
            return EngineHealth.starting
        now = time.monotonic()
        if now - self._alive_at > max(stall_timeout, 3 * HEARTBEAT_S):
            return EngineHealth.stalled
        patience = max(stall_timeout, _SLOWER_THAN_EVER * self.stats.longest_step_s)
        if self._generations and now - self._progress_at > patience:
            return EngineHealth.stalled
        return EngineHealth.healthy

    async def shutdown(self, drain: float = 0.0) -> int:
        """Let open requests finish for at most `drain` seconds, end the rest with `abort`, stop the engine;
        its exit code. Idempotent.
        """
        deadline = self._loop.time() + drain
        while self._generations and self._error is None and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
        return await self.close()

    async def close(self) -> int:
        """Stop the engine now: open requests end with `abort`."""
        self._is_closing = True
        if self._error is None:
            self._process.send(Shutdown())
            for request_id in list(self._generations):
                self._dispatch(RequestUpdate(request_id, finish_reason=FinishReason.abort), time.monotonic())
            self._bury(EngineDeadError("the engine was shut down"))
        return await asyncio.to_thread(self._process.close, _LEAVE_S if self._info is not None else 0.0)

    def _receive(self) -> None:
        """Take every message there is: the descriptor only signals a change from none to some."""
        while self._error is None and (message := self._process.receive()) is not None:
            self._alive_at = time.monotonic()
            match message:
                case StepUpdates():
                    self._on_step(message, self._alive_at)
                case EngineReady():
                    self._info = message.info
                    self._progress_at = self._alive_at
                    if not self._ready.done():
                        self._ready.set_result(message.info)
                case EngineFailed():
                    self._on_failed(message)

    def _on_step(self, message: StepUpdates, now: float) -> None:
        self.stats = message.stats
        self._progress_at = now
        for update in message.updates:
            self._dispatch(update, now)
        if self.observer is not None:
            self.observer.on_stats(message.stats)

    def _dispatch(self, update: RequestUpdate, now: float) -> None:
        request_id = update.request_id
        generation = self._generations.get(request_id)
        if generation is None:
            return
        if update.finish_reason is not None:
            del self._generations[request_id]
        generation.put(update)
        if self.observer is not None:
            self.observer.on_update(update, now)

    def _on_failed(self, message: EngineFailed) -> None:
        if message.is_user_error and self._info is None:
            self._bury(PegaInferError(message.message))
        else:
            self._bury(EngineDeadError(f"the engine failed: {message.message}"))

    def _on_lifeline(self) -> None:
        if self._process.beats():
            self._alive_at = time.monotonic()
            return
        code = self._process.wait(1.0)
        if code is None:
            cause = "closed its connection"
        elif code < 0:
            cause = f"was killed by signal {-code}"
        else:
            cause = f"left with exit code {code}"
            self._process.poll(_LAST_WORDS_S)
        self._receive()
        self._bury(EngineDeadError(f"the engine process {cause}"))

    def _bury(self, error: PegaInferError) -> None:
        """The engine is gone: everyone who waits for it hears so."""
        if self._error is not None:
            return
        self._error = error
        self._loop.remove_reader(self._process.inbox_fd)
        self._loop.remove_reader(self._process.lifeline.fileno())
        generations, self._generations = self._generations, {}
        for request_id, generation in generations.items():
            generation.fail(error)
            if self.observer is not None:
                self.observer.on_dropped(request_id, FinishReason.error, time.monotonic())
        if not self._ready.done():
            self._ready.set_exception(error)
        self._ready.exception()  # seen here, should nobody have asked
        self._gone.set_result(None)


def _merge(old: RequestUpdate, new: RequestUpdate) -> RequestUpdate:
    """Both updates as one. The lists of `old` are its owner's to change."""
    old.token_ids.extend(new.token_ids)
    # What comes with the first token and with the end is found in the update that has them.
    base = new if new.finish_reason is not None or len(old.token_ids) == len(new.token_ids) else old
    return msgspec.structs.replace(
        base,
        token_ids=old.token_ids,
        logprobs=_joined(old.logprobs, new.logprobs),
        prompt_logprobs=_joined(old.prompt_logprobs, new.prompt_logprobs),
    )


def _joined(old: list[_T] | None, new: list[_T] | None) -> list[_T] | None:
    if old is None or new is None:
        return new if old is None else old
    old.extend(new)
    return old
