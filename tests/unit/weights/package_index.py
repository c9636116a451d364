"""A small package index over real HTTP, and wheels to offer on it."""

from __future__ import annotations

import base64
import io
import json
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

__all__ = ["Index", "make_wheel", "serve_index"]

_JSON = "application/vnd.pypi.simple.v1+json"


@dataclass
class Index:
    """Wheels by file name. `speaks_json` chooses the form of the pages; `login` (`user:password`) is asked
    for if set. `downloads` lists the files that were fetched.
    """

    wheels: dict[str, bytes]
    speaks_json: bool = True
    login: str | None = None
    downloads: list[str] = field(default_factory=list)


def make_wheel(project: str, version: str, files: dict[str, bytes]) -> bytes:
    """A wheel with `files`, a dependency that nobody can install, and the least of metadata."""
    info = f"{project.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\nRequires-Dist: no-such-project\n"
    parts = files | {
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return buffer.getvalue()


@contextmanager
def serve_index(index: Index) -> Iterator[str]:
    """The address of the running index (`http://host:port/simple`)."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            expected = base64.b64encode((index.login or "").encode()).decode()
            if index.login is not None and self.headers.get("Authorization") != f"Basic {expected}":
                self._send(401, b"", "text/plain")
            elif self.path.startswith("/files/"):
                name = self.path.rpartition("/")[2]
                index.downloads.append(name)
                self._send(200, index.wheels[name], "application/octet-stream")
            else:
                self._page(self.path.strip("/").rpartition("/")[2])

        def log_message(self, *arguments: Any) -> None:
            """Quiet."""

        def _page(self, project: str) -> None:
            names = [name for name in index.wheels if name.startswith(project.replace("-", "_") + "-")]
            if not names:
                self._send(404, b"", "text/plain")
            elif index.speaks_json and _JSON in self.headers.get("Accept", ""):
                files = [{"filename": name, "url": f"../../files/{name}", "hashes": {}} for name in names]
                page = {"meta": {"api-version": "1.0"}, "name": project, "files": files}
                self._send(200, json.dumps(page).encode(), _JSON)
            else:
                links = "".join(f'<a href="../../files/{name}#x">{name}</a>' for name in names)
                self._send(200, f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), "text/html")

        def _send(self, status: int, body: bytes, kind: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
