"""A server process to measure: started, waited for, weighed, stopped."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Server", "running_server"]

PORT = 8177


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers; `start_s` is the time from the command to that."""

    process: subprocess.Popen[bytes]
    log: Path
    start_s: float
    url: str = f"http://127.0.0.1:{PORT}"

    def memory_mb(self) -> int:
        """Resident memory of the process and its children."""
        total, pids = 0, [self.process.pid]
        while pids:
            current = pids.pop()
            status = Path(f"/proc/{current}/status").read_text()
            total += next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
            for children in Path(f"/proc/{current}/task").glob("*/children"):
                pids += map(int, children.read_text().split())
        return total // 1000


@contextmanager
def running_server(model: Path, flags: Sequence[str]) -> Iterator[Server]:
    """`pegainfer serve MODEL FLAGS` on a port of ours; `SystemExit` with its log when it ends early."""
    command = [sys.executable, "-m", "pegainfer", "serve", str(model), "--port", str(PORT), *flags]
    log = Path(tempfile.mkdtemp()) / "server.log"
    start = time.perf_counter()
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        _wait_until_ready(process, log)
        yield Server(process, log, time.perf_counter() - start)
    finally:
        process.terminate()
        process.wait(60)


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    while process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2) as response:
                if response.status == 200:
                    return
        except OSError:
            time.sleep(0.02)
    raise SystemExit(f"the server ended:\n{log.read_text()[-4000:]}")
