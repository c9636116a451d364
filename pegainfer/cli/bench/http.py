"""A small HTTP/1.1 client for load generation: persistent connections, TLS, bodies handed over as they
arrive.

It knows nothing of what it carries. One request at a time per connection; connections go back to the pool
when their response ended.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from pegainfer.errors import ConfigError

__all__ = ["HttpClient", "HttpError", "Response"]


class HttpError(Exception):
    """The connection broke, or what came was not HTTP."""


@dataclass(frozen=True, slots=True)
class Response:
    """Status and whole body; the body is empty when it went to a callback."""

    status: int
    body: bytes

    def json(self) -> Any:
        """The body as JSON; raises `HttpError` when it is not."""
        try:
            return json.loads(self.body)
        except ValueError:
            raise HttpError(f"the server did not answer with JSON: {self.body[:200]!r}") from None


class HttpClient:
    """Requests to one server. `base_url` is `http[s]://host[:port][/prefix]`; `insecure` skips certificate
    checks.
    """

    def __init__(
        self, base_url: str, *, headers: dict[str, str] | None = None, insecure: bool = False
    ) -> None:
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigError(f"{base_url!r} is not a URL like http://127.0.0.1:8000")
        self._host = url.hostname
        try:
            self._port = url.port or (443 if url.scheme == "https" else 80)
        except ValueError as error:
            raise ConfigError(f"{base_url!r}: {error}") from None
        self._prefix = url.path.rstrip("/")
        self._tls = _tls_context(insecure) if url.scheme == "https" else None
        lines = {"Host": url.netloc.rpartition("@")[2], "Accept": "*/*", **(headers or {})}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        headers: dict[str, str] | None = None,
        on_body: Callable[[bytes], None] | None = None,
    ) -> Response:
        """Send `body` (as JSON) and wait for the end of the response. A successful body goes to `on_body`
        piece by piece when it is given. Raises `HttpError`.
        """
        content = b"" if body is None else json.dumps(body).encode()
        extra = dict(headers or {})
        if body is not None:
            extra["Content-Type"] = "application/json"
        if method != "GET":
            extra["Content-Length"] = str(len(content))
        lines = "".join(f"{name}: {value}\r\n" for name, value in extra.items())
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{lines}\r\n"
        message = head.encode("latin-1") + content
        while True:
            connection, reused = await self._connection()
            try:
                response = await connection.exchange(message, on_body)
            except HttpError:
                connection.close()
                if reused and not connection.got_bytes:
                    continue  # the server closed an idle connection; the request was never read
                raise
            except BaseException:
                connection.close()
                raise
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()
            return response

    async def close(self) -> None:
        """Close every idle connection."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connection(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection, True
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        except OSError as error:
            raise HttpError(f"cannot connect to {self._host}:{self._port}: {error}") from None
        return connection, False


class _Connection(asyncio.Protocol):
    """One connection; also the callbacks of its response parser."""

    def __init__(self) -> None:
        self.reusable = True
        self.got_bytes = False
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._done: asyncio.Future[Response] | None = None
        self._on_body: Callable[[bytes], None] | None = None
        self._pieces: list[bytes] = []

    async def exchange(self, message: bytes, on_body: Callable[[bytes], None] | None) -> Response:
        """Send one request and wait for its whole response."""
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._on_body, self._pieces, self.got_bytes = on_body, [], False
        self._transport.write(message)
        return await self._done

    def close(self) -> None:
        """Close the connection now."""
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._fail(f"the server closed the connection{f': {exc}' if exc else ''}")

    def data_received(self, data: bytes) -> None:
        self.got_bytes = True
        if self._parser is None:
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.reusable = False
            self._fail(f"the server did not answer with HTTP: {error}")

    def on_body(self, piece: bytes) -> None:
        if self._on_body is not None and self._parser.get_status_code() == 200:
            self._on_body(piece)
        else:
            self._pieces.append(piece)

    def on_message_complete(self) -> None:
        if not self._parser.should_keep_alive():
            self.reusable = False
        if self._done is not None and not self._done.done():
            self._done.set_result(Response(self._parser.get_status_code(), b"".join(self._pieces)))

    def _fail(self, message: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(HttpError(message))


def _tls_context(insecure: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
