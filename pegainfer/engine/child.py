"""The engine's own process: `python -m pegainfer.engine.child DESCRIPTOR DIRECTORY`, started by
`process.EngineProcess` alone.

Two things tie it to its parent: a socket pair whose closed end means that the other process is gone, in
either direction and at once, and over which it shows once a second that it is alive; and ZeroMQ sockets for
messages. Signals are the parent's business: it drains first.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import shutil
import signal
import socket
import sys
import threading
from pathlib import Path

import msgspec
import zmq

from pegainfer.engine.messages import (
    HEARTBEAT_S,
    AbortRequests,
    AddRequest,
    EngineFailed,
    EngineReady,
    FromEngine,
    ResetPrefixCache,
    Shutdown,
    StartEngine,
    StepUpdates,
    ToEngine,
    Vocabulary,
)
from pegainfer.engine.process import socket_addresses
from pegainfer.errors import EngineDeadError, PegaInferError, RequestError
from pegainfer.log import get_logger, setup_logging

__all__ = ["main"]

logger = get_logger(__name__)

EXIT_BUG = 1
EXIT_USER_ERROR = 2


class _Stopped(Exception):
    """The parent changed its mind before the engine was built."""


class _Channel:
    """Messages from and to the parent."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], inbox: str, outbox: str) -> None:
        self._in = context.socket(zmq.PULL)
        self._in.set(zmq.RCVHWM, 0)
        self._in.bind(inbox)
        self._out = context.socket(zmq.PUSH)
        self._out.set(zmq.SNDHWM, 0)
        self._out.connect(outbox)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: FromEngine) -> None:
        """Hand over one message; never waits."""
        self._out.send(self._encoder.encode(message))

    def receive(self, *, wait: bool) -> ToEngine | RequestError | None:
        """The next message; None when there is none and `wait` is false. A request that cannot be read is a
        `RequestError` whose `param` is its id.
        """
        try:
            frame = self._in.recv(0 if wait else zmq.NOBLOCK)
        except zmq.Again:
            return None
        try:
            message: ToEngine = self._decoder.decode(frame)
            return message
        except (msgspec.DecodeError, RequestError) as error:
            raw = msgspec.msgpack.decode(frame)
            return RequestError(f"unreadable request: {error}", param=raw.get("request_id"), status=500)


def main() -> int:
    """Build the engine that the parent describes and run it until the parent says so; the exit code."""
    descriptor, directory = int(sys.argv[1]), Path(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # shows where an engine hangs
    lifeline = socket.socket(fileno=descriptor)
    lifeline.set_inheritable(False)
    threading.Thread(target=_watch_parent, args=(lifeline, directory), daemon=True).start()
    setup_logging()
    context = zmq.Context[zmq.Socket[bytes]]()
    outbox, inbox = socket_addresses(directory)
    channel = _Channel(context, inbox, outbox)
    try:
        _serve(channel)
        return 0
    except _Stopped:
        return 0
    except PegaInferError as error:
        logger.debug("the engine stops", exc_info=True)
        channel.send(EngineFailed(str(error), is_user_error=True))
        return EXIT_USER_ERROR
    except BaseException as error:
        logger.exception("the engine failed")
        channel.send(EngineFailed(f"{type(error).__name__}: {error}", is_user_error=False))
        return EXIT_BUG
    finally:
        context.destroy(linger=1000)


def _serve(channel: _Channel) -> None:
    start = channel.receive(wait=True)
    if isinstance(start, Shutdown):
        return
    if not isinstance(start, StartEngine):
        raise EngineDeadError(f"the engine expected its configuration and got {start!r:.200}")
    # What it imports depends on the configuration, and parents that fail early need none of it.
    from pegainfer.engine.build import build_engine_core
    from pegainfer.engine.core import EngineCore

    def vocabulary() -> Vocabulary:
        message = channel.receive(wait=True)
        if not isinstance(message, Vocabulary):
            raise _Stopped
        return message

    def handle(core: EngineCore, message: ToEngine | RequestError) -> None:
        match message:
            case AddRequest():
                core.add(message)
            case AbortRequests():
                core.abort(message.request_ids)
            case ResetPrefixCache():
                core.reset_prefix_cache()
            case RequestError():
                core.refuse(message.param or "", message)

    core = build_engine_core(start.config, vocabulary)
    # What was built stays; without this every full collection would walk through it.
    gc.collect()
    gc.freeze()
    _give_back_memory()
    channel.send(EngineReady(core.info))
    while True:
        while (message := channel.receive(wait=not core.has_work)) is not None:
            if isinstance(message, Shutdown):
                core.close()
                return
            handle(core, message)
        channel.send(StepUpdates(core.step(), core.stats()))


def _give_back_memory() -> None:
    """Return to the system what starting has freed: of compilers alone that can be a hundred megabytes."""
    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _watch_parent(lifeline: socket.socket, directory: Path) -> None:
    """Show that this process is alive; when the parent is gone, tidy up for it and leave at once."""
    lifeline.settimeout(HEARTBEAT_S)
    while True:
        try:
            if not lifeline.recv(1):
                break
        except TimeoutError:
            try:
                lifeline.send(b".", socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue  # the parent does not read; it will see that we wrote
            except OSError:
                break
        except OSError:
            break
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(EXIT_BUG)


if __name__ == "__main__":
    sys.exit(main())
