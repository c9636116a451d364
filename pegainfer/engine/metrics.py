"""Prometheus metrics under the names that vLLM's dashboards read, and the throughput line of the log.

Times of requests are taken here, where their updates arrive, so that slow clients do not show as a slow
engine. Values are plain numbers; families are made when somebody asks.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pegainfer.engine.messages import AddRequest, EngineInfo, EngineStats, FinishReason, RequestUpdate

__all__ = ["EngineMetrics", "Histogram", "ThroughputLog"]

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL = (
    *(0.001, 0.002, 0.003, 0.005, 0.0075),  # an engine may well be faster than the rest can tell
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))
_N = (1.0, 2.0, 5.0, 10.0, 20.0)


class Histogram:
    """Counts of observations by upper bound."""

    __slots__ = ("_bounds", "_counts", "_sum", "help", "name")

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name = f"vllm:{name}"
        self.help = help
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, names: Sequence[str], values: Sequence[str]) -> Metric:
        """The Prometheus form."""
        buckets, total = [], 0
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if math.isinf(bound) else str(bound), total))
        family = HistogramMetricFamily(self.name, self.help, labels=names)
        family.add_metric(values, buckets, self._sum)
        return family


@dataclass(slots=True)
class _Account:
    """A request under way."""

    num_prompt_tokens: int
    max_tokens: int | None
    started_at: float
    num_tokens: int = 0
    first_at: float = 0.0
    last_at: float = 0.0


class EngineMetrics(Collector):
    """Everything that `/metrics` says of one engine; for a `CollectorRegistry`. The `observer` of an
    `EngineClient`. Label `engine` is the index of the engine.
    """

    def __init__(self, model_name: str, *, engine: str = "0") -> None:
        self._names = ("model_name", "engine")
        self._values = (model_name, engine)
        self._info: EngineInfo | None = None
        self._stats = EngineStats()
        self._accounts: dict[str, _Account] = {}
        self._finished: dict[FinishReason, int] = dict.fromkeys(FinishReason, 0)
        self._time_to_first = Histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT)
        self._between = Histogram("inter_token_latency_seconds", "Time between outputs of a request.", _ITL)
        self._per_token = Histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first, by request.", _ITL
        )
        self._end_to_end = Histogram("e2e_request_latency_seconds", "Arrival to last token.", _REQUEST)
        self._queue = Histogram("request_queue_time_seconds", "Time in the queue.", _REQUEST)
        self._inference = Histogram("request_inference_time_seconds", "Time in steps.", _REQUEST)
        self._prefill = Histogram("request_prefill_time_seconds", "First step to first token.", _REQUEST)
        self._decode = Histogram("request_decode_time_seconds", "First to last token.", _REQUEST)
        self._step_tokens = Histogram("iteration_tokens_total", "Tokens of a step.", _STEP_TOKENS)
        self._n = Histogram("request_params_n", "Choices that a request asked for.", _N)
        self._bind_sizes(1 << 20)

    def use_info(self, info: EngineInfo) -> None:
        """Take what the engine decided at start."""
        self._info = info
        self._bind_sizes(info.max_model_len)

    def observe_n(self, n: int) -> None:
        """A client asked for `n` choices of a prompt."""
        self._n.observe(n)

    def on_added(self, request: AddRequest, now: float) -> None:
        """A request was sent to the engine."""
        waited = max(0.0, time.time() - request.arrival_time) if request.arrival_time else 0.0
        self._accounts[request.request_id] = _Account(
            len(request.prompt_token_ids), request.params.max_tokens, now - waited
        )

    def on_update(self, update: RequestUpdate, now: float) -> None:
        """A step changed a request."""
        account = self._accounts.get(update.request_id)
        if account is None:
            return
        if update.token_ids:
            if account.num_tokens:
                self._between.observe(now - account.last_at)
            else:
                account.first_at = now
                self._time_to_first.observe(now - account.started_at)
            account.num_tokens += len(update.token_ids)
            account.last_at = now
        if update.finish_reason is not None:
            del self._accounts[update.request_id]
            self._close(account, update.finish_reason, now)
            if account.num_tokens:
                self._queue.observe(update.queued_s)
                self._prefill.observe(update.prefill_s)
                self._decode.observe(update.decode_s)
                self._inference.observe(update.prefill_s + update.decode_s)
                self._computed_tokens.observe(account.num_prompt_tokens - update.num_cached_tokens)

    def on_dropped(self, request_id: str, reason: FinishReason, now: float) -> None:
        """A request ended here and not in the engine: a stop string, a client that left, a dead engine."""
        account = self._accounts.pop(request_id, None)
        if account is not None:
            self._close(account, reason, now)

    def on_stats(self, stats: EngineStats) -> None:
        """A step has ended."""
        if stats.step_id > self._stats.step_id:
            self._step_tokens.observe(stats.step_tokens - self._stats.step_tokens)
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """All families, as Prometheus asks for them."""
        stats = self._stats
        yield self._gauge("num_requests_running", "Requests that take part in steps.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests in the queue.", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the KV blocks in use, 0..1.", stats.kv_cache_usage)
        if self._info is not None:
            yield self._cache_info(self._info)
        hits = stats.prefix_cache_hits
        for name, help, value in (
            (
                "prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                stats.prefix_cache_queries,
            ),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", hits),
            ("num_preemptions", "Times that a running request lost its place.", stats.num_preemptions),
            ("prompt_tokens", "Prompt tokens of requests that ran.", stats.prompt_tokens),
            ("prompt_tokens_cached", "Prompt tokens that were not computed.", hits),
            ("generation_tokens", "Generated tokens.", stats.generation_tokens),
        ):
            family = CounterMetricFamily(f"vllm:{name}", help, labels=self._names)
            family.add_metric(self._values, value)
            yield family
        success = CounterMetricFamily(
            "vllm:request_success", "Requests by how they ended.", labels=[*self._names, "finished_reason"]
        )
        for reason, count in self._finished.items():
            success.add_metric([*self._values, reason.value], count)
        yield success
        for histogram in self._histograms():
            yield histogram.family(self._names, self._values)

    def _close(self, account: _Account, reason: FinishReason, now: float) -> None:
        self._finished[reason] += 1
        self._prompt.observe(account.num_prompt_tokens)
        self._generated.observe(account.num_tokens)
        self._longest.observe(account.num_tokens)
        if account.max_tokens is not None:
            self._max_tokens.observe(account.max_tokens)
        if account.num_tokens:
            self._end_to_end.observe(now - account.started_at)
        if account.num_tokens > 1:
            self._per_token.observe((account.last_at - account.first_at) / (account.num_tokens - 1))

    def _bind_sizes(self, limit: int) -> None:
        """Histograms whose bounds end at the context length."""
        bounds = _one_two_five(limit)
        self._prompt = Histogram("request_prompt_tokens", "Prompt tokens by request.", bounds)
        self._generated = Histogram("request_generation_tokens", "Generated tokens by request.", bounds)
        self._longest = Histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest choice.", bounds
        )
        self._max_tokens = Histogram("request_params_max_tokens", "`max_tokens` by request.", bounds)
        self._computed_tokens = Histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were computed, by request.", bounds
        )

    def _histograms(self) -> tuple[Histogram, ...]:
        return (
            *(self._time_to_first, self._between, self._per_token, self._end_to_end, self._queue),
            *(self._inference, self._prefill, self._decode, self._step_tokens, self._n),
            *(self._prompt, self._generated, self._longest, self._max_tokens, self._computed_tokens),
        )

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", help, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _cache_info(self, info: EngineInfo) -> Metric:
        facts = {
            "block_size": info.cache.block_size,
            "num_gpu_blocks": info.cache.num_blocks,
            "kv_cache_bytes": info.cache.kv_cache_bytes,
        }
        names = [*self._names, *facts]
        family = GaugeMetricFamily("vllm:cache_config_info", "Sizes of the KV cache.", labels=names)
        family.add_metric([*self._values, *map(str, facts.values())], 1)
        return family


class ThroughputLog:
    """The line that the log shows every few seconds while the engine works."""

    def __init__(self) -> None:
        self._stats = EngineStats()
        self._at = time.monotonic()
        self._was_busy = False

    def line(self, stats: EngineStats, now: float) -> str | None:
        """What happened since the last call at `now` (seconds, monotonic); None when nothing did."""
        old, seconds = self._stats, max(now - self._at, 1e-9)
        self._stats, self._at = stats, now
        is_busy = stats.step_id > old.step_id or stats.num_running + stats.num_waiting > 0
        was_busy, self._was_busy = self._was_busy, is_busy
        if not (is_busy or was_busy):
            return None
        # Only computed tokens count: cached ones cost nothing.
        prompt = stats.prompt_tokens - stats.prefix_cache_hits - old.prompt_tokens + old.prefix_cache_hits
        hit_rate = stats.prefix_cache_hits / max(stats.prefix_cache_queries, 1)
        preemptions = stats.num_preemptions - old.num_preemptions
        return (
            f"Engine 000: Avg prompt throughput: {prompt / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {(stats.generation_tokens - old.generation_tokens) / seconds:.1f} "
            f"tokens/s, Running: {stats.num_running} reqs, Waiting: {stats.num_waiting} reqs, "
            + (f"Preemptions: {preemptions}, " if preemptions else "")
            + f"GPU KV cache usage: {stats.kv_cache_usage:.1%}, Prefix cache hit rate: {hit_rate:.1%}"
        )


def _one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `limit`."""
    bounds: list[float] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > limit:
                return tuple(bounds or [1.0])
            bounds.append(float(step * scale))
        scale *= 10
