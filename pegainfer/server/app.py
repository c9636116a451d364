"""The routes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from prometheus_client import generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from pegainfer import envs
from pegainfer.errors import EngineDeadError, RequestError
from pegainfer.log import get_logger
from pegainfer.server.auth import KeyCheck
from pegainfer.server.delivery import ClientLeft, EventStream, collect
from pegainfer.server.observation import RequestIds, RequestMetrics
from pegainfer.server.protocol.chat import Chat, parse_chat
from pegainfer.server.protocol.completions import parse_completion
from pegainfer.server.protocol.errors import as_request_error, not_built, not_found
from pegainfer.server.protocol.logprobs import TokenNames
from pegainfer.server.protocol.options import GenerationOptions
from pegainfer.server.protocol.tokens import parse_detokenize, parse_tokenize
from pegainfer.server.responses import ResponseHead, chat_response, completion_response
from pegainfer.server.serving import Serving
from pegainfer.server.state import ServerState
from pegainfer.server.streaming import ChatEvents, CompletionEvents
from pegainfer.server.wire import error_response, json_response, read_json
from pegainfer.version import __version__

__all__ = ["make_app"]

_logger = get_logger(__name__)

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_NOT_BUILT = ("/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/audio/transcriptions", "/v1/rerank")

Handler = Callable[[Request], Awaitable[Response]]


def make_app(state: ServerState) -> Starlette:
    """The ASGI application over a server's state."""
    routes = _Routes(state)
    keys = state.options.api_key or envs.api_keys()
    app = Starlette(
        routes=[
            Route("/v1/completions", routes.completions, methods=["POST"]),
            Route("/v1/chat/completions", routes.chat_completions, methods=["POST"]),
            Route("/v1/models", routes.models, methods=["GET"]),
            Route("/v1/models/{model:path}", routes.model, methods=["GET"]),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
            Route("/health", routes.health, methods=["GET", "HEAD"]),
            Route("/ready", routes.health, methods=["GET", "HEAD"]),
            Route("/ping", routes.health, methods=["GET", "POST"]),
            Route("/metrics", routes.metrics, methods=["GET"]),
            Route("/version", routes.version, methods=["GET"]),
            Route("/load", routes.load, methods=["GET"]),
            Route("/reset_prefix_cache", routes.reset_prefix_cache, methods=["POST"]),
            *(Route(path, routes.not_built, methods=["POST"]) for path in _NOT_BUILT),
        ],
        exception_handlers={HTTPException: _http_error, Exception: _any_error},
        middleware=[
            Middleware(
                CORSMiddleware,
                allow_origins=list(state.options.allowed_origins),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id"],
            ),
            Middleware(RequestIds),
            Middleware(RequestMetrics, registry=state.registry),
            Middleware(KeyCheck, keys=keys),
        ],
    )
    app.router.redirect_slashes = False
    return app


def _answering(handler: Callable[[_Routes, Request], Awaitable[Response]]) -> Any:
    """A route whose failures become the error envelope."""

    async def route(self: _Routes, request: Request) -> Response:
        try:
            return await handler(self, request)
        except (RequestError, EngineDeadError) as error:
            return error_response(as_request_error(error))
        except (ClientLeft, ClientDisconnect):
            return Response(status_code=499)  # nobody reads it

    return route


