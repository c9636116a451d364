"""What crosses the boundary between the server and the engine process. msgspec structs over ZeroMQ, one
frame each.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pegainfer.config import EngineConfig
from pegainfer.sampling_params import SamplingParams
from pegainfer.scheduler.plan import FinishReason, RequestUpdate

__all__ = [
    "HEARTBEAT_S",
    "AbortRequests",
    "AddRequest",
    "CacheConfigInfo",
    "EngineFailed",
    "EngineInfo",
    "EngineReady",
    "EngineStats",
    "FinishReason",
    "FromEngine",
    "RequestUpdate",
    "ResetPrefixCache",
    "Shutdown",
    "StartEngine",
    "StepUpdates",
    "ToEngine",
    "Vocabulary",
]

HEARTBEAT_S = 1.0
"""How often an engine process shows that it is alive, whatever it does."""


class StartEngine(msgspec.Struct, frozen=True, tag=True):
    """Client to engine, as its first word: what to build."""

    config: EngineConfig


class Vocabulary(msgspec.Struct, frozen=True, tag=True):
    """Client to engine, as its second word: what the tokenizer, which lives with the client, says of ids.

    `decodable_vocab_size` bounds the ids that may be sampled (None: all of them). `eos_token_id` ends an
    answer beside those that the model's own configuration lists.
    """

    decodable_vocab_size: int | None = None
    eos_token_id: int | None = None


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """Client to engine: serve this. `priority`: lower is served first. `arrival_time` is `time.time()` at
    the client.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None
    arrival_time: float = 0.0


class AbortRequests(msgspec.Struct, frozen=True, tag=True):
    """Client to engine: stop these; unknown and finished ids are ignored."""

    request_ids: list[str]


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Client to engine: forget every cached block that no request uses."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Client to engine: leave now; whatever runs is aborted."""


class EngineStats(msgspec.Struct, frozen=True):
    """A snapshot of the engine. Counters only grow; gauges are of now. `kv_cache_usage` is in 0..1.

    `step_id` counts finished steps, `step_tokens` the tokens that all of them computed. `longest_step_s` is
    how long the slowest took.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    step_id: int = 0
    step_tokens: int = 0
    longest_step_s: float = 0.0


class StepUpdates(msgspec.Struct, frozen=True, tag=True):
    """Engine to client, once per step: everything that it changed."""

    updates: list[RequestUpdate]
    stats: EngineStats


class CacheConfigInfo(msgspec.Struct, frozen=True):
    """Sizes of the KV cache, for `/metrics` and the start-up lines."""

    block_size: int
    num_blocks: int
    kv_cache_bytes: int


class EngineInfo(msgspec.Struct, frozen=True):
    """What the engine decided at start.

    `vocab_size` is the width of the logits. `phases` maps a start-up phase to its seconds, in order.
    `generation_config` holds the sampling defaults that the options chose, `eos_token_ids` what ends an
    answer.
    """

    model_name: str
    architecture: str
    device_name: str
    dtype: str
    weight_format: str
    weight_bytes: int
    num_parameters: int
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    cache: CacheConfigInfo
    phases: dict[str, float]
    eos_token_ids: list[int] = []
    generation_config: dict[str, Any] = {}

    @property
    def kv_capacity(self) -> int:
        """Tokens that the KV cache holds."""
        return self.cache.num_blocks * self.cache.block_size


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """Engine to client, once: requests are welcome."""

    info: EngineInfo


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """Engine to client, as its last word. `is_user_error` marks a `PegaInferError` (one line, no
    traceback).
    """

    message: str
    is_user_error: bool


ToEngine = StartEngine | Vocabulary | AddRequest | AbortRequests | ResetPrefixCache | Shutdown
FromEngine = StepUpdates | EngineReady | EngineFailed
