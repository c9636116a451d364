"""A small stand-in for the Hugging Face hub: one repository per directory entry, over real HTTP."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

__all__ = ["Repo", "serve_hub"]

_COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repo:
    """Files of a model. A gated one wants the bearer token `token`. `requests` collects what was asked."""

    files: dict[str, bytes]
    revisions: tuple[str, ...] = ("main",)
    token: str | None = None
    requests: list[str] = field(default_factory=list)


@contextmanager
def serve_hub(repos: dict[str, Repo]) -> Iterator[str]:
    """The address of a running hub that has `repos` by id."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def log_message(self, *arguments: Any) -> None:
            """Quiet."""

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path).lstrip("/")
            api = path.startswith("api/models/")
            owner, name, *rest = path.removeprefix("api/models/").split("/")
            repo = repos.get(f"{owner}/{name}")
            if repo is None:
                self._send(
                    401, b'{"error": "Invalid username or password."}', {"X-Error-Code": "RepoNotFound"}
                )
                return
            repo.requests.append(f"{self.command} {path}")
            if repo.token is not None and self.headers.get("Authorization") != f"Bearer {repo.token}":
                self._send(401, b'{"error": "gated"}', {"X-Error-Code": "GatedRepo"})
            elif api:
                self._api(repo, f"{owner}/{name}", rest)
            else:
                self._file(repo, rest)

        def _api(self, repo: Repo, repo_id: str, rest: list[str]) -> None:
            if rest[:1] == ["tree"]:
                tree = [
                    {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for path, data in repo.files.items()
                ]
                self._send(200, json.dumps(tree).encode())
                return
            revision = rest[1] if rest[:1] == ["revision"] else "main"
            if revision not in (*repo.revisions, _COMMIT):
                self._send(404, b'{"error": "Invalid rev id"}', {"X-Error-Code": "RevisionNotFound"})
                return
            siblings = [{"rfilename": path} for path in repo.files]
            info = {"id": repo_id, "modelId": repo_id, "sha": _COMMIT, "private": False, "siblings": siblings}
            self._send(200, json.dumps(info | {"tags": [], "downloads": 0, "likes": 0}).encode())

        def _file(self, repo: Repo, rest: list[str]) -> None:
            data = repo.files.get("/".join(rest[2:]))
            if rest[0] != "resolve" or data is None:
                self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
                return
            etag = f'"{hashlib.sha1(data).hexdigest()}"'
            self._send(200, data, {"ETag": etag, "X-Repo-Commit": _COMMIT, "Accept-Ranges": "bytes"})

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for key, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
