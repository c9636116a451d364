"""The error envelope, and which status and type mean what.

`{"error": {"message", "type", "param", "code"}}`, where `code` is the HTTP status as a number.
"""

from __future__ import annotations

from typing import Any

from pegainfer.errors import EngineDeadError, PegaInferError, RequestError

__all__ = ["as_request_error", "error_body", "not_built", "not_found", "unauthorized", "unavailable"]

_TYPES = {
    400: "BadRequestError",
    401: "authentication_error",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailable",
}


def error_body(error: RequestError) -> dict[str, Any]:
    """The envelope of `error`."""
    code: int | str = "invalid_api_key" if error.status == 401 else error.status
    kind = _TYPES.get(error.status, error.kind)
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": code}}


def as_request_error(error: Exception) -> RequestError:
    """What a client hears of `error`. A bug's own words stay in the log."""
    match error:
        case RequestError():
            return error
        case EngineDeadError():
            return unavailable(str(error))
        case PegaInferError():
            return RequestError(str(error), status=500)
        case _:
            return RequestError("internal error; the server's log has the details", status=500)


def unavailable(message: str) -> RequestError:
    """The server cannot serve now: loading, draining, dead or full."""
    return RequestError(message, status=503)


def not_found(message: str, *, param: str | None = None) -> RequestError:
    """There is no such thing."""
    return RequestError(message, param=param, status=404)


def not_built(what: str) -> RequestError:
    """This server can never do that."""
    return RequestError(f"{what} is not implemented by this server", status=501)


def unauthorized() -> RequestError:
    """The key is missing or wrong."""
    return RequestError("Invalid API key", status=401)
