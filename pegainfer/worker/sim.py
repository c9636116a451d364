"""`SimulatedWorker`: made-up tokens at a fixed pace. Everything around the model is real: scheduling, KV
blocks, messages, text.

It also holds the engine to the step contract: a plan that no worker could execute raises `RuntimeError`.
"""

from __future__ import annotations

import time
import zlib
from array import array
from collections import deque
from dataclasses import dataclass, field

from pegainfer.config import EngineConfig
from pegainfer.errors import ConfigError
from pegainfer.scheduler.plan import (
    NewRequest,
    SampledToken,
    ScheduledRequest,
    StepOutput,
    StepPlan,
    TokenLogprobs,
)
from pegainfer.worker.base import WorkerInfo

__all__ = ["SimulatedWorker", "build_simulated_worker"]

_VOCAB_SIZE = 32_000
_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 8192
_STEP_TOKENS = 8192
_STRIDE = 7  # between one token and the next


@dataclass(slots=True)
class _State:
    """A request as a worker remembers it."""

    request: NewRequest
    token_ids: list[int]
    first_token: int
    block_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = -1


class SimulatedWorker:
    """Implements `worker.base.Worker`. The tokens of a request depend on its prompt and their number alone.

    A step takes `tpot_ms`, plus `ttft_ms` when it begins a prompt, plus its prompt tokens over
    `prefill_tokens_per_ms`.
    """

    def __init__(
        self,
        info: WorkerInfo,
        *,
        ttft_ms: float = 0.0,
        tpot_ms: float = 0.0,
        prefill_tokens_per_ms: float = 1e9,
    ) -> None:
        self._info = info
        self._ttft_s = ttft_ms / 1e3
        self._tpot_s = tpot_ms / 1e3
        self._prefill_s = 1e-3 / prefill_tokens_per_ms
        self._states: dict[str, _State] = {}
        self._in_flight: deque[tuple[StepOutput, float]] = deque()
        self._busy_until = 0.0

    @property
    def info(self) -> WorkerInfo:
        """What the simulated device claims to be."""
        return self._info

    def submit(self, plan: StepPlan) -> None:
        """Start a step; it ends its time after the one before it."""
        if len(self._in_flight) >= self._info.max_steps_in_flight:
            raise RuntimeError("a step was submitted before the previous one was collected")
        for request_id in plan.released:
            self._states.pop(request_id, None)
        for request in plan.new_requests:
            self._states[request.request_id] = self._begin(request)
        seconds = self._tpot_s + self._ttft_s * bool(plan.new_requests)
        seconds += self._prefill_s * sum(entry.num_tokens for entry in plan.scheduled if entry.num_tokens > 1)
        self._busy_until = max(time.monotonic(), self._busy_until) + seconds
        output = StepOutput(plan.step_id, [self._compute(entry) for entry in plan.scheduled])
        self._in_flight.append((output, self._busy_until))

    def collect(self) -> StepOutput:
        """Wait for the oldest step."""
        output, ready_at = self._in_flight.popleft()
        wait = ready_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        return output

    def close(self) -> None:
        """Forget everything."""
        self._in_flight.clear()
        self._states.clear()

    def _begin(self, request: NewRequest) -> _State:
        prompt = array("i", request.token_ids[: request.num_prompt_tokens])
        return _State(request, list(request.token_ids), zlib.crc32(prompt.tobytes()))

    def _compute(self, entry: ScheduledRequest) -> SampledToken:
        state = self._states[entry.request_id]
        self._check(state, entry)
        end = entry.num_computed_tokens + entry.num_tokens
        params, num_prompt = state.request.params, state.request.num_prompt_tokens
        prompt_logprobs = None
        if params.prompt_logprobs is not None and entry.num_computed_tokens < num_prompt - 1:
            targets = state.token_ids[entry.num_computed_tokens + 1 : min(end + 1, num_prompt)]
            prompt_logprobs = [self._score(token, params.prompt_logprobs) for token in targets]
        if not entry.samples:
            return SampledToken(entry.request_id, prompt_logprobs=prompt_logprobs)
        token_id = self._choose(state)
        state.token_ids.append(token_id)
        logprobs = None if params.logprobs is None else self._score(token_id, params.logprobs)
        return SampledToken(entry.request_id, token_id, logprobs, prompt_logprobs)

    def _check(self, state: _State, entry: ScheduledRequest) -> None:
        """Raise `RuntimeError` unless the step continues where the last one ended, on memory of its own."""
        state.block_ids += entry.new_block_ids
        end = entry.num_computed_tokens + entry.num_tokens
        is_first = state.num_computed_tokens < 0
        if not is_first and entry.num_computed_tokens != state.num_computed_tokens:
            raise RuntimeError(
                f"{entry.request_id}: a step starts at {entry.num_computed_tokens} out of turn"
            )
        if entry.num_tokens < 1 or end > len(state.token_ids):
            raise RuntimeError(f"{entry.request_id}: a step computes tokens that do not exist")
        if end > len(state.block_ids) * self._info.block_size:
            raise RuntimeError(f"{entry.request_id}: a step writes beyond its blocks")
        if any(not 0 <= block < self._info.num_blocks for block in entry.new_block_ids):
            raise RuntimeError(f"{entry.request_id}: a block does not exist")
        if entry.samples and end != len(state.token_ids):
            raise RuntimeError(f"{entry.request_id}: only the last token yields the next one")
        state.num_computed_tokens = end

    def _choose(self, state: _State) -> int:
        """The next token. `allowed_token_ids` are taken in turn; what would end the request comes only from
        there.
        """
        index = len(state.token_ids) - state.request.num_prompt_tokens
        allowed = state.request.params.allowed_token_ids
        if allowed is not None:
            return allowed[index % len(allowed)]
        size = self._info.decodable_vocab_size
        token_id = (state.first_token + _STRIDE * index) % size
        for _ in range(size):
            if token_id not in state.request.stop_token_ids:
                break
            token_id = (token_id + 1) % size
        return token_id

    def _score(self, token_id: int, num_logprobs: int) -> TokenLogprobs:
        """A distribution in which every other token is half as likely as the one before it."""
        size = self._info.vocab_size
        count = size if num_logprobs < 0 else min(num_logprobs, size)
        top_ids = [(token_id + offset) % size for offset in range(count)]
        return TokenLogprobs(token_id, -0.6931, 1, top_ids, [-0.6931 * (i + 1) for i in range(count)])


