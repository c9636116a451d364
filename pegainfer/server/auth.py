"""API keys: every route but the probes asks for one, once any is set."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pegainfer.server.protocol.errors import unauthorized
from pegainfer.server.wire import error_response

__all__ = ["OPEN_ROUTES", "KeyCheck"]

OPEN_ROUTES = frozenset({"/health", "/ready", "/ping"})


class KeyCheck:
    """ASGI middleware that answers 401 to whoever does not present one of `keys`, as a bearer token or in
    `x-api-key`. Keys are compared as digests, in constant time; a browser's OPTIONS is never challenged.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request through, or answer it."""
        guarded = scope["type"] == "http" and self._digests and scope["method"] != "OPTIONS"
        if not guarded or scope["path"] in OPEN_ROUTES or self._knows(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        await error_response(unauthorized())(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        offered = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(offered)
        return any([hmac.compare_digest(digest, known) for known in self._digests])


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
