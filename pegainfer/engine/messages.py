"""What crosses the boundary between the server and the engine process. msgspec structs over ZeroMQ, one
frame each.
"""

from __future__ import annotations

import msgspec

from pegainfer.sampling_params import SamplingParams
from pegainfer.scheduler.plan import FinishReason, RequestUpdate

__all__ = [
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
    "StepUpdates",
    "ToEngine",
]


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
    """A snapshot of the engine. Counters only grow; gauges are of now. `kv_cache_usage` is in 0..1."""

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


class StepUpdates(msgspec.Struct, frozen=True, tag=True):
    """Engine to client: everything one step changed. Also sent without updates as a heartbeat (see
    `EngineInfo`).
    """

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
    `heartbeat_s` is the interval at which an engine with work reports even when a step takes long, and an
    idle one to show that it lives.
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
    heartbeat_s: float = 1.0


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """Engine to client, once: requests are welcome."""

    info: EngineInfo


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """Engine to client, as its last word. `is_user_error` marks a `PegaInferError` (one line, no
    traceback).
    """

    message: str
    is_user_error: bool


ToEngine = AddRequest | AbortRequests | ResetPrefixCache | Shutdown
FromEngine = StepUpdates | EngineReady | EngineFailed
