"""The step loop over the simulated worker, which refuses plans that no worker could execute."""

from __future__ import annotations

import random

import pytest

from pegainfer.config import EngineConfig
from pegainfer.engine.core import EngineCore
from pegainfer.engine.messages import AddRequest, FinishReason
from pegainfer.scheduler.plan import StepOutput, StepPlan
from pegainfer.worker.sim import SimulatedWorker
from tests.engine.engines import EOS, VOCAB_SIZE, add_request, make_core, make_info, run_core, tokens_of


def solo_tokens(prompt: list[int], max_tokens: int) -> list[int]:
    """What a request yields when it is alone."""
    core = make_core()
    core.add(add_request(prompt, "solo", max_tokens=max_tokens))
    return tokens_of(run_core(core)["solo"])


def blocks_are_back(core: EngineCore) -> bool:
    """Whether nothing is held; also checks the books."""
    core.check_integrity()
    return core.stats().kv_cache_usage == 0.0


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
def test_results_do_not_depend_on_overlap_or_company(steps_in_flight: int) -> None:
    core = make_core(steps_in_flight=steps_in_flight, num_blocks=64)
    rng = random.Random(1)
    requests = [
        add_request(
            [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 90))], max_tokens=rng.randint(1, 40)
        )
        for _ in range(40)
    ]
    for request in requests:
        core.add(request)
    updates = run_core(core)
    for request in requests:
        own = updates[request.request_id]
        assert tokens_of(own) == solo_tokens(request.prompt_token_ids, request.params.max_tokens or 0)
        assert [update.finish_reason for update in own if update.finish_reason] == [FinishReason.length]
    assert blocks_are_back(core)


def test_two_steps_are_in_flight() -> None:
    class Recorder(SimulatedWorker):
        def submit(self, plan: StepPlan) -> None:
            super().submit(plan)
            depths.append(len(self._in_flight))

    depths: list[int] = []
    core = EngineCore(EngineConfig.from_flat(), Recorder(make_info(steps_in_flight=2)))
    core.add(add_request([1, 2, 3], max_tokens=20))
    run_core(core)
    assert set(depths[1:]) == {2}


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_a_stop_token_ends_an_answer_and_counts(steps_in_flight: int) -> None:
    core = make_core(steps_in_flight=steps_in_flight)
    core.add(add_request([1], "eos", max_tokens=9, allowed_token_ids=(7, 8, EOS)))
    core.add(add_request([1], "listed", max_tokens=9, allowed_token_ids=(7, 8), stop_token_ids=(8,)))
    core.add(add_request([1], "ignored", max_tokens=4, allowed_token_ids=(7, EOS), ignore_eos=True))
    updates = run_core(core)
    ends = {
        name: (tokens_of(own), own[-1].finish_reason, own[-1].stop_reason) for name, own in updates.items()
    }
    assert ends == {
        "eos": ([7, 8, EOS], FinishReason.stop, None),
        "listed": ([7, 8], FinishReason.stop, 8),
        "ignored": ([7, EOS, 7, EOS], FinishReason.length, None),
    }


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_t10_little_memory_preempts_and_changes_nothing(steps_in_flight: int) -> None:
    core = make_core(steps_in_flight=steps_in_flight, num_blocks=4, max_model_len=128)
    prompts = [list(range(10, 30)), list(range(40, 70))]
    for index, prompt in enumerate(prompts):
        core.add(add_request(prompt, f"r{index}", max_tokens=25))
    core.add(add_request([1] * 100, "too long", max_tokens=1))
    updates = run_core(core)
    assert [tokens_of(updates[f"r{index}"]) for index in (0, 1)] == [solo_tokens(p, 25) for p in prompts]
    assert core.stats().num_preemptions >= 1
    (refusal,) = updates["too long"]
    assert (refusal.finish_reason, refusal.error_status) == (FinishReason.error, 400)
    assert blocks_are_back(core)


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_t13_an_abort_storm(steps_in_flight: int) -> None:
    core = make_core(steps_in_flight=steps_in_flight, num_blocks=64, max_num_seqs=32)
    rng = random.Random(7)
    waiting = [
        add_request([rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 200))], f"s{i}", max_tokens=50)
        for i in range(200)
    ]
    names, ended = (
        [request.request_id for request in waiting],
        dict.fromkeys((r.request_id for r in waiting), 0),
    )
    rng.shuffle(waiting)
    while waiting or core.has_work:
        for request in [waiting.pop() for _ in range(min(len(waiting), rng.randint(0, 9)))]:
            core.add(request)
        for _ in range(rng.randint(0, 6)):
            core.abort([rng.choice(names), "unknown"])
            core.abort([rng.choice(names)] * 2)
        for update in core.step():
            ended[update.request_id] += update.finish_reason is not None
        core.check_integrity()
    assert set(ended.values()) == {1}
    assert blocks_are_back(core)
    core.add(add_request([1], "after", max_tokens=3))
    assert len(tokens_of(run_core(core)["after"])) == 3


