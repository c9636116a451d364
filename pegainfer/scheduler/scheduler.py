"""The one scheduler: what every step computes, and what its results mean. Continuous batching with chunked
prefill, preemption by recompute and overlapped steps, for every model.

A step serves decode first, then prompts under way, then admits waiting requests, under a token budget.
`schedule` may run ahead of `update`: it assumes that every step in flight yields its tokens, and what turns
out to be too much is dropped when the results arrive. Until then the blocks of a request that has left stay
its own, because a submitted step may still write them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pegainfer.errors import RequestError
from pegainfer.kvcache.manager import KvCacheManager
from pegainfer.scheduler.ledger import Ledger
from pegainfer.scheduler.plan import (
    FinishReason,
    NewRequest,
    RequestUpdate,
    SampledToken,
    ScheduledRequest,
    StepOutput,
    StepPlan,
)
from pegainfer.scheduler.policy import (
    MAX_BYPASSES,
    MAX_SKIPPED,
    SchedulerSettings,
    check_request,
    chunk,
    insert,
    place,
    prompt_budget,
    remove,
)
from pegainfer.scheduler.request import Request, RequestState

__all__ = ["Scheduler"]

RESERVED_SHARE = 100
"""One block in this many stays available at an admission, so that running requests can grow."""


@dataclass(slots=True)
class _Draft:
    """A plan in the making."""

    budget: int
    scheduled: list[ScheduledRequest] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    new_requests: list[NewRequest] = field(default_factory=list)
    is_short_of_blocks: bool = False

    def take(self, request: Request, num_tokens: int, new_block_ids: list[int]) -> None:
        """Compute the next `num_tokens` tokens of a request."""
        start = request.num_computed_tokens
        end = start + num_tokens
        samples = end == request.num_tokens < request.limit
        self.budget -= num_tokens
        self.scheduled.append(ScheduledRequest(request.request_id, num_tokens, start, new_block_ids, samples))
        self.requests.append(request)
        request.num_computed_tokens = end
        request.num_tokens += samples
        request.num_in_flight += 1


class Scheduler:
    """Decides steps for one engine. `now` is always seconds by the caller's monotonic clock."""

    def __init__(self, settings: SchedulerSettings, cache: KvCacheManager) -> None:
        self.settings = settings
        self.cache = cache
        self.ledger = Ledger()
        self.prefix_cache_queries = 0
        """Tokens that were looked up in the prefix cache by requests at their first admission."""
        self.prefix_cache_hits = 0
        """Tokens found there."""
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []  # sorted by order
        self._running: list[Request] = []  # sorted by order
        self._leaving: set[Request] = set()  # not running, but steps in flight still touch them
        self._in_flight: deque[tuple[StepPlan, list[Request]]] = deque()
        self._released: list[str] = []
        self._num_added = 0
        self._num_steps = 0
        self._is_prefill_turn = False

    @property
    def num_running(self) -> int:
        """Requests that take part in steps."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, preempted ones included."""
        return len(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is waiting or running."""
        return len(self.ledger) > 0

    def add(self, request: Request, now: float) -> RequestUpdate | None:
        """Queue a request. One that can never be served is refused: the update that says so is its only one.

        Raises `RequestError` when a request of that id has not left yet; nothing has changed then.
        """
        if request.request_id in self._requests:
            raise RequestError(
                f"request id {request.request_id} is in use; choose another", param="request_id"
            )
        self.ledger.open(request.request_id, request.num_prompt_tokens, now=now)
        try:
            check_request(request, self.settings, capacity=self.cache.capacity)
        except RequestError as error:
            return self.ledger.report(
                request.request_id, [], now=now, finish_reason=FinishReason.error, error=error
            )
        request.order = place(request, self._num_added, self.settings)
        request.chain = self.cache.make_chain(request.cache_salt)
        self._num_added += 1
        self._requests[request.request_id] = request
        insert(self._waiting, request)
        return None

    def abort(self, request_id: str, now: float) -> RequestUpdate | None:
        """End a request in whatever state it is; its last update, or None if it is unknown or has ended."""
        request = self._requests.get(request_id)
        if request is None or request.state is RequestState.finished:
            return None
        self._leave(request)
        return self.ledger.report(request_id, [], now=now, finish_reason=FinishReason.abort)

    def schedule(self, now: float) -> StepPlan | None:
        """The next step. None when there is nothing to do before an `update` or an `add`; with no step in
        flight, None means that no request is left.
        """
        if len(self._in_flight) >= self.settings.max_steps_in_flight:
            return None
        draft = _Draft(self.settings.max_num_batched_tokens)
        if self._is_prefill_turn:
            self._is_prefill_turn = False
            self._admit(draft, now)
        if not draft.scheduled:
            self._decode(draft)
            draft.budget = prompt_budget(len(draft.scheduled), draft.budget, self.settings)
            self._continue_prefill(draft)
            if not draft.is_short_of_blocks:
                self._admit(draft, now)
        if not draft.scheduled:
            return None
        plan = StepPlan(self._num_steps, draft.new_requests, draft.scheduled, self._released)
        self._released = []
        self._num_steps += 1
        self._in_flight.append((plan, draft.requests))
        return plan

    def update(self, output: StepOutput, now: float) -> list[RequestUpdate]:
        """Take the results of the oldest step in flight: one update for each request that it changed.

        Raises `RuntimeError` when the output does not belong to that step.
        """
        if not self._in_flight or self._in_flight[0][0].step_id != output.step_id:
            raise RuntimeError(f"output of step {output.step_id} arrived out of turn")
        plan, requests = self._in_flight.popleft()
        updates: list[RequestUpdate] = []
        for entry, request, sampled in zip(plan.scheduled, requests, output.sampled, strict=True):
            if sampled.request_id != entry.request_id:
                raise RuntimeError(
                    f"step {output.step_id} answers {sampled.request_id} for {entry.request_id}"
                )
            request.num_in_flight -= 1
            if request.state is not RequestState.finished:
                update = self._apply(request, entry, sampled, now)
                if update is not None:
                    updates.append(update)
            if request in self._leaving and not request.num_in_flight:
                self._release(request)
        return updates

    def reset_prefix_cache(self) -> None:
        """Forget every cached block that no request uses."""
        self.cache.reset_prefix_cache()

    def _decode(self, draft: _Draft) -> None:
        """One token for each running request that has just one to compute."""
        running = self._running
        index = 0
        while index < len(running):  # a preemption shortens the list
            request = running[index]
            index += 1
            if request.num_remaining != 1:
                continue
            table = request.table
            assert table is not None
            new_block_ids: list[int] = []
            if request.num_computed_tokens >= table.num_slots:
                added = self._grow(request, draft)
                if added is None:
                    continue
                new_block_ids = added
            draft.take(request, 1, new_block_ids)

    def _grow(self, request: Request, draft: _Draft) -> list[int] | None:
        """Room for one more token, if need be taken from the last of the running requests; None: not in this
        step.
        """
        assert request.table is not None
        while (added := self.cache.grow(request.table, request.num_computed_tokens + 1)) is None:
            draft.is_short_of_blocks = True
            victim = self._running[-1]
            if self._leaving or not victim.num_remaining:
                return None  # the next update frees blocks
            self._preempt(victim)
            if victim is request:
                return None
        return added

    def _continue_prefill(self, draft: _Draft) -> None:
        """The next chunks of running requests whose prompts are under way; their blocks are reserved."""
        for request in self._running:
            if request.num_remaining > 1:
                num_tokens = min(request.num_remaining, draft.budget)
                if num_tokens:
                    draft.take(request, num_tokens, [])

    def _admit(self, draft: _Draft, now: float) -> None:
        """Start waiting requests in order. One that does not fit is passed by a bounded number of others, so
        that it neither blocks them nor starves.
        """
        waiting, running = self._waiting, self._running
        had_decode = bool(draft.scheduled)
        index = 0
        while index < len(waiting) and draft.budget and self.cache.num_available:
            if len(running) + len(self._leaving) >= self.settings.max_running:
                return  # a worker keeps those that leave until it is told to release them
            request = waiting[index]
            if request in self._leaving:
                return  # preempted, and its last step is still to be reported
            if self._try_start(request, draft, now):
                del waiting[index]
                for passed in waiting[:index]:
                    passed.num_bypassed += 1
                continue
            if index == 0 and not self.settings.enable_chunked_prefill and had_decode:
                self._is_prefill_turn = True
            # Letting others pass a preempted request would take the room that it waits for again.
            if request.num_preemptions or request.num_bypassed >= MAX_BYPASSES or index >= MAX_SKIPPED:
                return
            index += 1

    def _try_start(self, request: Request, draft: _Draft, now: float) -> bool:
        """Make a waiting request run if its tokens and blocks fit; the caller takes it off the queue."""
        cache, chain = self.cache, request.chain
        assert chain is not None
        num_cached = cache.find(chain, request.token_ids) if request.reads_prefix_cache else 0
        num_tokens = chunk(request.num_tokens - num_cached, draft.budget, self.settings)
        if not num_tokens:
            return False
        reserve = cache.num_blocks // RESERVED_SHARE if self._running else 0
        table = cache.open(chain, request.num_tokens, num_cached_tokens=num_cached, reserve=reserve)
        if table is None:
            return False
        if request.reads_prefix_cache and not request.num_preemptions:
            self.prefix_cache_queries += request.num_tokens
            self.prefix_cache_hits += num_cached
        request.table = table
        request.num_computed_tokens = num_cached
        request.state = RequestState.running
        insert(self._running, request)
        self.ledger.schedule(request.request_id, num_cached_tokens=num_cached, now=now)
        draft.new_requests.append(request.describe())
        draft.take(request, num_tokens, table.block_ids.copy())
        return True

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks; it keeps its tokens and its place and is computed again."""
        remove(self._running, request)
        request.state = RequestState.waiting
        request.num_preemptions += 1
        self.ledger.preempt(request.request_id)
        insert(self._waiting, request)
        self._vacate(request)

    def _leave(self, request: Request) -> None:
        """A request has ended."""
        remove(self._running if request.state is RequestState.running else self._waiting, request)
        request.state = RequestState.finished
        self._vacate(request)

    def _vacate(self, request: Request) -> None:
        """Release a request that is not running any more, as soon as no step in flight touches it."""
        if request.num_in_flight:
            self._leaving.add(request)
        else:
            self._release(request)

    def _release(self, request: Request) -> None:
        self._leaving.discard(request)
        if request.table is not None:
            self.cache.close(request.table)
            request.table = None
            self._released.append(request.request_id)
        request.num_computed_tokens = 0
        request.num_tokens = len(request.token_ids)
        if request.state is RequestState.finished:
            del self._requests[request.request_id]

    def _apply(
        self, request: Request, entry: ScheduledRequest, sampled: SampledToken, now: float
    ) -> RequestUpdate | None:
        """What one entry of a step means for its request; None: nothing that a client would see."""
        report = self.ledger.report
        error = sampled.error
        if error is None and entry.samples and sampled.token_id is None:
            error = "the worker returned no token for this request"
        if error is not None:
            self._leave(request)
            return report(
                request.request_id,
                [],
                now=now,
                finish_reason=FinishReason.error,
                error=RequestError(error, status=500, kind="InternalServerError"),
            )
        assert request.table is not None
        num_computed = entry.num_computed_tokens + entry.num_tokens
        self.cache.commit(request.table, request.token_ids, num_computed)
        prompt_logprobs = sampled.prompt_logprobs
        if prompt_logprobs is not None:
            known = request.num_prompt_logprobs - entry.num_computed_tokens
            prompt_logprobs = prompt_logprobs[known:] or None
            request.num_prompt_logprobs += len(prompt_logprobs or ())
        token_ids: list[int] = []
        finish_reason, stop_reason = None, None
        if entry.samples and sampled.token_id is not None:
            token_ids = [sampled.token_id]
            request.token_ids.append(sampled.token_id)
            finish_reason, stop_reason = request.check_end()
        elif num_computed == request.limit:  # nothing was to be generated
            finish_reason = FinishReason.length
        elif prompt_logprobs is None:
            return None
        if finish_reason is not None:
            self._leave(request)
        return report(
            request.request_id,
            token_ids,
            now=now,
            logprobs=None if sampled.logprobs is None else [sampled.logprobs],
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
