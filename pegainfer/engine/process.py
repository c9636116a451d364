"""`EngineProcess`: the engine's process as its parent sees it: starts it, carries messages, notices its end.

Knows nothing of requests and waits for nothing: whoever owns an event loop watches `lifeline` and `inbox_fd`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec
import zmq

from pegainfer.engine.messages import FromEngine, ToEngine

__all__ = ["EngineProcess", "socket_addresses"]

_RECONNECT_MS = 10


class EngineProcess:
    """A child process that runs an engine.

    `lifeline` is readable when the child shows that it is alive, and at its end when it is gone. `inbox_fd`
    becomes readable when messages may have arrived; then `receive` until there are none.
    """

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="pegainfer-"))
        inbox, outbox = socket_addresses(self._directory)
        self._context = zmq.Context[zmq.Socket[bytes]]()
        self._in = self._context.socket(zmq.PULL)
        self._in.set(zmq.RCVHWM, 0)
        self._in.bind(inbox)
        self._out = self._context.socket(zmq.PUSH)
        self._out.set(zmq.SNDHWM, 0)
        self._out.set(zmq.LINGER, 0)
        self._out.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._out.connect(outbox)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self.lifeline, theirs = socket.socketpair()
        self.lifeline.setblocking(False)
        command = [sys.executable, "-P", "-m", "pegainfer.engine.child"]
        command += [str(theirs.fileno()), str(self._directory)]
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=_environment()
            )

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    @property
    def inbox_fd(self) -> int:
        """See the class."""
        return int(self._in.get(zmq.FD))

    def send(self, message: ToEngine) -> None:
        """Hand over a message; never waits. It is lost if the child is gone."""
        self._out.send(self._encoder.encode(message), zmq.NOBLOCK)

    def receive(self) -> FromEngine | None:
        """The next message, or None."""
        try:
            frame = self._in.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        message: FromEngine = self._decoder.decode(frame)
        return message

    def poll(self, timeout: float) -> None:
        """Wait for a message, at most `timeout` seconds."""
        self._in.poll(int(timeout * 1e3))

    def beats(self) -> bool:
        """Read the lifeline: False when the child is gone."""
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    if not self.lifeline.recv(4096):
                        return False
                except ConnectionError:
                    return False
        return True

    def wait(self, timeout: float) -> int | None:
        """The exit code once the child has left, waiting at most `timeout` seconds for that."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def close(self, timeout: float = 0.0) -> int:
        """Give the child `timeout` seconds to leave by itself, then kill it; its exit code. Idempotent."""
        code = self.wait(timeout)
        if code is None:
            self._process.kill()
            code = self._process.wait()
        self.lifeline.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._directory, ignore_errors=True)
        return code


def socket_addresses(directory: Path) -> tuple[str, str]:
    """Where messages from the engine and to the engine go."""
    return f"ipc://{directory / 'from-engine'}", f"ipc://{directory / 'to-engine'}"


def _environment() -> dict[str, str]:
    """Ours, and the very package that runs here on the path, wherever the child starts."""
    home = str(Path(__file__).resolve().parents[2])
    paths = [home, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, paths)))}
