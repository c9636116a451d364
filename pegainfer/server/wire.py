"""Bodies in and out: reading JSON with a limit, writing JSON and errors."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pegainfer.errors import RequestError
from pegainfer.server.protocol.errors import error_body

__all__ = ["RETRY_AFTER_S", "error_response", "json_response", "read_json"]

RETRY_AFTER_S = 1
"""What a client is told to wait before it tries again."""


def json_response(content: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON body."""
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def error_response(error: RequestError) -> Response:
    """The envelope of an error, with the headers that belong to its status."""
    headers = {}
    if error.status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_S)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error_body(error), status=error.status, headers=headers)


async def read_json(request: Request, *, limit: int) -> Any:
    """The JSON body of a request of at most `limit` bytes.

    Raises `RequestError` (400, 413), `ClientDisconnect`.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(f"Content-Type must be application/json, got {kind or 'none'!r:.80}")
    too_large = RequestError(f"the request body is larger than {limit} bytes", status=413)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        body += message.get("body", b"")
        if len(body) > limit:
            raise too_large
        if not message.get("more_body", False):
            break
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the request body is not valid JSON: {error}") from None
