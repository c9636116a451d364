"""Clients that leave, engines that stop or die, signals, keys: real processes and sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.server.servers import Server, launch, serving, until

ENDLESS = {"prompt": [1, 2, 3], "max_tokens": 1500, "ignore_eos": True}


@contextlib.contextmanager
def simulated(model: Path, log: Path, *words: str, tpot_ms: int = 10) -> Iterator[Server]:
    """A server without a model, a token every `tpot_ms`."""
    pace = ("--sim-ttft-ms", "0", "--sim-tpot-ms", str(tpot_ms))
    with serving(log, str(model), "--simulate", "--max-model-len", "2048", *pace, *words) as server:
        yield server


@pytest.fixture(scope="module")
def sim(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A simulated server for tests that leave it alive."""
    words = ("--sse-ping-interval", "0.2", "--max-num-seqs", "8")
    with simulated(tiny_model, tmp_path_factory.mktemp("log") / "log", *words) as server:
        yield server


def open_call(server: Server, **fields: Any) -> http.client.HTTPConnection:
    """A call whose answer nobody has read yet."""
    connection = server.connect()
    connection.request("POST", "/v1/completions", json.dumps(fields), {"Content-Type": "application/json"})
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_t12_a_client_that_leaves_frees_everything(sim: Server, stream: bool) -> None:
    assert until(sim.is_idle)
    aborted = ("vllm:request_success_total", 'finished_reason="abort"')
    before = sim.metric(*aborted)
    connection = open_call(sim, **ENDLESS, stream=stream)
    assert until(lambda: sim.report()["running"] == 1)
    connection.close()
    assert until(sim.is_idle, 1.0)
    assert until(lambda: sim.metric(*aborted) == before + 1, 1.0)


def test_t13_a_storm_of_leavers(sim: Server) -> None:
    connections = [open_call(sim, **ENDLESS, stream=i % 2 == 0) for i in range(60)]
    for i, connection in enumerate(connections):
        time.sleep(0.001 * (i % 7))
        connection.close()
    assert until(sim.is_idle, 5.0)
    assert sim.complete(prompt=[1], max_tokens=2)


