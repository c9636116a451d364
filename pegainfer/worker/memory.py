"""The sum of memory that a worker will take, made before any weight is read."""

from __future__ import annotations

from dataclasses import dataclass

from pegainfer.config import EngineConfig
from pegainfer.errors import CapacityError, ConfigError
from pegainfer.kvcache.spec import KvCacheSpec
from pegainfer.models.base import Model
from pegainfer.runtime.device import DeviceKind, MemoryInfo

__all__ = ["KvPlan", "format_bytes", "plan_memory"]

_CPU_KV_SHARE = 0.25
_CPU_KV_LIMIT = 4 << 30
_LEAST_CONTEXT = 512  # tokens; a shorter automatic context would only turn prompts away


@dataclass(frozen=True, slots=True)
class KvPlan:
    """What the sum left for the KV cache, and the context length that follows."""

    num_blocks: int
    max_model_len: int


def format_bytes(nbytes: float) -> str:
    """`1.53 GiB`, `20.0 MiB`."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.3g} {unit}"
    return f"{nbytes:.0f} B"


def plan_memory(
    config: EngineConfig,
    model: Model,
    spec: KvCacheSpec,
    *,
    context_limit: int,
    step_bytes: int,
    memory: MemoryInfo,
    kind: DeviceKind,
) -> KvPlan:
    """Size the KV cache and settle the context length; raises `CapacityError` with the sum if it cannot be.

    `context_limit` is what the model was trained for, `step_bytes` the memory of steps.
    """
    wanted = _wanted_len(config, context_limit)
    budget = int(memory.available * config.cache.gpu_memory_utilization)
    fixed = {
        "weights": model.weight_bytes,
        "buffers of a step": step_bytes,
        "position table": wanted * model.bytes_per_position,
    }
    sequence = -(-wanted // spec.block_size)
    room = budget - sum(fixed.values())
    num_blocks = _asked_blocks(config, spec)
    if num_blocks is None:
        least = -(-min(wanted, _LEAST_CONTEXT) // spec.block_size)
        sensible = _sensible_blocks(config, spec, room, sequence=sequence, memory=memory, kind=kind)
        num_blocks = max(least, sensible)
    kv_bytes = num_blocks * spec.block_bytes
    if kv_bytes > room:
        raise CapacityError(_too_much({**fixed, "KV cache": kv_bytes}, budget, memory))
    if num_blocks < sequence:
        if _is_explicit(config):
            raise CapacityError(
                f"--max-model-len {wanted} needs {format_bytes(sequence * spec.block_bytes)} of KV cache, it "
                f"has {format_bytes(kv_bytes)} ({num_blocks * spec.block_size} tokens): lower it, or make "
                "the cache larger with --kv-cache-memory-bytes"
            )
        wanted = num_blocks * spec.block_size
    return KvPlan(num_blocks, wanted)


def _is_explicit(config: EngineConfig) -> bool:
    return config.model.max_model_len not in (None, -1)


def _wanted_len(config: EngineConfig, context_limit: int) -> int:
    asked = config.model.max_model_len
    if asked is None or asked == -1:
        return context_limit
    if not 1 <= asked <= context_limit:
        raise ConfigError(
            f"--max-model-len must be between 1 and the model's {context_limit} positions, got {asked}"
        )
    return asked


def _asked_blocks(config: EngineConfig, spec: KvCacheSpec) -> int | None:
    """Blocks of a cache whose size was given."""
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        if cache.num_gpu_blocks_override < 1:
            raise ConfigError(
                f"--num-gpu-blocks-override must be at least 1, got {cache.num_gpu_blocks_override}"
            )
        return cache.num_gpu_blocks_override
    if cache.kv_cache_memory_bytes is not None:
        num_blocks = cache.kv_cache_memory_bytes // spec.block_bytes
        if num_blocks < 1:
            raise ConfigError(
                f"--kv-cache-memory-bytes must hold at least one block of {format_bytes(spec.block_bytes)}"
            )
        return num_blocks
    return None


def _sensible_blocks(
    config: EngineConfig, spec: KvCacheSpec, room: int, *, sequence: int, memory: MemoryInfo, kind: DeviceKind
) -> int:
    """Blocks of a cache whose size is ours to choose, within `room` bytes."""
    fitting = room // spec.block_bytes
    if kind is not DeviceKind.cpu:
        return fitting
    # Host memory is shared with everything else: what all requests could use, within a share of it, but one
    # request of full length where that fits at all.
    share = int(min(memory.available * _CPU_KV_SHARE, _CPU_KV_LIMIT)) // spec.block_bytes
    enough = config.scheduler.max_num_seqs * sequence
    return min(fitting, max(min(share, enough), sequence))


def _too_much(parts: dict[str, int], budget: int, memory: MemoryInfo) -> str:
    listed = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts.items())
    return (
        f"at least {format_bytes(sum(parts.values()))} of memory are needed ({listed}) but only "
        f"{format_bytes(budget)} may be used (of {format_bytes(memory.available)} available): take a smaller "
        "or quantised model, or lower --max-model-len, --max-num-batched-tokens or --kv-cache-memory-bytes"
    )
