"""Overlapped steps over real models: starting a step before the last one ended changes no answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pegainfer.config import EngineConfig
from pegainfer.engine.core import EngineCore
from tests.engine.engines import add_request, run_core, tokens_of
from tests.models.tiny_models import VOCAB, checkpoint
from tests.models.worker_driver import make_worker

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 5, "top_k": 30},
    "penalties": {"temperature": 0.7, "seed": 9, "presence_penalty": 1.5, "repetition_penalty": 1.3},
    "frequency": {"temperature": 0.0, "frequency_penalty": 2.0},
    "scored": {"temperature": 0.0, "logprobs": 4, "prompt_logprobs": 2},
    "everything": {"temperature": 0.0, "logprobs": -1},
    "least": {"temperature": 0.0, "min_tokens": 6, "logit_bias": {3: 4.0}},
}


def answers(
    *, overlap: bool, skip: tuple[str, ...] = (), **options: Any
) -> tuple[dict[str, Any], EngineCore]:
    """What every request yields: tokens, log-probabilities, and how it ended."""
    defaults = {"device": "cpu", "num_threads": 2, "max_logprobs": -1, "max_num_seqs": 5}
    config = EngineConfig.from_flat(**{**defaults, **options}, async_scheduling=overlap)
    kept = {name: params for name, params in PARAMS.items() if name not in skip}
    worker = make_worker(checkpoint(), config)
    assert worker.info.max_steps_in_flight == (2 if overlap else 1)
    core = EngineCore(config, worker, eos_token_ids=(2,))
    rng = np.random.default_rng(3)
    for round_ in range(2):  # the second time over cached prefixes
        for name, params in kept.items():
            prompt = np.random.default_rng(len(name)).integers(0, VOCAB, 5 + 7 * len(name)).tolist()
            length = int(rng.integers(9, 30))
            core.add(add_request(prompt, f"{name}-{round_}", max_tokens=length, **params))
    updates = run_core(core)
    core.check_integrity()
    result = {
        name: (
            tokens_of(parts),
            [logprob for part in parts for logprob in part.logprobs or ()],
            [logprob for part in parts for logprob in part.prompt_logprobs or ()],
            parts[-1].finish_reason,
        )
        for name, parts in updates.items()
    }
    assert len(result) == 2 * len(kept)
    return result, core


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_nothing_changes(enforce_eager: bool) -> None:
    expected, _ = answers(overlap=False, kv_cache_memory_bytes=4 << 20, enforce_eager=enforce_eager)
    got, _ = answers(overlap=True, kv_cache_memory_bytes=4 << 20, enforce_eager=enforce_eager)
    assert got == expected


def test_nothing_changes_under_preemption() -> None:
    """Blocks for two and a half requests among five: tokens are computed again, also pending ones."""
    options = {"num_gpu_blocks_override": 12, "max_model_len": 128, "max_num_batched_tokens": 24}
    expected, _ = answers(overlap=False, **options)
    got, core = answers(overlap=True, **options)
    assert core.stats().num_preemptions > 0
    assert got == expected


def test_a_request_without_a_token_fails_alone() -> None:
    """Nothing is allowed, so sampling yields no token, while the next step has been launched with it."""
    config = EngineConfig.from_flat(
        async_scheduling=True, device="cpu", num_threads=1, kv_cache_memory_bytes=4 << 20
    )
    core = EngineCore(config, make_worker(checkpoint(), config))
    every = {token: float("-inf") for token in range(VOCAB)}
    core.add(add_request([1, 2, 3], "none", max_tokens=5, logit_bias=every))
    core.add(add_request([1, 2, 3], "some", max_tokens=5))
    updates = run_core(core)
    assert updates["none"][-1].error is not None
    assert len(tokens_of(updates["some"])) == 5
    core.check_integrity()


def test_requests_that_come_leave_and_end_early() -> None:
    """Aborts and stop tokens between steps that overlap, in a cache that is too small: whoever stays gets the
    answer that it gets alone, and nothing is left behind.
    """
    options = {"num_gpu_blocks_override": 14, "max_model_len": 128, "max_num_batched_tokens": 32}
    config = EngineConfig.from_flat(
        device="cpu", num_threads=2, max_num_seqs=5, async_scheduling=True, **options
    )
    core = EngineCore(config, make_worker(checkpoint(), config), eos_token_ids=())
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, VOCAB, int(rng.integers(1, 60))).tolist() for _ in range(24)]
    params: list[dict[str, Any]] = [{"max_tokens": 25} for _ in prompts]
    alone = []
    for index, prompt in enumerate(prompts):
        core.add(add_request(prompt, f"alone {index}", temperature=0.0, **params[index]))
        alone.append(tokens_of(run_core(core)[f"alone {index}"]))
        if index % 3 == 0:  # ends with a token of its own answer, which the engine cannot foresee
            stop = alone[index][int(rng.integers(3, 20))]
            params[index]["stop_token_ids"] = (stop,)
            alone[index] = alone[index][: alone[index].index(stop) + 1]
    got: dict[str, list[Any]] = {}
    aborted = set()
    waiting = list(range(len(prompts)))
    while waiting or core.has_work:
        if waiting and rng.random() < 0.4:
            index = waiting.pop()
            core.add(add_request(prompts[index], f"{index}", temperature=0.0, **params[index]))
            got[f"{index}"] = []
        if rng.random() < 0.1:
            name = str(rng.choice(list(got))) if got else ""
            if got.get(name) is not None and not (got[name] and got[name][-1].finish_reason):
                aborted.add(name)
                core.abort([name])
        for update in core.step():
            got[update.request_id].append(update)
    for index, expected in enumerate(alone):
        tokens = tokens_of(got[f"{index}"])
        assert got[f"{index}"][-1].finish_reason is not None
        assert sum(update.finish_reason is not None for update in got[f"{index}"]) == 1
        assert tokens == (expected[: len(tokens)] if f"{index}" in aborted else expected), index
    assert aborted
    assert core.stats().num_preemptions > 0
    core.check_integrity()
    assert core.stats().kv_cache_usage == 0


@pytest.mark.gpu
def test_the_same_tokens_on_a_gpu() -> None:
    """Float32, where rounding decides nothing: recorded, padded and overlapped against plain launches."""
    options = {"device": "cuda", "dtype": "float32", "kv_cache_memory_bytes": 4 << 20, "max_logprobs": 20}
    skip = ("everything",)
    expected, _ = answers(overlap=False, enforce_eager=True, skip=skip, **options)
    for again in range(2):
        got, _ = answers(overlap=True, skip=skip, **options)
        for name, (tokens, _, _, finish) in expected.items():
            assert (got[name][0], got[name][3]) == (tokens, finish), (name, again)
