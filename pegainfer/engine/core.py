"""`EngineCore`: the step loop's body. Schedules, hands plans to the worker, and turns what comes back into
updates.

It knows nothing of processes, sockets or text. What is wrong with one request ends that request; an
exception out of `step` means that the engine can no longer be trusted.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from pegainfer.config import EngineConfig
from pegainfer.engine.inputs import check_ids
from pegainfer.engine.messages import (
    AddRequest,
    CacheConfigInfo,
    EngineInfo,
    EngineStats,
    FinishReason,
    RequestUpdate,
)
from pegainfer.errors import RequestError
from pegainfer.kvcache.manager import KvCacheManager
from pegainfer.scheduler.policy import SchedulerSettings
from pegainfer.scheduler.request import Request
from pegainfer.scheduler.scheduler import Scheduler
from pegainfer.worker.base import Worker

__all__ = ["EngineCore"]


class EngineCore:
    """One engine over one worker. Not safe to use from several threads.

    `eos_token_ids` end every answer that does not ignore them. `phases` are the seconds that preceded the
    worker's own start-up.
    """

    def __init__(
        self,
        config: EngineConfig,
        worker: Worker,
        *,
        eos_token_ids: Iterable[int] = (),
        generation_config: dict[str, Any] | None = None,
        phases: dict[str, float] | None = None,
    ) -> None:
        info = worker.info
        eos = tuple(dict.fromkeys(eos_token_ids))
        settings = SchedulerSettings(
            max_model_len=info.max_model_len,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
            max_num_mixed_tokens=info.max_num_mixed_tokens,
            enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
            policy="priority" if config.scheduler.scheduling_policy == "priority" else "fcfs",
            eos_token_ids=frozenset(eos),
            max_steps_in_flight=info.max_steps_in_flight,
        )
        cache = KvCacheManager(
            info.num_blocks, info.block_size, enable_prefix_caching=config.cache.enable_prefix_caching
        )
        self._worker = worker
        self._scheduler = Scheduler(settings, cache)
        self._max_queued = config.scheduler.max_num_queued_reqs
        self._vocab_size = info.vocab_size
        self._seeds = random.Random(config.model.seed)
        self._pending: list[RequestUpdate] = []
        self._started: deque[tuple[float, int]] = deque()  # when each step in flight began, and its tokens
        self._num_steps = 0
        self._num_step_tokens = 0
        self._longest_step_s = 0.0
        self.info = EngineInfo(
            model_name=config.served_names[0],
            architecture=info.architecture,
            device_name=info.device_name,
            dtype=info.dtype,
            weight_format=info.weight_format,
            weight_bytes=info.weight_bytes,
            num_parameters=info.num_parameters,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            max_num_seqs=settings.max_running,
            max_num_batched_tokens=info.max_num_batched_tokens,
            cache=CacheConfigInfo(info.block_size, info.num_blocks, info.kv_cache_bytes),
            phases={**(phases or {}), **info.phases},
            eos_token_ids=list(eos),
            generation_config=generation_config or {},
        )

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._pending or self._started or self._scheduler.has_unfinished)

    def add(self, request: AddRequest) -> None:
        """Queue a request. What is wrong with it becomes its only update."""
        try:
            check_ids(request.prompt_token_ids, request.params, vocab_size=self._vocab_size)
            self._check_room()
            seed = request.params.seed
            entry = Request(
                request.request_id,
                request.prompt_token_ids,
                params=request.params,
                # Drawn for every request, so that one's own seed does not change the others' luck.
                seed=self._seeds.getrandbits(64) if seed is None else seed,
                priority=request.priority,
                cache_salt=request.cache_salt,
            )
            refusal = self._scheduler.add(entry, time.monotonic())
        except RequestError as error:
            self.refuse(request.request_id, error)
            return
        if refusal is not None:
            self._pending.append(refusal)

    def refuse(self, request_id: str, error: RequestError) -> None:
        """Report a request that never got as far as the scheduler."""
        self._pending.append(
            RequestUpdate(
                request_id,
                finish_reason=FinishReason.error,
                error=error.message,
                error_param=error.param,
                error_status=error.status,
            )
        )

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests in whatever state they are; unknown and finished ones are ignored."""
        now = time.monotonic()
        for request_id in request_ids:
            update = self._scheduler.abort(request_id, now)
            if update is not None:
                self._pending.append(update)

    def reset_prefix_cache(self) -> None:
        """Forget every cached block that no request uses."""
        self._scheduler.reset_prefix_cache()

    def step(self) -> list[RequestUpdate]:
        """Keep the worker as busy as it allows, wait for its oldest step, and return what changed.

        While the caller publishes that, a worker that overlaps steps already runs the next one.
        """
        scheduler, worker = self._scheduler, self._worker
        while len(self._started) < worker.info.max_steps_in_flight:
            now = time.monotonic()
            plan = scheduler.schedule(now)
            if plan is None:
                break
            worker.submit(plan)
            self._started.append((now, plan.num_tokens))
        if self._started:
            output = worker.collect()
            now = time.monotonic()
            self._finish_step(now)
            self._pending += scheduler.update(output, now)
        elif scheduler.has_unfinished:
            raise RuntimeError("the scheduler has requests but no step for them")
        updates, self._pending = self._pending, []
        return updates

    def stats(self) -> EngineStats:
        """The engine as it is now."""
        scheduler, ledger = self._scheduler, self._scheduler.ledger
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_cache_usage=scheduler.cache.usage,
            num_preemptions=ledger.num_preemptions,
            prefix_cache_queries=scheduler.prefix_cache_queries,
            prefix_cache_hits=scheduler.prefix_cache_hits,
            prompt_tokens=ledger.prompt_tokens,
            generation_tokens=ledger.generation_tokens,
            step_id=self._num_steps,
            step_tokens=self._num_step_tokens,
            longest_step_s=self._longest_step_s,
        )

    def check_integrity(self) -> None:
        """Raise `RuntimeError` when the KV blocks do not add up."""
        self._scheduler.cache.check_integrity()

    def close(self) -> None:
        """Free the device."""
        self._worker.close()

    def _finish_step(self, now: float) -> None:
        started_at, num_tokens = self._started.popleft()
        self._num_steps += 1
        self._num_step_tokens += num_tokens
        self._longest_step_s = max(self._longest_step_s, now - started_at)

    def _check_room(self) -> None:
        """Refuse with 503 what would wait behind a full queue; what can start at once does not wait."""
        if self._max_queued is None:
            return
        scheduler = self._scheduler
        free = max(0, scheduler.settings.max_running - scheduler.num_running)
        if scheduler.num_waiting >= self._max_queued + free:
            raise RequestError(
                f"the queue is full ({scheduler.num_waiting} requests); try again later",
                status=503,
                kind="ServiceUnavailableError",
            )
