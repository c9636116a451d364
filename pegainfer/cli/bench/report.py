"""From request results to the numbers that people compare: the printed block and the JSON keys of
`vllm bench serve`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pegainfer.cli.bench.stream import RequestResult

__all__ = ["METRICS", "Summary", "percentile", "print_summary", "summarize"]

METRICS = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals of a run over `duration` seconds. `samples` holds seconds by metric name."""

    duration: float
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    good: int | None
    samples: dict[str, list[float]]

    def as_json(self, percentiles: Sequence[float]) -> dict[str, Any]:
        """The result file's keys that come from measurement; times in milliseconds."""
        duration = self.duration
        values: dict[str, Any] = {
            "duration": duration,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.total_input_tokens,
            "total_output_tokens": self.total_output_tokens,
            "request_throughput": self.completed / duration,
            "request_goodput": None if self.good is None else self.good / duration,
            "output_throughput": self.total_output_tokens / duration,
            "total_token_throughput": (self.total_input_tokens + self.total_output_tokens) / duration,
            "max_output_tokens_per_s": self.max_output_tokens_per_s,
            "max_concurrent_requests": self.max_concurrent_requests,
        }
        for name, seconds in self.samples.items():
            values[f"mean_{name}_ms"] = 1e3 * (statistics.fmean(seconds) if seconds else 0.0)
            values[f"median_{name}_ms"] = 1e3 * percentile(seconds, 50)
            values[f"std_{name}_ms"] = 1e3 * (statistics.pstdev(seconds) if seconds else 0.0)
            for p in percentiles:
                values[f"p{p:g}_{name}_ms"] = 1e3 * percentile(seconds, p)
        return values


def summarize(
    results: Sequence[RequestResult], duration: float, *, goodput: dict[str, float] | None = None
) -> Summary:
    """Add up a run. `goodput` maps metric names to the milliseconds that a good request stays within."""
    done = [result for result in results if result.success]
    per_second: dict[int, int] = {}
    changes: list[tuple[float, int]] = []
    for result in done:
        moment = result.start_time + result.ttft
        arrivals = [moment := moment + gap for gap in [0.0, *result.itls]]
        # A chunk may carry several tokens: spread the tokens that usage counts over the chunks.
        for index, arrival in enumerate(arrivals):
            tokens = (index + 1) * result.output_len // len(arrivals) - index * result.output_len // len(
                arrivals
            )
            per_second[int(arrival)] = per_second.get(int(arrival), 0) + tokens
        changes += [(result.start_time, 1), (result.start_time + result.latency, -1)]
    running = peak = 0
    for _, change in sorted(changes):
        running += change
        peak = max(peak, running)
    good = None
    if goodput:
        good = sum(
            all(1e3 * _of(result, name) <= limit for name, limit in goodput.items()) for result in done
        )
    return Summary(
        duration=duration,
        completed=len(done),
        failed=len(results) - len(done),
        total_input_tokens=sum(result.prompt_len for result in done),
        total_output_tokens=sum(result.output_len for result in done),
        max_output_tokens_per_s=float(max(per_second.values(), default=0)),
        max_concurrent_requests=peak,
        good=good,
        samples={
            "ttft": [result.ttft for result in done],
            "tpot": [result.tpot for result in done if result.output_len > 1],
            "itl": [gap for result in done for gap in result.itls],
            "e2el": [result.latency for result in done],
        },
    )


def print_summary(
    summary: Summary,
    *,
    request_rate: float,
    max_concurrency: int | None,
    metrics: Sequence[str],
    percentiles: Sequence[float],
) -> None:
    """Print the block that scripts look for."""
    values = summary.as_json(percentiles)
    print(" Serving Benchmark Result ".center(50, "="))
    _line("Successful requests:", summary.completed)
    _line("Failed requests:", summary.failed)
    if max_concurrency is not None:
        _line("Maximum request concurrency:", max_concurrency)
    if not math.isinf(request_rate):
        _line("Request rate configured (RPS):", request_rate)
    _line("Benchmark duration (s):", summary.duration)
    _line("Total input tokens:", summary.total_input_tokens)
    _line("Total generated tokens:", summary.total_output_tokens)
    _line("Request throughput (req/s):", values["request_throughput"])
    if summary.good is not None:
        _line("Request goodput (req/s):", values["request_goodput"])
    _line("Output token throughput (tok/s):", values["output_throughput"])
    _line("Peak output token throughput (tok/s):", summary.max_output_tokens_per_s)
    _line("Peak concurrent requests:", float(summary.max_concurrent_requests))
    _line("Total token throughput (tok/s):", values["total_token_throughput"])
    for name in metrics:
        short, long = METRICS[name]
        print(long.center(50, "-"))
        _line(f"Mean {short} (ms):", values[f"mean_{name}_ms"])
        _line(f"Median {short} (ms):", values[f"median_{name}_ms"])
        for p in percentiles:
            _line(f"P{p:g} {short} (ms):", values[f"p{p:g}_{name}_ms"])
    print("=" * 50)


def percentile(values: Sequence[float], p: float) -> float:
    """The `p`-th percentile with linear interpolation; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    position = (len(ordered) - 1) * p / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _of(result: RequestResult, name: str) -> float:
    return {"ttft": result.ttft, "tpot": result.tpot, "e2el": result.latency}[name]


def _line(label: str, value: float) -> None:
    print(f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}")
