"""What `bench serve` can be told; names, meanings and defaults are those of `vllm bench serve`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pegainfer.cli.bench.report import METRICS
from pegainfer.config import option
from pegainfer.errors import ConfigError

__all__ = [
    "Benchmark",
    "LoadShapeOptions",
    "PromptOptions",
    "ReportOptions",
    "TargetOptions",
    "check",
    "numbers",
    "pairs",
]


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """Which server, and how to speak to it."""

    backend: str = option("openai", "Kind of API.", choices=("openai", "vllm", "openai-chat"))
    base_url: str | None = option(None, "URL of the server, instead of --host and --port.")
    host: str = option("127.0.0.1", "Host of the server.")
    port: int = option(8000, "Port of the server.")
    endpoint: str | None = option(
        None, "Path of the API; /v1/completions or /v1/chat/completions by default."
    )
    model: str | None = option(None, "Model to ask for; the server's first one by default.")
    served_model_name: str | None = option(None, "Name of the model in requests, when it is not --model.")
    tokenizer: str | None = option(None, "Noted in the result file; the server counts tokens.")
    header: tuple[str, ...] = option((), "Extra HTTP headers.", kind="list", metavar="KEY=VALUE")
    insecure: bool = option(False, "Do not check TLS certificates.")
    ready_check_timeout_sec: float = option(0.0, "Seconds to wait for the server to become ready.")


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """What is asked."""

    dataset_name: str = option("random", "Source of the prompts.", choices=("random", "custom", "sharegpt"))
    dataset_path: str | None = option(None, "File of the custom (JSONL) or sharegpt (JSON) dataset.")
    num_prompts: int = option(1000, "Requests to send.")
    random_input_len: int = option(1024, "Tokens per random prompt.")
    random_output_len: int = option(128, "Tokens to make per random prompt.")
    random_range_ratio: float = option(0.0, "Lengths vary uniformly within 1 ± this.")
    random_prefix_len: int = option(0, "Tokens in front that all random prompts share.")
    random_vocab_size: int | None = option(None, "Draw raw ids below this instead of from tokenised text.")
    input_len: int | None = option(None, "Same as --random-input-len.")
    output_len: int | None = option(None, "Tokens to make per prompt, for every dataset.")
    skip_tokenizer_init: bool = option(False, "Send token ids instead of text.")
    seed: int | None = option(None, "Seed of prompts and arrivals; a new one for every run by default.")
    ignore_eos: bool = option(False, "Make every output as long as asked.")
    temperature: float | None = option(None, "Sampling temperature; the server's default if not given.")
    top_p: float | None = option(None, "Nucleus sampling.")
    top_k: int | None = option(None, "Most likely tokens to sample from.")
    min_p: float | None = option(None, "Least probability relative to the most likely token.")
    logprobs: int | None = option(None, "Log-probabilities to ask for.")
    extra_body: dict[str, Any] = option({}, "Fields added to every request.", kind="json")


@dataclass(frozen=True, slots=True)
class LoadShapeOptions:
    """When it is asked."""

    request_rate: float = option(math.inf, "Requests per second; `inf` sends all at once.")
    burstiness: float = option(1.0, "1: Poisson arrivals; below: in bursts; above: more even.")
    max_concurrency: int | None = option(None, "Most requests in flight.")
    num_warmups: int = option(0, "Requests before the measurement, with prompts of their own.")


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What is reported, and where."""

    percentile_metrics: str = option("ttft,tpot,itl", "Metrics to print: ttft, tpot, itl, e2el.")
    metric_percentiles: str = option("99", "Percentiles to report, separated by commas.")
    goodput: tuple[str, ...] = option(
        (), "Service levels in milliseconds, e.g. ttft:500 tpot:50.", kind="list", metavar="METRIC:MS"
    )
    save_result: bool = option(False, "Write a JSON file.")
    save_detailed: bool = option(False, "Write lengths, times, texts and errors of every request too.")
    append_result: bool = option(False, "Append to the file instead of replacing it.")
    result_dir: str | None = option(None, "Directory of the file.")
    result_filename: str | None = option(None, "Name of the file.")
    metadata: tuple[str, ...] = option((), "Notes for the file.", kind="list", metavar="KEY=VALUE")
    label: str | None = option(None, "Label of the run; part of the file's name.")
    disable_tqdm: bool = option(False, "No progress bar.")


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Everything one run was asked for."""

    target: TargetOptions
    prompts: PromptOptions
    shape: LoadShapeOptions
    report: ReportOptions


def check(benchmark: Benchmark) -> None:
    """Raise `ConfigError` for values that make no run."""
    prompts, shape, report = benchmark.prompts, benchmark.shape, benchmark.report
    if prompts.num_prompts < 1:
        raise ConfigError(f"--num-prompts must be at least 1, got {prompts.num_prompts}")
    if prompts.dataset_name != "random" and prompts.dataset_path is None:
        raise ConfigError(f"--dataset-name {prompts.dataset_name} needs --dataset-path")
    if not 0.0 <= prompts.random_range_ratio < 1.0:
        raise ConfigError(f"--random-range-ratio must be in [0, 1), got {prompts.random_range_ratio}")
    if prompts.skip_tokenizer_init and benchmark.target.backend == "openai-chat":
        raise ConfigError("--skip-tokenizer-init sends token ids, which chat messages cannot carry")
    if not shape.request_rate > 0:
        raise ConfigError(f"--request-rate must be positive, got {shape.request_rate}")
    if not shape.burstiness > 0:
        raise ConfigError(f"--burstiness must be positive, got {shape.burstiness}")
    if shape.max_concurrency is not None and shape.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be at least 1, got {shape.max_concurrency}")
    for metric in report.percentile_metrics.split(","):
        if metric not in METRICS:
            raise ConfigError(f"--percentile-metrics knows {', '.join(METRICS)}, not {metric!r}")
    for metric, limit in pairs("--goodput", report.goodput, ":"):
        if metric not in ("ttft", "tpot", "e2el") or not _is_number(limit):
            raise ConfigError(f"--goodput expects ttft:MS, tpot:MS or e2el:MS, got {metric}:{limit}")
    numbers(report.metric_percentiles)


def pairs(flag: str, words: tuple[str, ...], separator: str) -> list[tuple[str, str]]:
    """The two sides of each word around `separator`; raises `ConfigError` for a word without one."""
    parts = [word.partition(separator) for word in words]
    for left, found, _ in parts:
        if not found:
            raise ConfigError(f"{flag} expects NAME{separator}VALUE, got {left!r}")
    return [(left, right) for left, _, right in parts]


def numbers(text: str) -> list[float]:
    """Percentiles from `50,99`; raises `ConfigError`."""
    if not all(_is_number(part) and 0 <= float(part) <= 100 for part in text.split(",")):
        raise ConfigError(f"--metric-percentiles expects numbers from 0 to 100 and commas, got {text!r}")
    return [float(part) for part in text.split(",")]


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
