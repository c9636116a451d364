"""A deterministic worker with a real paged memory, and a driver that runs a scheduler with it.

Every slot keeps a value made of the token that stands there and of what the block table reads at the position
before, as keys and values of deeper layers do; the next token is made of all values that the table reads. A
wrong block table, a block shared too early, or a lost token therefore shows as wrong text.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from pegainfer.kvcache.manager import KvCacheManager
from pegainfer.sampling_params import SamplingParams
from pegainfer.scheduler.plan import (
    FinishReason,
    NewRequest,
    RequestUpdate,
    SampledToken,
    ScheduledRequest,
    StepOutput,
    StepPlan,
    TokenLogprobs,
)
from pegainfer.scheduler.policy import SchedulerSettings
from pegainfer.scheduler.request import Request
from pegainfer.scheduler.scheduler import Scheduler

VOCAB = 13
EOS = 0
MASK = (1 << 61) - 1


def slot_value(previous: int, token_id: int) -> int:
    return (previous * 1_000_003 + (token_id + 7) * 2_654_435_761) & MASK


def next_token(values: list[int]) -> int:
    mixed = 17
    for value in values:
        mixed = (mixed * 31 + value) & MASK
    return (mixed >> 7) % VOCAB


def generate(prompt: list[int], count: int) -> list[int]:
    """What follows `prompt`, computed without any memory."""
    tokens, values = list(prompt), []
    previous = 1
    for token in tokens:
        previous = slot_value(previous, token)
        values.append(previous)
    for _ in range(count):
        tokens.append(next_token(values))
        previous = slot_value(previous, tokens[-1])
        values.append(previous)
    return tokens[len(prompt) :]


@dataclass
class WorkerRequest:
    new: NewRequest
    token_ids: list[int]
    table: list[int] = field(default_factory=list)


class PagedWorker:
    """Executes a plan only when it is collected, the latest moment at which a real device might."""

    def __init__(self, num_blocks: int, block_size: int, *, max_num_seqs: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.block_size = block_size
        self.memory: list[int | None] = [None] * (num_blocks * block_size)
        self.requests: dict[str, WorkerRequest] = {}
        self.submitted: deque[tuple[StepPlan, list[WorkerRequest]]] = deque()
        self.failing: set[str] = set()
        self.step_tokens: list[int] = []

    def submit(self, plan: StepPlan) -> None:
        touched = {entry.request_id for earlier, _ in self.submitted for entry in earlier.scheduled}
        for request_id in plan.released:
            assert request_id not in touched, "released while a submitted step still computes it"
            del self.requests[request_id]
        for new in plan.new_requests:
            assert new.request_id not in self.requests
            self.requests[new.request_id] = WorkerRequest(new, list(new.token_ids))
        assert len(self.requests) <= self.max_num_seqs
        assert len({entry.request_id for entry in plan.scheduled}) == len(plan.scheduled)
        busy = {block for earlier, states in self.submitted for block in self.written(earlier, states)}
        states = []
        for entry in plan.scheduled:
            state = self.requests[entry.request_id]
            assert state.table or any(new is state.new for new in plan.new_requests)
            assert not busy.intersection(entry.new_block_ids), "a submitted step still writes this block"
            state.table += entry.new_block_ids
            assert len(set(state.table)) == len(state.table)
            states.append(state)
        written = self.written(plan, states)
        assert len(set(written)) == len(written), "two requests write one block"
        self.submitted.append((plan, states))
        self.step_tokens.append(plan.num_tokens)

    def written(self, plan: StepPlan, states: list[WorkerRequest]) -> list[int]:
        blocks = []
        for entry, state in zip(plan.scheduled, states, strict=True):
            first = entry.num_computed_tokens // self.block_size
            last = (entry.num_computed_tokens + entry.num_tokens - 1) // self.block_size
            blocks += state.table[first : last + 1]
        return blocks

    def collect(self) -> StepOutput:
        plan, states = self.submitted.popleft()
        sampled = [self.execute(entry, state) for entry, state in zip(plan.scheduled, states, strict=True)]
        return StepOutput(plan.step_id, sampled)

    def slot(self, state: WorkerRequest, position: int) -> int:
        return state.table[position // self.block_size] * self.block_size + position % self.block_size

    def execute(self, entry: ScheduledRequest, state: WorkerRequest) -> SampledToken:
        assert entry.num_tokens >= 1
        start, end = entry.num_computed_tokens, entry.num_computed_tokens + entry.num_tokens
        assert end <= len(state.token_ids), "a token is computed before it is known"
        assert entry.samples in (False, end == len(state.token_ids))
        for position in range(start, end):
            previous = self.memory[self.slot(state, position - 1)] if position else 1
            assert previous is not None
            self.memory[self.slot(state, position)] = slot_value(previous, state.token_ids[position])
        if entry.request_id in self.failing:
            state.token_ids += [0] * entry.samples
            return SampledToken(entry.request_id, error="this request's logits are not finite")
        prompt_logprobs = None
        if state.new.params.prompt_logprobs is not None:
            following = state.token_ids[start + 1 : min(end + 1, state.new.num_prompt_tokens)]
            prompt_logprobs = [TokenLogprobs(token, -1.0, 1, [], []) for token in following]
        token_id = None
        if entry.samples:
            values = [self.memory[self.slot(state, position)] for position in range(end)]
            assert None not in values
            token_id = next_token([value for value in values if value is not None])
            state.token_ids.append(token_id)
        return SampledToken(entry.request_id, token_id, None, prompt_logprobs)


def expected(request: Request, settings: SchedulerSettings, capacity: int) -> tuple[list[int], FinishReason]:
    """The whole output of a request that nobody disturbs."""
    params, prompt = request.params, request.prompt_token_ids
    room = settings.max_model_len - len(prompt)
    count = (
        min(room, capacity + 1 - len(prompt)) if params.max_tokens is None else min(room, params.max_tokens)
    )
    tokens = generate(prompt, count)
    for index, token in enumerate(tokens, 1):
        is_eos = token in settings.eos_token_ids and not params.ignore_eos
        if index >= params.min_tokens and (is_eos or token in params.stop_token_ids):
            return tokens[:index], FinishReason.stop
    return tokens, FinishReason.length


class Driver:
    """The step loop of an engine, keeping what each request was told."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        enable_prefix_caching: bool = True,
        **settings: Any,
    ) -> None:
        defaults: dict[str, Any] = {
            "max_model_len": 128,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "eos_token_ids": frozenset([EOS]),
        }
        self.settings = SchedulerSettings(**(defaults | settings))
        self.cache = KvCacheManager(num_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
        self.scheduler = Scheduler(self.settings, self.cache)
        self.worker = PagedWorker(num_blocks, block_size, max_num_seqs=self.settings.max_num_seqs)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.prompt_logprobs: dict[str, list[int]] = {}
        self.last: dict[str, RequestUpdate] = {}
        self.cached: dict[str, int] = {}
        self.now = 0.0

    def add(self, request_id: str, prompt: list[int], **options: Any) -> RequestUpdate | None:
        own = {key: options.pop(key) for key in ("priority", "cache_salt", "seed") if key in options}
        options.setdefault("ignore_eos", True)
        options.setdefault("temperature", 0.0)
        request = Request(request_id, prompt, params=SamplingParams(**options), **own)
        self.requests[request_id] = request
        self.tokens[request_id] = []
        self.prompt_logprobs[request_id] = []
        update = self.scheduler.add(request, self.now)
        if update is not None:
            self.take(update)
        return update

    def abort(self, request_id: str) -> RequestUpdate | None:
        update = self.scheduler.abort(request_id, self.now)
        if update is not None:
            self.take(update)
        return update

    def take(self, update: RequestUpdate) -> None:
        request_id = update.request_id
        assert request_id not in self.last, "an update follows the last one"
        if update.token_ids and not self.tokens[request_id]:
            self.cached[request_id] = update.num_cached_tokens
        self.tokens[request_id] += update.token_ids
        self.prompt_logprobs[request_id] += [entry.token_id for entry in update.prompt_logprobs or ()]
        if update.finish_reason is not None:
            self.last[request_id] = update

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule(self.now)
        self.now += 1.0
        if plan is None:
            assert self.worker.submitted or not self.scheduler.has_unfinished, "no progress"
            return None
        assert plan.num_tokens <= self.settings.max_num_batched_tokens
        assert len(plan.scheduled) <= self.settings.max_num_seqs
        self.worker.submit(plan)
        return plan

    def collect(self) -> None:
        for update in self.scheduler.update(self.worker.collect(), self.now):
            self.take(update)

    def step(self) -> StepPlan | None:
        """Schedule as far ahead as allowed, then collect one step."""
        plan = self.schedule()
        while plan is not None and len(self.worker.submitted) < self.settings.max_steps_in_flight:
            if self.schedule() is None:
                break
        if self.worker.submitted:
            self.collect()
        return plan

    def run(self, *, max_steps: int = 2000) -> None:
        """Steps until every request has finished and nothing is in flight."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished and not self.worker.submitted:
                break
            self.step()
        assert not self.scheduler.has_unfinished, "no progress"
        self.check_idle()

    def check_idle(self) -> None:
        """Nothing is held any more."""
        self.cache.check_integrity()
        assert self.cache.num_used == 0
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert set(self.last) == set(self.requests)

    def check_text(self, *request_ids: str) -> None:
        """Requests that ran to their end have the text and the reason that they have alone."""
        for request_id in request_ids or tuple(self.requests):
            request, last = self.requests[request_id], self.last[request_id]
            if last.error_status == 400:
                continue
            tokens, reason = expected(request, self.settings, self.cache.capacity)
            got = self.tokens[request_id]
            if last.finish_reason in (FinishReason.abort, FinishReason.error):
                assert got == tokens[: len(got)]
                continue
            assert got == tokens
            assert last.finish_reason == reason
            if request.params.prompt_logprobs is not None:
                assert self.prompt_logprobs[request_id] == request.prompt_token_ids[1:]
