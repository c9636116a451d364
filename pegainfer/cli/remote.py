"""Streaming chat with a running OpenAI-compatible server, for a person who waits: blocking, one at a time."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from pegainfer import envs
from pegainfer.errors import ConfigError, PegaInferError, RequestError

__all__ = ["RemoteChat"]

_TIMEOUT_SECONDS = 600


class RemoteChat:
    """A model of the server at `url`; the first one that it lists unless `model` names another."""

    def __init__(self, url: str, *, model: str | None, sampling: dict[str, Any]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url}: expected a URL like http://127.0.0.1:8000")
        self._parts = parts
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._fields = dict(sampling)
        self.name = model or self._first_model()

    def stream(self, messages: Sequence[dict[str, str]]) -> Iterator[str]:
        """The pieces of the answer. Raises `RequestError` for what the server refuses."""
        body = {**self._fields, "model": self.name, "messages": list(messages), "stream": True}
        connection, response = self._send("POST", "/v1/chat/completions", body)
        try:
            for line in response:
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    yield _piece(line[5:])
        finally:
            connection.close()

    def _first_model(self) -> str:
        connection, response = self._send("GET", "/v1/models", None)
        try:
            return str(json.loads(response.read())["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ConfigError(f"{self._parts.geturl()} lists no model; give one") from None
        finally:
            connection.close()

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        headers = {"Content-Type": "application/json"} if body else {}
        if key := envs.openai_api_key():
            headers["Authorization"] = f"Bearer {key}"
        connection = self._connect()
        try:
            content = json.dumps(body).encode() if body else None
            connection.request(method, self._prefix + path, content, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise ConfigError(f"{self._parts.geturl()} does not answer: {error}") from None
        if response.status != 200:
            text = response.read().decode(errors="replace")
            connection.close()
            raise RequestError(f"the server answers {response.status}: {_message(text)}")
        return connection, response

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(host, port, timeout=_TIMEOUT_SECONDS, context=context)
        return http.client.HTTPConnection(host, port, timeout=_TIMEOUT_SECONDS)


def _piece(data: bytes) -> str:
    chunk = json.loads(data)
    if "error" in chunk:
        raise PegaInferError(f"the server broke off: {_message(json.dumps(chunk))}")
    deltas = [choice.get("delta") or {} for choice in chunk.get("choices") or ()]
    return "".join(delta.get("content") or "" for delta in deltas)


def _message(text: str) -> str:
    """The message of an error envelope, or the text itself."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return text[:300]
