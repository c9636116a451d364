"""The lines that a server prints when it is ready: what was decided, and how long each phase took."""

from __future__ import annotations

from collections.abc import Iterator

from pegainfer.engine.messages import EngineInfo
from pegainfer.version import __version__

__all__ = ["startup_lines"]


def startup_lines(info: EngineInfo, *, seconds: float) -> Iterator[str]:
    """One line each for model, device, memory, capacity and time."""
    tokens = info.cache.num_blocks * info.cache.block_size
    concurrency = tokens / max(info.max_model_len, 1)
    yield (
        f"pegainfer {__version__}: {info.model_name} ({info.architecture}, "
        f"{info.num_parameters / 1e6:,.0f}M parameters, {info.weight_format} weights, {info.dtype})"
    )
    yield f"Device: {info.device_name}"
    yield (
        f"Memory: weights {_size(info.weight_bytes)}, KV cache {_size(info.cache.kv_cache_bytes)} "
        f"({info.cache.num_blocks} blocks of {info.cache.block_size} tokens)"
    )
    yield f"KV cache size: {tokens:,} tokens"
    yield f"Maximum concurrency for {info.max_model_len:,} tokens per request: {concurrency:.2f}x"
    yield (
        f"A step takes at most {info.max_num_batched_tokens:,} tokens of {info.max_num_seqs:,} requests; "
        f"prompt and answer together at most {info.max_model_len:,} tokens"
    )
    phases = ", ".join(f"{name} {taken:.2f} s" for name, taken in info.phases.items())
    yield f"Ready after {seconds:.2f} s ({phases})"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
