"""Servers as a user starts them: processes on free ports, with everything they print in a file."""

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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from openai import OpenAI

__all__ = ["Server", "launch", "serving", "until"]


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether `condition()` comes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


class Server:
    """One server process and how to talk to it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.port = port
        self.log = log

    @property
    def client(self) -> OpenAI:
        """The real client, without retries."""
        return OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0, timeout=60)

    def connect(self) -> http.client.HTTPConnection:
        """A plain connection."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def call(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and body (as JSON where it is JSON) of one request. Bytes are sent as they are."""
        connection = self.connect()
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            sent = {"Content-Type": "application/json", **(headers or {})}
            connection.request(method, path, data, sent)
            response = connection.getresponse()
            text = response.read()
            if response.headers.get_content_type() == "application/json":
                return response.status, json.loads(text)
            return response.status, text.decode()
        finally:
            connection.close()

    def post(self, path: str, **fields: Any) -> tuple[int, Any]:
        """One call with a JSON body."""
        return self.call("POST", path, fields)

    def complete(self, **fields: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        status, answer = self.post("/v1/completions", **fields)
        assert status == 200, answer
        assert isinstance(answer, dict)
        return answer

    def events(self, path: str = "/v1/completions", **fields: Any) -> list[str]:
        """The raw lines of a stream, without the empty ones."""
        connection = self.connect()
        try:
            body = json.dumps({**fields, "stream": True})
            connection.request("POST", path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            return [line for line in response.read().decode().split("\n") if line]
        finally:
            connection.close()

    def chunks(self, path: str = "/v1/completions", **fields: Any) -> list[dict[str, Any]]:
        """The JSON events of a stream; it must end with [DONE]."""
        lines = [line for line in self.events(path, **fields) if not line.startswith(":")]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def health(self) -> int:
        """Status of /health; 0 when nobody listens."""
        try:
            return self.call("GET", "/health")[0]
        except OSError:
            return 0

    def report(self) -> dict[str, Any]:
        """The verbose health report."""
        report = self.call("GET", "/health?verbose=1")[1]
        assert isinstance(report, dict)
        return report

    def metric(self, name: str, label: str = "") -> float:
        """The value of a metric, summed over the lines that have `label` in them."""
        lines = [line for line in self.call("GET", "/metrics")[1].splitlines() if label in line]
        values = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{")]
        assert values, name
        return sum(values)

    def is_idle(self) -> bool:
        """Whether nothing runs or waits and no block is held."""
        report = self.report()
        return not (report["running"] or report["waiting"] or report["kv_cache_usage"])

    def engine(self) -> psutil.Process:
        """The engine's process."""
        children = psutil.Process(self.process.pid).children()
        found = [child for child in children if "pegainfer.engine" in " ".join(child.cmdline())]
        assert len(found) == 1, children
        return found[0]

    def output(self) -> str:
        """All that the server has printed."""
        return self.log.read_text(errors="replace")


@contextlib.contextmanager
def launch(log: Path, *words: str, device: str = "cpu") -> Iterator[Server]:
    """A server process from its command until the block ends, ready or not."""
    port = free_port()
    command = [sys.executable, "-m", "pegainfer", "serve", *words, "--port", str(port), "--device", device]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield Server(process, port, log)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def serving(log: Path, *words: str, device: str = "cpu") -> Iterator[Server]:
    """A server that is ready."""
    with launch(log, *words, device=device) as server:
        assert until(lambda: server.health() == 200 or server.process.poll() is not None, 120)
        assert server.process.poll() is None, server.output()
        yield server


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
