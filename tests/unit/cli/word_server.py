"""A tiny but real OpenAI-compatible HTTP server: one word is one token, answers count up."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VOCABULARY = 5000


@dataclass
class WordServer:
    """What the server was asked, and how it behaves."""

    url: str = ""
    requests: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    fail_every: int = 0
    token_seconds: float = 0.001
    running: int = 0
    peak: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def completions(self) -> list[dict[str, Any]]:
        """Bodies of the generation requests, in order of arrival."""
        return [body for path, _, body in self.requests if path.endswith("completions")]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, b"")
        elif self.path == "/v1/models":
            self._json(200, {"data": [{"id": "words", "root": "/models/words", "object": "model"}]})
        else:
            self._json(404, {"error": {"message": "no such route"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        state = self.server.state
        with state.lock:
            state.requests.append((self.path, dict(self.headers.items()), body))
            number = len(state.completions())
        if self.path == "/tokenize":
            tokens = [_token_id(word) for word in body["prompt"].split()]
            if body["add_special_tokens"]:
                tokens = [0, *tokens]
            self._json(200, {"tokens": tokens, "count": len(tokens)})
        elif self.path == "/detokenize":
            self._json(200, {"prompt": " ".join(f"w{token}" for token in body["tokens"])})
        elif state.fail_every and number % state.fail_every == 0:
            self._json(503, {"error": {"message": "busy"}})
        else:
            self._stream(body)

    def _stream(self, body: dict[str, Any]) -> None:
        state = self.server.state
        chat = "messages" in body
        with state.lock:
            state.running += 1
            state.peak = max(state.peak, state.running)
        if not body.get("stream"):
            state.running -= 1
            self._json(200, {"choices": [{"index": 0, "text": " 0", "finish_reason": "length"}]})
            return
        count = body.get("max_tokens") or body.get("max_completion_tokens")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if chat:
            self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for index in range(count):
            time.sleep(state.token_seconds)
            text = f" {index}"
            part = {"delta": {"content": text}} if chat else {"text": text}
            self._event({"choices": [{"index": 0, "finish_reason": None, **part}]})
        part = {"delta": {}} if chat else {"text": ""}
        self._event({"choices": [{"index": 0, "finish_reason": "length", **part}]})
        prompt = body.get("prompt") or body["messages"][0]["content"]
        prompt_tokens = len(prompt) if isinstance(prompt, list) else len(prompt.split()) + 1
        with state.lock:
            state.running -= 1
        self._event({"choices": [], "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": count}})
        self._chunk(b": a comment\n\ndata: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, value: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _json(self, status: int, value: dict[str, Any]) -> None:
        self._answer(status, json.dumps(value).encode())

    def _answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    state: WordServer


def _token_id(word: str) -> int:
    if word[:1] == "w" and word[1:].isdigit():
        return int(word[1:])
    return 1 + sum(word.encode()) % (VOCABULARY - 1)


@contextmanager
def running_word_server() -> Iterator[WordServer]:
    """Serve on a free port of this machine until the block ends."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.state = WordServer(url=f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server.state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def main() -> None:
    """A process of its own: `--child` has a child, `--die` leaves at once, `--mute` never listens."""
    if "--die" in sys.argv:
        print("starting\npegainfer: error: no model here", flush=True)
        sys.exit(3)
    if "--child" in sys.argv:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if "--mute" in sys.argv:
        time.sleep(600)
    server = _Server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), _Handler)
    server.state = WordServer()
    server.serve_forever()


if __name__ == "__main__":
    main()
