"""The load generator and start-up benchmark against our own server with a simulated model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pegainfer.cli.bench.processes import running_server
from pegainfer.cli.bench.serve import run as bench_serve
from pegainfer.cli.bench.startup import run as bench_startup

PACE = ["--simulate", "--sim-ttft-ms", "1", "--sim-tpot-ms", "2"]


def test_a_thousand_requests_at_once_without_an_error(smollm2: Path, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    words = ["--num-prompts", "1000", "--max-concurrency", "256", "--ignore-eos", "--disable-tqdm"]
    words += ["--random-input-len", "32", "--random-output-len", "8", "--save-result", "--result-filename"]
    with running_server([str(smollm2), *PACE]) as server:
        assert bench_serve(["--port", str(server.port), *words, str(file)]) == 0
    result = json.loads(file.read_text())
    assert (result["completed"], result["failed"]) == (1000, 0)
    assert result["total_output_tokens"] == 8000
    assert result["total_input_tokens"] == pytest.approx(32000, rel=0.02)
    assert result["max_concurrent_requests"] == 256


def test_start_up(smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "startup.json"
    counts = ["--num-iters-cold", "1", "--num-iters-warmup", "0", "--num-iters-warm", "1"]
    assert bench_startup([str(smollm2), *PACE, *counts, "--output-json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "Cold start (median of 1): ready in " in printed
    assert "Warm start (median of 1): ready in " in printed
    result = json.loads(file.read_text())
    for start in (*result["cold"], *result["warm"]):
        assert 0 < start["ready_s"] < start["first_token_s"] < 60
        assert start["processes"] == 2
        assert start["pss_bytes"] < start["rss_bytes"]