def test_t28_silence_is_filled_with_comments(sim: Server) -> None:
    """Behind a full server a stream gets comments, and the openai client no chunk more than tokens."""
    mates = [open_call(sim, prompt=[1], max_tokens=150, ignore_eos=True) for _ in range(8)]
    assert until(lambda: sim.report()["running"] == 8)
    fields = {"prompt": [1], "max_tokens": 3, "ignore_eos": True, "temperature": 0}
    lines = sim.events(**fields)
    comments = [line for line in lines if line.startswith(":")]
    assert len(comments) >= 3
    assert lines[0] == comments[0]
    for mate in mates:
        mate.close()
    mates = [open_call(sim, prompt=[1], max_tokens=100, ignore_eos=True) for _ in range(8)]
    assert until(lambda: sim.report()["running"] == 8)
    stream = sim.client.completions.create(
        model=sim.client.models.list().data[0].id, prompt="a", max_tokens=3, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert 1 <= len(list(stream)) <= 4
    for mate in mates:
        mate.close()


def test_t27_a_slow_reader_holds_nobody_up(sim: Server) -> None:
    assert until(sim.is_idle)
    with slow_reader(sim, ENDLESS):
        started = time.monotonic()
        sim.complete(prompt=[1], max_tokens=100, ignore_eos=True)
        assert time.monotonic() - started < 5.0  # 1.0 s at 10 ms a token
    assert until(sim.is_idle, 5.0)


def test_t27_a_slow_reader_costs_little_memory(tiny_model: Path, tmp_path: Path) -> None:
    """200,000 tokens that nobody reads; an event each would take more than 30 MB."""
    words = ("--sim-ttft-ms", "0", "--sim-tpot-ms", "0", "--max-model-len", "262144")
    with serving(tmp_path / "log", str(tiny_model), "--simulate", *words) as server:
        server.complete(prompt=[1], max_tokens=50, ignore_eos=True)
        before = psutil.Process(server.process.pid).memory_info().rss
        with slow_reader(server, {"prompt": [1], "max_tokens": 200_000, "ignore_eos": True}):
            assert until(server.is_idle, 60.0)
            assert server.metric("vllm:generation_tokens_total") >= 200_000
            assert psutil.Process(server.process.pid).memory_info().rss - before < 10e6


@contextlib.contextmanager
def slow_reader(server: Server, fields: dict[str, Any]) -> Iterator[None]:
    """A client that streams and does not read."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps({**fields, "stream": True}).encode()
        head = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json")
        connection.sendall("\r\n".join((*head, f"Content-Length: {len(body)}", "", "")).encode() + body)
        connection.recv(1)
        yield


def test_t24_a_stopped_engine_is_unhealthy_until_it_moves(tiny_model: Path, tmp_path: Path) -> None:
    with simulated(tiny_model, tmp_path / "log", "--health-stall-timeout", "0.5") as server:
        time.sleep(1.0)
        assert server.health() == 200  # idle is not stalled
        connection = open_call(server, **ENDLESS, stream=True)
        assert until(lambda: server.report()["running"] == 1)
        engine = server.engine()
        engine.send_signal(signal.SIGSTOP)
        assert until(lambda: server.health() == 503, 3.0)
        engine.send_signal(signal.SIGCONT)
        assert until(lambda: server.health() == 200, 3.0)
        connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_killed_engine_is_an_error_for_everybody(tiny_model: Path, tmp_path: Path, stream: bool) -> None:
    with simulated(tiny_model, tmp_path / "log") as server:
        client = server.client
        model = client.models.list().data[0].id
        threading.Timer(0.5, server.engine().kill).start()

        def read() -> None:
            answer: Any = client.completions.create(
                model=model, prompt="a", max_tokens=1500, stream=stream, extra_body={"ignore_eos": True}
            )
            for _ in answer:
                pass

        with pytest.raises(openai.APIError) as caught:
            read()
        assert "engine" in str(caught.value)
        assert server.health() == 503
        assert server.post("/v1/completions", prompt="a")[0] == 503
        assert server.process.wait(15) == 1
        assert "Traceback" not in server.output()


def test_t25_sigterm_lets_streams_finish(tiny_model: Path, tmp_path: Path) -> None:
    with simulated(tiny_model, tmp_path / "log", "--shutdown-timeout", "30") as server:
        calls = [open_call(server, **{**ENDLESS, "max_tokens": 150}, stream=True) for _ in range(3)]
        assert until(lambda: server.report()["running"] == 3)
        server.process.send_signal(signal.SIGTERM)
        assert until(lambda: server.health() == 503)
        status, answer = server.post("/v1/completions", prompt="a")
        assert (status, answer["error"]["type"]) == (503, "ServiceUnavailable")
        for call in calls:
            text = call.getresponse().read().decode()
            assert '"finish_reason":"length"' in text
            assert text.endswith("data: [DONE]\n\n")
            call.close()
        assert server.process.wait(10) == 0


def test_t25_when_time_is_up_streams_are_ended(tiny_model: Path, tmp_path: Path) -> None:
    with simulated(tiny_model, tmp_path / "log", "--shutdown-timeout", "0.5") as server:
        call = open_call(server, **ENDLESS, stream=True)
        assert until(lambda: server.report()["running"] == 1)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 0
        assert call.getresponse().read().decode().endswith("data: [DONE]\n\n")
        call.close()


def test_t25_a_second_signal_ends_now(tiny_model: Path, tmp_path: Path) -> None:
    with simulated(tiny_model, tmp_path / "log") as server:
        call = open_call(server, **ENDLESS, stream=True)
        assert until(lambda: server.report()["running"] == 1)
        engine = server.engine()
        server.process.send_signal(signal.SIGTERM)
        assert until(lambda: server.health() == 503)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(3) != 0
        assert until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, 5.0)
        call.close()


def test_a_killed_server_leaves_no_engine(tiny_model: Path, tmp_path: Path) -> None:
    with simulated(tiny_model, tmp_path / "log") as server:
        engine = server.engine()
        server.process.kill()
        assert until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, 5.0)


def test_t26_keys(tiny_model: Path, tmp_path: Path) -> None:
    with simulated(tiny_model, tmp_path / "log", "--api-key", "one", "two") as server:
        for method, path in (
            *(("POST", f"/v1/{name}") for name in ("completions", "chat/completions", "embeddings")),
            *(("GET", path) for path in ("/v1/models", "/metrics", "/version", "/nope")),
            *(("POST", path) for path in ("/tokenize", "/detokenize", "/reset_prefix_cache")),
        ):
            status, answer = server.call(method, path, b"{}" if method == "POST" else None)
            assert (status, answer["error"]["type"]) == (401, "authentication_error"), path
        wrong = {"Authorization": "Bearer onE"}
        assert server.call("GET", "/v1/models", headers=wrong)[0] == 401
        assert server.health() == 200
        asks = {"Origin": "http://x", "Access-Control-Request-Method": "POST"}
        assert server.call("OPTIONS", "/v1/completions", headers=asks)[0] == 200
        for headers in ({"Authorization": "Bearer one"}, {"x-api-key": "two"}):
            assert server.call("GET", "/v1/models", headers=headers)[0] == 200


def test_probes_answer_while_the_model_loads(tiny_model: Path, tmp_path: Path) -> None:
    with launch(tmp_path / "log", str(tiny_model), "--load-format", "dummy") as server:
        seen = set()

        def ready() -> bool:
            seen.add(server.health())
            return 200 in seen

        assert until(ready, 60)
        assert seen <= {0, 503, 200}
        assert 503 in seen


def test_a_request_id_comes_back(sim: Server) -> None:
    connection = sim.connect()
    headers = {"Content-Type": "application/json", "X-Request-Id": "mine"}
    connection.request("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 1}', headers)
    response = connection.getresponse()
    assert response.headers["X-Request-Id"] == "mine"
    assert json.loads(response.read())["id"] == "cmpl-mine"
    connection.close()


def test_a_socket_file(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    command = [sys.executable, "-m", "pegainfer", "serve", str(tiny_model), "--simulate", "--uds", str(path)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:

        def status() -> int:
            with socket.socket(socket.AF_UNIX) as client, contextlib.suppress(OSError):
                client.connect(str(path))
                client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                return int(client.recv(64).split()[1])
            return 0

        assert until(lambda: status() == 200, 60)
    finally:
        process.terminate()
        assert process.wait(15) == 0


def test_a_port_in_use_costs_nothing(tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "pegainfer", "serve", str(tiny_model), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"cannot listen on 0.0.0.0:{port}" in done.stderr


def test_metrics_have_vllms_names(sim: Server) -> None:
    sim.complete(prompt=[1, 2, 3], max_tokens=4, ignore_eos=True)
    text = sim.call("GET", "/metrics")[1]
    for name in (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
        *("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total"),
        *("generation_tokens_total", "request_success_total", "time_to_first_token_seconds_bucket"),
        *("inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_bucket"),
    ):
        assert f"\nvllm:{name}{{" in text, name
