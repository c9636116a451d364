"""Commands that generate text, as processes: with a simulated model in them, or with a server's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.unit.cli.word_server import WordServer

SIMULATED = ["--simulate", "--sim-ttft-ms", "1", "--sim-tpot-ms", "1"]


def pegainfer(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pegainfer", *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_generate_from_the_command_line_and_from_standard_input(smollm2: Path) -> None:
    words = ["generate", str(smollm2), *SIMULATED, "--max-tokens", "5"]
    results = [
        pegainfer(*words, "Once upon"),
        pegainfer(*words, "--prompt", "Once upon"),
        pegainfer(*words, stdin="Once upon\n"),
    ]
    for done in results:
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.strip()
    assert len({done.stdout for done in results}) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x", "--prompt", "y"], "the prompt is given twice"),
        ([], "the prompt is empty"),
        (["x", "--temperature", "-1"], "temperature must be in [0.0, 2.0], got -1.0"),
        (["x", "--max-model-len", "1"], "maximum context length is 1 tokens"),
    ],
)
def test_generate_refuses_in_one_line(smollm2: Path, words: list[str], message: str) -> None:
    done = pegainfer("generate", str(smollm2), *SIMULATED, *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_conversation_in_this_process(smollm2: Path) -> None:
    lines = "/help\nhello\n/what\n/reset\nand again\n/exit\nnever said\n"
    done = pegainfer("chat", str(smollm2), *SIMULATED, "--max-tokens", "4", stdin=lines)
    assert (done.returncode, done.stderr) == (0, "")
    assert "/reset  forget the conversation" in done.stdout
    assert "There is no command /what" in done.stdout
    assert "The conversation is forgotten." in done.stdout
    assert pegainfer("chat", str(smollm2), *SIMULATED, "--max-tokens", "4", "--quick", "hello").stdout.strip()


def test_a_conversation_with_a_server(word_server: WordServer) -> None:
    words = ["chat", "--url", word_server.url, "--max-tokens", "3", "--temperature", "0"]
    done = pegainfer(*words, "--system-prompt", "Be brief.", stdin="one\ntwo\n/reset\nthree\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == " 0 1 2\n 0 1 2\nThe conversation is forgotten.\n 0 1 2\n"
    first, second, third = word_server.completions()
    assert (first["model"], first["temperature"], first["stream"]) == ("words", 0.0, True)
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert [message["content"] for message in second["messages"]] == ["Be brief.", "one", " 0 1 2", "two"]
    assert [message["content"] for message in third["messages"]] == ["Be brief.", "three"]


def test_what_a_server_refuses_is_said_and_forgotten(word_server: WordServer) -> None:
    word_server.fail_every = 2
    done = pegainfer("chat", "--url", word_server.url, "--max-tokens", "2", stdin="a\nb\nc\n")
    assert done.returncode == 0
    assert done.stderr == "pegainfer: error: the server answers 503: busy\n"
    assert [m["content"] for m in word_server.completions()[2]["messages"]] == ["a", " 0 1", "c"]
    assert pegainfer("chat", "--url", word_server.url, "--quick", "d", "--max-tokens", "2").returncode == 2


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://127.0.0.1:9"])
def test_a_server_that_is_not_there(url: str) -> None:
    done = pegainfer("chat", "--url", url)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert url in done.stderr


def test_ctrl_c_stops_the_answer_not_the_conversation(word_server: WordServer) -> None:
    word_server.token_seconds = 0.1
    command = [sys.executable, "-m", "pegainfer", "chat", "--url", word_server.url, "--max-tokens", "600"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]  # keywords
        process.stdin.write("count\n")
        process.stdin.flush()
        assert process.stdout.read(4) == " 0 1"
        os.kill(process.pid, signal.SIGINT)
        deadline = time.monotonic() + 20
        while "[stopped]" not in process.stdout.readline():
            assert time.monotonic() < deadline
        process.stdin.write("/exit\n")
        process.stdin.close()
        assert process.wait(20) == 0


def test_offline_benchmarks(smollm2: Path, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    sizes = ["--input-len", "20", "--output-len", "6", "--output-json", str(file)]
    done = pegainfer(
        "bench", "throughput", str(smollm2), *SIMULATED, *sizes, "--num-prompts", "9", "--n", "2"
    )
    assert done.returncode == 0
    assert "Throughput: " in done.stdout
    assert "Total num prompt tokens:  180\nTotal num output tokens:  108\n" in done.stdout
    result = json.loads(file.read_text())
    assert (result["num_requests"], result["total_num_tokens"]) == (9, 288)
    counts = ["--batch-size", "2", "--num-iters", "3", "--num-iters-warmup", "1"]
    done = pegainfer("bench", "latency", str(smollm2), *SIMULATED, *sizes, *counts)
    assert done.returncode == 0
    assert "Avg latency: " in done.stdout
    assert "99% percentile latency: " in done.stdout
    result = json.loads(file.read_text())
    assert len(result["latencies"]) == 3
    assert result["avg_latency"] >= 0.006
    done = pegainfer("bench", "latency", "--batch-size", "0")
    assert (done.returncode, done.stderr) == (2, "pegainfer: error: --batch-size must be at least 1\n")