class _Routes:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    @_answering
    async def completions(self, request: Request) -> Response:
        serving = self._state.need_serving()
        body = await self._body(request)
        call = parse_completion(body, model_defaults=serving.defaults)
        head = self._head(request, serving, call.options, "cmpl")
        names = TokenNames(serving.tokenizer, as_ids=call.options.tokens_as_ids)
        answers = await serving.complete(call, head.id)
        if call.options.stream:
            writer = CompletionEvents(head, call, names=names, usage=answers.usage)
            return await self._stream(EventStream(answers, writer, ping_interval=self._ping))
        with self._counted():
            outputs = await collect(answers, request.receive)
        return json_response(completion_response(head, call, outputs, answers.usage(), names=names))

    @_answering
    async def chat_completions(self, request: Request) -> Response:
        serving = self._state.need_serving()
        body = await self._body(request)
        limit = serving.limits.max_logprobs
        call = parse_chat(body, model_defaults=serving.defaults, max_logprobs=limit)
        head = self._head(request, serving, call.options, "chatcmpl")
        names = TokenNames(serving.tokenizer, as_ids=call.options.tokens_as_ids)
        answers = await serving.chat(call, head.id)
        if call.options.stream:
            writer = ChatEvents(head, call, names=names, usage=answers.usage)
            return await self._stream(EventStream(answers, writer, ping_interval=self._ping))
        with self._counted():
            outputs = await collect(answers, request.receive)
        return json_response(chat_response(head, call, outputs, answers.usage(), names=names))

    @_answering
    async def models(self, request: Request) -> Response:
        serving = self._state.need_serving()
        return json_response({"object": "list", "data": [_card(serving, name) for name in serving.names]})

    @_answering
    async def model(self, request: Request) -> Response:
        serving = self._state.need_serving()
        return json_response(_card(serving, serving.check_model(request.path_params["model"])))

    @_answering
    async def tokenize(self, request: Request) -> Response:
        serving = self._state.need_serving()
        call = parse_tokenize(await self._body(request))
        serving.check_model(call.model)
        if isinstance(call.source, Chat):
            ids = await serving.render(call.source)
        else:
            special = call.add_special_tokens
            ids = await serving.encode(call.source, add_special_tokens=special, can_be_cut=True)
        strings = None
        if call.return_token_strs:
            tokenizer = serving.need_tokenizer("return_token_strs")
            strings = [tokenizer.token_text(token_id) for token_id in ids]
        return json_response(
            {
                "count": len(ids),
                "max_model_len": serving.limits.max_model_len,
                "tokens": ids,
                "token_strs": strings,
            }
        )

    @_answering
    async def detokenize(self, request: Request) -> Response:
        serving = self._state.need_serving()
        call = parse_detokenize(await self._body(request))
        serving.check_model(call.model)
        tokenizer = serving.need_tokenizer("tokens")
        limit = serving.limits.vocab_size
        wrong = next((token for token in call.tokens if not 0 <= token < limit), None)
        if wrong is not None:
            raise RequestError(f"token ids must be in [0, {limit}), got {wrong}", param="tokens")
        return json_response({"prompt": tokenizer.decode(call.tokens, skip_special_tokens=False)})

    @_answering
    async def health(self, request: Request) -> Response:
        status = 200 if self._state.is_healthy else 503
        if request.query_params.get("verbose", "0") not in ("", "0", "false"):
            return json_response(self._state.report(), status=status)
        return Response(status_code=status)

    @_answering
    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._state.registry), headers={"Content-Type": _METRICS_TYPE})

    @_answering
    async def version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    @_answering
    async def load(self, request: Request) -> Response:
        return json_response({"server_load": self._state.num_calls})

    @_answering
    async def reset_prefix_cache(self, request: Request) -> Response:
        self._state.need_serving().client.reset_prefix_cache()
        return Response(status_code=200)

    @_answering
    async def not_built(self, request: Request) -> Response:
        raise not_built(request.url.path)

    @property
    def _ping(self) -> float:
        return self._state.options.sse_ping_interval

    async def _body(self, request: Request) -> Any:
        return await read_json(request, limit=self._state.options.max_request_bytes)

    def _head(
        self, request: Request, serving: Serving, options: GenerationOptions, prefix: str
    ) -> ResponseHead:
        model = serving.check_model(options.model)
        self._state.metrics.observe_n(options.params.n)
        asked = options.request_id or request.scope["state"]["request_id"] or uuid.uuid4().hex
        if self._state.options.enable_log_requests:
            _logger.info("request %s-%s: %s", prefix, asked, options.params)
        return ResponseHead(id=f"{prefix}-{asked}", created=int(time.time()), model=model)

    async def _stream(self, stream: EventStream) -> Response:
        with self._counted():
            await stream.start()
        return _CountedStream(stream, self._state)

    def _counted(self) -> _Counted:
        return _Counted(self._state)


class _Counted:
    """Counts a call as open while it is entered."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def __enter__(self) -> None:
        self._state.num_calls += 1

    def __exit__(self, *error: object) -> None:
        self._state.num_calls -= 1


class _CountedStream(Response):
    """A stream that counts as an open call until it has ended."""

    def __init__(self, stream: EventStream, state: ServerState) -> None:
        self._stream = stream
        self._state = state
        self.raw_headers = stream.raw_headers
        self.background = None
        self.status_code = 200

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        with _Counted(self._state):
            await self._stream(scope, receive, send)


def _card(serving: Serving, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": serving.created,
        "owned_by": "pegainfer",
        "root": serving.root,
        "parent": None,
        "max_model_len": serving.limits.max_model_len,
        "permission": [],
    }


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        return error_response(not_found(f"There is no route {path}"))
    if error.status_code == 405:
        response = error_response(RequestError(f"{request.method} is not allowed on {path}", status=405))
        response.headers.update(error.headers or {})
        return response
    return error_response(RequestError(str(error.detail), status=error.status_code))


async def _any_error(request: Request, error: Exception) -> Response:
    _logger.error("a request failed", exc_info=error)
    return error_response(as_request_error(error))
