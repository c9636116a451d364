"""What every HTTP request gets and leaves behind: an id, and its count and duration in the metrics."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["RequestIds", "RequestMetrics"]

_MAX_ID_CHARS = 128
_SILENT = frozenset({"/metrics", "/health", "/ready", "/ping", "/load", "/version"})
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class RequestIds:
    """ASGI middleware: the client's `X-Request-Id` (where it is short, printable text) names the request, and
    comes back in the response.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with `state["request_id"]`, None where the client gave none."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        is_usable = 0 < len(asked) <= _MAX_ID_CHARS and asked.isascii() and asked.isprintable()
        request_id = asked if is_usable else None
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start" and request_id is not None:
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class RequestMetrics:
    """ASGI middleware: `http_requests_total` and `http_request_duration_seconds`, by route."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._count = Counter(
            "http_requests", "HTTP requests.", ("handler", "method", "status"), registry=registry
        )
        self._duration = Histogram(
            "http_request_duration_seconds",
            "Seconds until the last byte.",
            ("handler", "method"),
            buckets=_BUCKETS,
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on and take note of how it went."""
        if scope["type"] != "http" or scope["path"] in _SILENT:
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 500

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noting_status)
        finally:
            # Only known routes are labels: anybody could make up any number of others.
            route = scope.get("route")
            handler = route.path if route is not None else "none"
            method = scope["method"] if route is not None else "any"
            self._count.labels(handler, method, f"{status // 100}xx").inc()
            self._duration.labels(handler, method).observe(time.perf_counter() - started)
