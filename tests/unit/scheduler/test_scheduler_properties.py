"""Invariants of the scheduler and the KV cache under any sequence of events."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.scheduler.paged_worker import VOCAB, Driver

TOKENS = st.integers(0, VOCAB - 1)


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    """Often the beginning of one common text, so that prefixes are shared."""
    common = [(3 * index) % VOCAB for index in range(draw(st.integers(0, 16)))]
    return common + draw(st.lists(TOKENS, min_size=0 if common else 1, max_size=6))


class SchedulerMachine(RuleBasedStateMachine):
    """Adds, aborts, steps and failures in any order over tiny pools."""

    driver: Driver
    count = 0
    work = 0

    @initialize(
        num_blocks=st.integers(2, 10),
        block_size=st.integers(2, 4),
        max_model_len=st.integers(8, 40),
        max_num_seqs=st.integers(1, 5),
        max_num_batched_tokens=st.integers(1, 16),
        max_num_mixed_tokens=st.one_of(st.none(), st.integers(1, 16)),
        policy=st.sampled_from(["fcfs", "priority"]),
        enable_chunked_prefill=st.booleans(),
        enable_prefix_caching=st.booleans(),
        max_steps_in_flight=st.integers(1, 2),
    )
    def start(self, **options: Any) -> None:
        self.driver = Driver(**options)

    @rule(
        prompt=prompts(),
        max_tokens=st.one_of(st.none(), st.integers(0, 12)),
        ignore_eos=st.booleans(),
        stop_token_ids=st.lists(TOKENS, max_size=1),
        min_tokens=st.integers(0, 3),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
        priority=st.integers(-1, 1),
        cache_salt=st.sampled_from([None, None, "salt"]),
        fails=st.integers(0, 15),
    )
    def add(self, prompt: list[int], fails: int, **options: Any) -> None:
        if options["max_tokens"] is not None:
            options["min_tokens"] = min(options["min_tokens"], options["max_tokens"])
        request_id = f"r{self.count}"
        self.count += 1
        if fails == 0:
            self.driver.worker.failing.add(request_id)
        refused = self.driver.add(request_id, prompt, **options)
        if refused is None:
            self.work += self.driver.requests[request_id].limit
        else:
            assert refused.error_status == 400
            assert refused.error

    @rule(index=st.integers(0, 30))
    def abort(self, index: int) -> None:
        """Of a request in any state, or of one that does not exist."""
        request_id = f"r{index % (self.count + 1)}"
        is_open = request_id in self.driver.requests and request_id not in self.driver.last
        update = self.driver.abort(request_id)
        assert (update is not None) == is_open
        assert self.driver.abort(request_id) is None

    @rule()
    def schedule(self) -> None:
        self.driver.schedule()

    @precondition(lambda self: self.driver.worker.submitted)
    @rule()
    def collect(self) -> None:
        self.driver.collect()

    @rule(steps=st.integers(1, 8))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.driver.step()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.driver.scheduler.reset_prefix_cache()

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        self.driver.cache.check_integrity()
        scheduler = self.driver.scheduler
        assert scheduler.num_running <= self.driver.settings.max_running
        assert len(self.driver.last) + len(scheduler.ledger) == self.count

    def teardown(self) -> None:
        driver = self.driver
        # Each step computes a token at least; a preemption repeats at most what fits into the cache.
        driver.run(max_steps=100 + 20 * self.work)
        driver.check_text()
        preempted = sum(request.num_preemptions for request in driver.requests.values())
        assert driver.scheduler.ledger.num_preemptions == preempted
        assert driver.scheduler.ledger.generation_tokens == sum(map(len, driver.tokens.values()))
        driver.scheduler.reset_prefix_cache()
        driver.check_idle()
        assert driver.cache.num_available == driver.cache.num_blocks


SchedulerMachine.TestCase.settings = settings(
    max_examples=1500, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
TestScheduler = SchedulerMachine.TestCase