def build_simulated_worker(config: EngineConfig, *, vocab_size: int | None = None) -> SimulatedWorker:
    """The worker of `--simulate`: sizes from the options where they are given, generous ones elsewhere."""
    cache, scheduler, simulator = config.cache, config.scheduler, config.simulator
    asked = config.model.max_model_len
    max_model_len = _MAX_MODEL_LEN if asked is None or asked == -1 else asked
    if max_model_len < 1:
        raise ConfigError(f"--max-model-len must be at least 1, got {max_model_len}")
    block_size = cache.block_size or _BLOCK_SIZE
    sequence = -(-max_model_len // block_size)
    num_blocks = cache.num_gpu_blocks_override or sequence * min(scheduler.max_num_seqs, 64)
    step_tokens = scheduler.max_num_batched_tokens or _STEP_TOKENS
    info = WorkerInfo(
        architecture="Simulated",
        device_name="no device",
        dtype="none",
        weight_format="none",
        weight_bytes=0,
        num_parameters=0,
        vocab_size=vocab_size or _VOCAB_SIZE,
        decodable_vocab_size=vocab_size or _VOCAB_SIZE,
        max_model_len=max_model_len,
        max_num_batched_tokens=step_tokens,
        max_num_mixed_tokens=min(scheduler.max_num_mixed_tokens or step_tokens, step_tokens),
        block_size=block_size,
        num_blocks=num_blocks,
        kv_cache_bytes=0,
        max_steps_in_flight=1 if scheduler.async_scheduling is False else 2,
    )
    return SimulatedWorker(
        info,
        ttft_ms=simulator.sim_ttft_ms,
        tpot_ms=simulator.sim_tpot_ms,
        prefill_tokens_per_ms=simulator.sim_prefill_tokens_per_ms,
    )
