"""Starting a server as a user does, and weighing it: time to ready, memory of its whole process tree."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pegainfer.errors import ConfigError

__all__ = ["RunningServer", "TreeMemory", "drop_from_page_cache", "running_server", "tree_memory"]

_POLL_SECONDS = 0.005
_STOP_SECONDS = 30


@dataclass(frozen=True, slots=True)
class TreeMemory:
    """Bytes of resident memory of some processes: `rss` counts shared pages once per process, `pss` once."""

    processes: int
    rss: int
    pss: int


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers; `ready_s` is from its command to the first 200 of `/health`."""

    pid: int
    port: int
    started: float
    ready_s: float

    def first_token_s(self) -> float:
        """Ask for one token of a short prompt; seconds from the command to the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        body = json.dumps({"prompt": [1, 2, 3, 4], "max_tokens": 1, "temperature": 0, "ignore_eos": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        connection.close()
        if response.status != 200:
            raise ConfigError(f"the server answers {response.status}: {text[:300].decode(errors='replace')}")
        return time.perf_counter() - self.started

    def memory(self) -> TreeMemory:
        """Memory of the server and all its descendants, now."""
        return tree_memory(self.pid)


@contextlib.contextmanager
def running_server(
    words: Sequence[str], *, timeout: float = 600.0, command: Sequence[str] = ()
) -> Iterator[RunningServer]:
    """`pegainfer serve` with the flags `words` on a free port (or another `command` that takes `--port`),
    from ready until the block ends. Raises `ConfigError` with the server's last lines when it does not start.
    """
    port = _free_port()
    whole = [*(command or (sys.executable, "-m", "pegainfer", "serve")), *words, "--port", str(port)]
    started = time.perf_counter()
    # A session of its own: the whole tree can be ended, whatever it has become.
    with subprocess.Popen(
        whole, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        output = _Tail(process.stdout.fileno())
        try:
            while not _is_ready(port):
                output.read()
                if process.poll() is not None:
                    raise ConfigError(f"the server left with code {process.returncode}: {output.last()}")
                if time.perf_counter() - started > timeout:
                    raise ConfigError(f"the server was not ready within {timeout:g} s: {output.last()}")
                time.sleep(_POLL_SECONDS)
            yield RunningServer(process.pid, port, started, time.perf_counter() - started)
        finally:
            _stop(process)


def tree_memory(pid: int) -> TreeMemory:
    """Memory of a process and all its descendants."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(folder.name))
    tree, todo = [], [pid]
    while todo:
        tree.append(todo.pop())
        todo += children.get(tree[-1], [])
    rss = pss = 0
    for member in tree:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{member}/smaps_rollup").read_text()
            sizes = {line.split(":")[0]: line.split()[1] for line in text.splitlines()[1:]}
            rss += int(sizes["Rss"]) * 1024
            pss += int(sizes["Pss"]) * 1024
    return TreeMemory(len(tree), rss, pss)


def drop_from_page_cache(paths: Iterable[Path]) -> int:
    """Ask the system to forget the contents of these files and folders, as after a reboot; pages that some
    process has mapped stay. Returns the number of bytes named.
    """
    total = 0
    for path in paths:
        for file in [path] if path.is_file() else path.rglob("*"):
            with contextlib.suppress(OSError), file.open("rb") as handle:
                os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                total += os.fstat(handle.fileno()).st_size
    return total


class _Tail:
    """The last lines that a process wrote."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._text = b""

    def read(self) -> None:
        """Take what there is, so that the process never waits for its reader."""
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._descriptor, 1 << 16):
                self._text = (self._text + piece)[-4096:]

    def last(self) -> str:
        """The last line with words in it."""
        self.read()
        lines = [line.strip() for line in self._text.decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].removeprefix("pegainfer: error: ") if lines else "it said nothing"


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
    with contextlib.suppress(ProcessLookupError):  # nobody outlived the server
        os.killpg(process.pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