@pytest.mark.parametrize(
    "request_",
    [
        add_request([VOCAB_SIZE], "bad"),
        add_request([-1], "bad"),
        add_request([], "bad"),
        add_request([1], "bad", logit_bias={VOCAB_SIZE: 1.0}),
        add_request([1], "bad", stop_token_ids=[-5]),
        add_request([1] * 600, "bad"),
    ],
    ids=lambda request: str(request.params.logit_bias or request.prompt_token_ids[:1]),
)
def test_what_slips_through_fails_alone(request_: AddRequest) -> None:
    core = make_core()
    core.add(add_request([1, 2], "good", max_tokens=5))
    core.add(request_)
    updates = run_core(core)
    assert len(tokens_of(updates["good"])) == 5
    (only,) = updates["bad"]
    assert (only.finish_reason, only.error_status, only.token_ids) == (FinishReason.error, 400, [])


def test_seeds_are_drawn_from_the_engines() -> None:
    class Listening(SimulatedWorker):
        def submit(self, plan: StepPlan) -> None:
            super().submit(plan)
            seen.update({request.request_id: request.seed for request in plan.new_requests})

    seen: dict[str, int] = {}

    def seeds(engine_seed: int) -> dict[str, int]:
        seen.clear()
        core = EngineCore(EngineConfig.from_flat(seed=engine_seed), Listening(make_info()))
        core.add(add_request([1], "a", max_tokens=1))
        core.add(add_request([1], "own", max_tokens=1, seed=5))
        core.add(add_request([1], "b", max_tokens=1))
        run_core(core)
        return dict(seen)

    first, again, other = seeds(1), seeds(1), seeds(2)
    assert first == again
    assert first["a"] != first["b"] != other["b"]
    assert first["own"] == other["own"] == 5


def test_a_full_queue_refuses_with_503() -> None:
    core = make_core(max_num_seqs=2, max_num_queued_reqs=3)
    for index in range(8):
        core.add(add_request([1], f"r{index}", max_tokens=2))
    updates = run_core(core)
    refused = [name for name, own in updates.items() if own[-1].finish_reason is FinishReason.error]
    assert refused == ["r5", "r6", "r7"]
    assert all(updates[name][-1].error_status == 503 for name in refused)


def test_a_worker_that_lies_stops_the_engine() -> None:
    class Liar(SimulatedWorker):
        def collect(self) -> StepOutput:
            output = super().collect()
            return StepOutput(output.step_id + 1, output.sampled)

    core = EngineCore(EngineConfig.from_flat(), Liar(make_info()))
    core.add(add_request([1], max_tokens=3))
    with pytest.raises(RuntimeError, match="out of turn"):
        run_core(core)


def test_stats_and_cached_tokens() -> None:
    core = make_core()
    prompt = list(range(33))
    for name in ("cold", "warm"):
        core.add(add_request(prompt, name, max_tokens=2))
        updates = run_core(core)
        assert updates[name][-1].num_cached_tokens == {"cold": 0, "warm": 32}[name]
    stats = core.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (66, 4)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (66, 32)
    assert stats.step_tokens == 33 + 1 + 1 + 1
    core.reset_prefix_cache()
    core.add(add_request(prompt, "reset", max_tokens=1))
    assert run_core(core)["reset"][-1].num_cached_tokens == 0


def test_scoring_a_prompt_generates_nothing() -> None:
    core = make_core()
    core.add(add_request(list(range(100)), "score", max_tokens=0, prompt_logprobs=1))
    updates = run_core(core)["score"]
    scores = [entry.token_id for update in updates for entry in update.prompt_logprobs or ()]
    assert scores == list(range(1, 100))
    assert (tokens_of(updates), updates[-1].finish_reason) == ([], FinishReason.length)
