"""What `/metrics` and the log say."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pegainfer.engine.client import EngineClient
from pegainfer.engine.messages import EngineStats, FinishReason
from pegainfer.engine.metrics import EngineMetrics, ThroughputLog
from tests.engine.engines import drain, engine, run, start


def read(metrics: EngineMetrics) -> dict[str, float]:
    """Every sample as Prometheus would scrape it: `name{label of interest}` to value."""
    registry = CollectorRegistry()
    registry.register(metrics)
    samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            assert (sample.labels.pop("model_name"), sample.labels.pop("engine")) == ("m", "0")
            own = ",".join(f"{key}={value}" for key, value in sample.labels.items())
            samples[f"{sample.name}{{{own}}}" if own else sample.name] = sample.value
    return samples


async def served() -> dict[str, float]:
    """The metrics after one of each end."""
    metrics = EngineMetrics("m")
    async with engine(observer=metrics, sim_ttft_ms=20.0, sim_tpot_ms=2.0) as client:
        metrics.use_info(client.info)
        prompt = list(range(40))
        await drain(start(client, prompt, max_tokens=5))
        await drain(start(client, prompt, max_tokens=5, allowed_token_ids=(7, 8), stop_token_ids=(8,)))
        await end_early(client, FinishReason.abort)
        await end_early(client, FinishReason.stop)
        while client.stats.num_running:
            await asyncio.sleep(0.01)
    return read(metrics)


async def end_early(client: EngineClient, reason: FinishReason) -> None:
    with start(client, [9] * 17, max_tokens=4000) as generation:
        async for (update,) in generation:
            generation.end(update.request_id, reason)


def test_names_and_values() -> None:
    samples = run(served)
    assert samples["vllm:num_requests_running"] == samples["vllm:num_requests_waiting"] == 0
    assert samples["vllm:prompt_tokens_total"] == 40 + 40 + 17 + 17
    assert samples["vllm:prefix_cache_hits_total"] == samples["vllm:prompt_tokens_cached_total"] == 32 + 16
    assert samples["vllm:generation_tokens_total"] >= 5 + 2 + 2
    ends = {
        reason: samples[f"vllm:request_success_total{{finished_reason={reason}}}"] for reason in FinishReason
    }
    assert ends == {"length": 1, "stop": 2, "abort": 1, "error": 0}
    assert samples["vllm:time_to_first_token_seconds_count"] == 4
    assert samples["vllm:time_to_first_token_seconds_bucket{le=0.01}"] == 0  # 20 ms by construction
    assert samples["vllm:inter_token_latency_seconds_bucket{le=0.002}"] < 5
    assert samples["vllm:inter_token_latency_seconds_bucket{le=0.0075}"] >= 5
    assert samples["vllm:request_prompt_tokens_bucket{le=20.0}"] == 2
    assert samples["vllm:request_generation_tokens_sum"] == 5 + 2 + 1 + 1
    assert samples["vllm:request_params_max_tokens_sum"] == 5 + 5 + 4000 + 4000
    assert samples["vllm:request_prefill_kv_computed_tokens_sum"] == 40 + 8
    assert samples["vllm:iteration_tokens_total_sum"] >= 40 + 8 + 4
    assert any(name.startswith("vllm:cache_config_info{block_size=16") for name in samples)
    for name in ("e2e_request_latency", "request_queue_time", "request_decode_time", "request_prefill_time"):
        assert samples[f"vllm:{name}_seconds_count"] >= 2


def test_a_dead_engine_counts_as_errors() -> None:
    async def main() -> dict[str, float]:
        metrics = EngineMetrics("m")
        async with engine(observer=metrics) as client:
            waiting = asyncio.create_task(drain(start(client, [1], max_tokens=4000)))
            await asyncio.sleep(0.1)
            client._process._process.kill()
            await asyncio.gather(waiting, return_exceptions=True)
        return read(metrics)

    assert run(main)["vllm:request_success_total{finished_reason=error}"] == 1


def test_the_log_is_silent_when_idle() -> None:
    log = ThroughputLog()
    start_at = log._at
    assert log.line(EngineStats(), start_at + 10) is None
    busy = EngineStats(
        num_running=3,
        num_waiting=1,
        kv_cache_usage=0.25,
        num_preemptions=2,
        prefix_cache_queries=1000,
        prefix_cache_hits=250,
        prompt_tokens=1000,
        generation_tokens=500,
        step_id=7,
    )
    assert log.line(busy, start_at + 20) == (
        "Engine 000: Avg prompt throughput: 75.0 tokens/s, Avg generation throughput: 50.0 tokens/s, "
        "Running: 3 reqs, Waiting: 1 reqs, Preemptions: 2, GPU KV cache usage: 25.0%, "
        "Prefix cache hit rate: 25.0%"
    )


@pytest.mark.parametrize("value", [0.0, 0.0005, 0.001, 5000.0])
def test_buckets_are_cumulative(value: float) -> None:
    metrics = EngineMetrics("m")
    metrics._between.observe(value)
    samples = read(metrics)
    buckets = [v for name, v in samples.items() if name.startswith("vllm:inter_token_latency_seconds_bucket")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == samples["vllm:inter_token_latency_seconds_count"] == 1
    assert samples["vllm:inter_token_latency_seconds_bucket{le=0.001}"] == (value <= 0.001)
