"""The load generator against a real HTTP server: what it sends, measures, prints and saves."""

from __future__ import annotations

import itertools
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from pegainfer.cli.bench.report import percentile, summarize
from pegainfer.cli.bench.serve import run
from pegainfer.cli.bench.stream import RequestResult
from pegainfer.errors import ConfigError
from tests.unit.cli.word_server import WordServer

KEYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens"),
    *("total_output_tokens", "request_throughput", "request_goodput", "output_throughput"),
    *("total_token_throughput", "max_output_tokens_per_s", "max_concurrent_requests"),
}
DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"}


def lengths(input_len: int, output_len: int) -> list[str]:
    """Flags for random prompts of these lengths."""
    return ["--random-input-len", str(input_len), "--random-output-len", str(output_len)]


def bench(server: WordServer, tmp_path: Path, *words: str) -> dict[str, Any]:
    """Run the command and read its result file."""
    file = tmp_path / "result.json"
    arguments = ["--base-url", server.url, "--save-result", "--result-filename", str(file), "--disable-tqdm"]
    assert run([*arguments, *words]) == 0
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def test_the_result_file_and_the_printed_block(
    word_server: WordServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = bench(
        word_server,
        tmp_path,
        *("--num-prompts", "12", "--random-input-len", "20", "--random-output-len", "6", "--ignore-eos"),
        *("--max-concurrency", "3", "--save-detailed", "--percentile-metrics", "ttft,tpot,itl,e2el"),
        *(
            "--metric-percentiles",
            "50,99",
            "--goodput",
            "ttft:5000",
            "--metadata",
            "gpu=none",
            "--label",
            "L",
        ),
    )
    assert set(result) >= KEYS | DETAILS
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for statistic in ("mean", "median", "std", "p50", "p99"):
            assert result[f"{statistic}_{metric}_ms"] >= 0
    assert (result["completed"], result["failed"]) == (12, 0)
    assert result["total_input_tokens"] == 12 * 20
    assert result["input_lens"] == [20] * 12
    assert result["total_output_tokens"] == 12 * 6
    assert all(len(itls) == 5 for itls in result["itls"])
    assert result["model_id"] == "/models/words"
    assert result["gpu"] == "none"
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert result["max_concurrent_requests"] == 3 == word_server.peak
    assert 1.0 <= result["mean_itl_ms"] < 100
    printed = capsys.readouterr().out
    for line in (
        "============ Serving Benchmark Result ============",
        "Successful requests:                     12        ",
        "Failed requests:                         0         ",
        "Maximum request concurrency:             3         ",
        "Total input tokens:                      240       ",
        "Total generated tokens:                  72        ",
        "---------------Time to First Token----------------",
        "-----Time per Output Token (excl. 1st token)------",
        "---------------Inter-token Latency----------------",
    ):
        assert line in printed.splitlines()
    assert "P99 TTFT (ms):" in printed


def test_what_is_sent(word_server: WordServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    bench(
        word_server,
        tmp_path,
        *("--num-prompts", "2", "--random-input-len", "5", "--random-output-len", "2", "--header", "X-A=b"),
        *("--temperature", "0", "--top-k", "7", "--extra-body", '{"priority": 3}', "--ignore-eos"),
    )
    path, headers, body = word_server.requests[-1]
    assert path == "/v1/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert headers["X-A"] == "b"
    assert headers["x-request-id"].startswith("bench-")
    assert body.pop("prompt").startswith("w")
    assert body == {
        "model": "words",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 2,
        "temperature": 0,
        "top_k": 7,
        "ignore_eos": True,
        "priority": 3,
    }


def test_chat(word_server: WordServer, tmp_path: Path) -> None:
    options = ["--num-prompts", "2", "--random-input-len", "5", "--random-output-len", "4"]
    result = bench(word_server, tmp_path, "--backend", "openai-chat", "--save-detailed", *options)
    assert result["generated_texts"] == [" 0 1 2 3"] * 2
    assert [len(itls) for itls in result["itls"]] == [3, 3]  # neither the role chunk nor the last one counts
    assert word_server.requests[-1][0] == "/v1/chat/completions"


def test_every_run_has_prompts_of_its_own_unless_seeded(word_server: WordServer, tmp_path: Path) -> None:
    options = [
        "--num-prompts",
        "2",
        "--random-input-len",
        "8",
        "--random-output-len",
        "1",
        "--max-concurrency",
        "1",
    ]
    for seed in ([], [], ["--seed", "3"], ["--seed", "3"]):
        bench(word_server, tmp_path, *options, *seed)
    prompts = [body["prompt"] for body in word_server.completions()]
    assert len(set(prompts[:6])) == 6
    assert prompts[4:6] == prompts[6:8]


def test_raw_ids_share_their_prefix_and_vary_in_length(word_server: WordServer, tmp_path: Path) -> None:
    bench(
        word_server,
        tmp_path,
        *(
            "--num-prompts",
            "40",
            "--random-input-len",
            "20",
            "--random-output-len",
            "1",
            "--random-prefix-len",
            "4",
        ),
        *("--random-range-ratio", "0.5", "--skip-tokenizer-init", "--random-vocab-size", "50"),
    )
    prompts = [body["prompt"] for body in word_server.completions()]
    assert len({tuple(ids[:4]) for ids in prompts}) == 1
    lengths = {len(ids) - 4 for ids in prompts}
    assert min(lengths) >= 10
    assert max(lengths) <= 30
    assert len(lengths) > 5
    assert all(0 <= token < 50 for ids in prompts for token in ids)
    assert not any(path == "/tokenize" for path, _, _ in word_server.requests)


def test_warm_ups_are_not_measured(word_server: WordServer, tmp_path: Path) -> None:
    options = ["--num-prompts", "3", "--random-input-len", "4", "--random-output-len", "2"]
    result = bench(word_server, tmp_path, "--num-warmups", "2", *options)
    assert result["completed"] == 3
    prompts = [body["prompt"] for body in word_server.completions()]
    assert len(set(prompts)) == len(prompts) == 5


def test_the_request_rate_is_kept(word_server: WordServer, tmp_path: Path) -> None:
    options = [
        "--num-prompts",
        "30",
        "--random-input-len",
        "4",
        "--random-output-len",
        "1",
        "--save-detailed",
    ]
    for burstiness in ("1", "0.3", "1000"):
        result = bench(word_server, tmp_path, "--request-rate", "60", "--burstiness", burstiness, *options)
        starts = result["start_times"]
        assert 0.4 < result["duration"] < 1.0
        gaps = sorted(b - a for a, b in itertools.pairwise(starts))
        if burstiness == "1000":
            assert gaps[len(gaps) // 2] == pytest.approx(1 / 60, rel=0.3)


def test_failures_are_counted_and_reported(
    word_server: WordServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    word_server.fail_every = 3
    options = [
        "--num-prompts",
        "9",
        "--random-input-len",
        "4",
        "--random-output-len",
        "2",
        "--max-concurrency",
        "1",
    ]
    assert run(["--base-url", word_server.url, "--disable-tqdm", *options]) == 1
    printed = capsys.readouterr().out
    assert "Failed requests:                         3 " in printed
    assert "HTTP 503" in printed


def test_custom_and_sharegpt_files(word_server: WordServer, tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "a b c", "output_tokens": 2}\n{"prompt": [1, 2]}\n')
    options = ["--disable-tqdm", "--max-concurrency", "1"]
    custom = [
        "--dataset-name",
        "custom",
        "--dataset-path",
        str(lines),
        "--output-len",
        "3",
        "--num-prompts",
        "3",
    ]
    bench(word_server, tmp_path, *options, *custom, "--output-len", "3")
    sent = [(body["prompt"], body["max_tokens"]) for body in word_server.completions()]
    assert sent == [("a b c", 2), ([1, 2], 3), ("a b c", 2)]
    talks = tmp_path / "talks.json"
    turns = [{"value": "how are you today my friend"}, {"value": "very well indeed thank you"}]
    talks.write_text(json.dumps([{"conversations": turns}, {"conversations": turns[:1]}]))
    talk = ["--dataset-name", "sharegpt", "--dataset-path", str(talks), "--num-prompts", "2"]
    bench(word_server, tmp_path, *options, *talk)
    assert [body["max_tokens"] for body in word_server.completions()[3:]] == [5, 5]


def test_it_waits_for_the_server_but_not_for_ever() -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"not ready within 0\.3 s: cannot connect"):
        run(["--port", "9", "--ready-check-timeout-sec", "0.3"])
    assert time.monotonic() - started < 5
    with pytest.raises(ConfigError, match="cannot connect"):
        run(["--port", "9"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-prompts", "0"], "--num-prompts"),
        (["--request-rate", "0"], "--request-rate"),
        (["--request-rate", "nan"], "--request-rate"),
        (["--burstiness", "-1"], "--burstiness"),
        (["--max-concurrency", "0"], "--max-concurrency"),
        (["--random-range-ratio", "1"], "--random-range-ratio"),
        (["--percentile-metrics", "ttft,foo"], "foo"),
        (["--metric-percentiles", "101"], "--metric-percentiles"),
        (["--goodput", "ttft=3"], "--goodput"),
        (["--goodput", "itl:3"], "--goodput"),
        (["--dataset-name", "custom"], "--dataset-path"),
        (["--dataset-name", "custom", "--dataset-path", "/nowhere.jsonl", "--model", "m"], "/nowhere"),
        (["--backend", "openai-chat", "--skip-tokenizer-init"], "--skip-tokenizer-init"),
        (["--base-url", "ftp://x"], "not a URL"),
        (["--base-url", "http://127.0.0.1:99999"], "range"),
        (["--header", "novalue"], "--header"),
    ],
)
def test_wrong_flags_are_named(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(words)


def test_percentiles_interpolate() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([0.0, 10.0], 99) == pytest.approx(9.9)
    assert percentile([], 99) == 0.0


def test_peaks_and_goodput_come_from_single_requests() -> None:
    def result(start: float, ttft: float) -> RequestResult:
        return RequestResult(
            success=True,
            prompt_len=4,
            output_len=6,
            start_time=start,
            ttft=ttft,
            latency=ttft + 0.2,
            itls=[0.1, 0.1],
        )

    results = [result(0.0, 0.1), result(0.05, 0.2), result(2.0, 0.3), RequestResult(error="x")]
    summary = summarize(results, 4.0, goodput={"ttft": 250.0})
    assert summary.good == 2
    assert summary.failed == 1
    assert summary.max_concurrent_requests == 2
    assert summary.max_output_tokens_per_s == 12
    assert summary.samples["tpot"] == pytest.approx([0.04] * 3)
    assert math.isclose(summary.as_json([99])["output_throughput"], 4.5)
