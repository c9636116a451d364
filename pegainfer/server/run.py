"""The server process: binds, loads, serves, drains, and says with its exit code how it ended.

The socket is bound before anything is loaded, so a port in use costs nothing, and probes get a 503 instead
of a refused connection while the model loads. SIGTERM (or Ctrl-C) drains: new calls get 503, open ones may
finish within `shutdown_timeout`. A second signal ends everything now. When the engine is lost, open calls get
an error, probes get 503 for a moment, and the exit code is 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from prometheus_client import CollectorRegistry

from pegainfer.config import EngineConfig, ServerOptions
from pegainfer.engine.launch import LaunchedEngine, launch_engine
from pegainfer.engine.metrics import EngineMetrics, ThroughputLog
from pegainfer.errors import ConfigError, PegaInferError
from pegainfer.log import get_logger
from pegainfer.server.app import make_app
from pegainfer.server.report import startup_lines
from pegainfer.server.serving import Serving
from pegainfer.server.state import ServerPhase, ServerState

__all__ = ["EXIT_ENGINE_LOST", "EXIT_USER_ERROR", "run_server"]

EXIT_ENGINE_LOST = 1
EXIT_USER_ERROR = 2

_logger = get_logger(__name__)

_BACKLOG = 2048
_KEEP_ALIVE_S = 75  # longer than proxies keep idle connections
_LAST_ANSWERS_S = 3.0
"""How long a server without an engine still tells its clients so."""
_LOG_INTERVAL_S = 10.0


def run_server(config: EngineConfig, options: ServerOptions) -> int:
    """Serve until a signal; exit code 0 after a drain, 1 when the engine was lost, 2 for user errors."""
    try:
        bound = _bind(options)
    except PegaInferError as error:
        return _complain(error)
    with bound:
        return uvloop.run(_Process(config, options).serve(bound))


class _Server(uvicorn.Server):
    """uvicorn without signal handlers of its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Process:
    def __init__(self, config: EngineConfig, options: ServerOptions) -> None:
        self._config = config
        self._options = options
        self._started = time.perf_counter()
        self._stop = asyncio.Event()
        registry = CollectorRegistry()
        metrics = EngineMetrics(config.served_names[0])
        registry.register(metrics)
        self._state = ServerState(options, metrics, registry)

    async def serve(self, bound: socket.socket) -> int:
        """The whole life of the process, in order."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        http = _Server(self._uvicorn_config())
        serving = asyncio.ensure_future(http.serve(sockets=[bound]))
        launching = asyncio.ensure_future(launch_engine(self._config, observer=self._state.metrics))
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({launching, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
            if not launching.done():  # stopped while loading
                launching.cancel()
                await asyncio.wait({launching})
                return 0 if stopping.done() else EXIT_USER_ERROR
            try:
                launched = launching.result()
            except PegaInferError as error:
                return _complain(error)
            return await self._serve_engine(launched, stopping)
        finally:
            stopping.cancel()
            http.should_exit = True
            await asyncio.wait({serving})

    async def _serve_engine(self, launched: LaunchedEngine, stopping: asyncio.Future[Any]) -> int:
        client, state = launched.client, self._state
        try:
            state.serving = Serving(launched, self._config, self._options)
        except PegaInferError as error:
            await client.close()
            return _complain(error)
        state.metrics.use_info(client.info)
        state.phase = ServerPhase.serving
        for line in startup_lines(client.info, seconds=time.perf_counter() - self._started):
            _logger.info("%s", line)
        _logger.info("Serving on %s", self._address())
        logging = asyncio.ensure_future(self._log_throughput(launched))
        died = asyncio.ensure_future(client.died())
        try:
            either: set[asyncio.Future[Any]] = {stopping, died}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                return await self._mourn(launched)
            state.phase = ServerPhase.draining
            _logger.info(
                "Shutting down: %d open calls may finish within %g s",
                state.num_calls,
                self._options.shutdown_timeout,
            )
            await client.shutdown(self._options.shutdown_timeout)
            await self._wait_for_calls(_LAST_ANSWERS_S)
            return 0
        finally:
            logging.cancel()
            died.cancel()

    async def _mourn(self, launched: LaunchedEngine) -> int:
        self._state.phase = ServerPhase.dead
        _logger.error("The engine is gone; the server ends")
        code = await launched.client.close()
        await asyncio.sleep(_LAST_ANSWERS_S)
        return code if code > 0 else EXIT_ENGINE_LOST

    async def _wait_for_calls(self, seconds: float) -> None:
        """Let the last bytes reach their clients."""
        deadline = time.monotonic() + seconds
        while self._state.num_calls and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    async def _log_throughput(self, launched: LaunchedEngine) -> None:
        log = ThroughputLog()
        while not self._options.disable_log_stats:
            await asyncio.sleep(_LOG_INTERVAL_S)
            line = log.line(launched.client.stats, time.monotonic())
            if line is not None:
                _logger.info("%s", line)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            _logger.warning("Second signal: ending now")
            os._exit(128 + signal.SIGTERM)
        self._stop.set()

    def _uvicorn_config(self) -> uvicorn.Config:
        options = self._options
        return uvicorn.Config(
            make_app(self._state),
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            log_level=options.uvicorn_log_level if options.uvicorn_log_level != "info" else "warning",
            access_log=not options.disable_uvicorn_access_log,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(_LAST_ANSWERS_S),
            root_path=options.root_path,
            ssl_keyfile=options.ssl_keyfile,
            ssl_certfile=options.ssl_certfile,
        )

    def _address(self) -> str:
        options = self._options
        if options.uds is not None:
            return f"unix:{options.uds}"
        scheme = "https" if options.ssl_certfile else "http"
        host = f"[{options.host}]" if ":" in options.host else options.host
        return f"{scheme}://{host}:{options.port}"


def _bind(options: ServerOptions) -> socket.socket:
    """The listening socket. Raises `ConfigError` when the address cannot be had."""
    for name, file in (("--ssl-keyfile", options.ssl_keyfile), ("--ssl-certfile", options.ssl_certfile)):
        if file is not None and not Path(file).is_file():
            raise ConfigError(f"{name} {file} does not exist")
    if options.uds is not None:
        return _bind_path(options.uds)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"cannot listen on {options.host}:{options.port}: {reason}; choose another --port or --host"
        ) from None
    return bound


def _bind_path(path: str) -> socket.socket:
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            if Path(path).is_socket():
                _refuse_if_served(path)
                os.unlink(path)
        bound.bind(path)
        bound.listen(_BACKLOG)
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen on --uds {path}: {error.strerror or error}") from None
    return bound


def _refuse_if_served(path: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return
    raise ConfigError(f"cannot listen on --uds {path}: another server does")


def _complain(error: PegaInferError) -> int:
    print(f"pegainfer: error: {error}", file=sys.stderr, flush=True)
    return EXIT_USER_ERROR
