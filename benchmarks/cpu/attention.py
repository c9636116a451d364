"""Time of attention, the small ops and sampling on the CPU, one call each; best of several runs.

    python benchmarks/cpu/attention.py [--threads 2] [--kv-dtype bfloat16]

`us/layer` is one call; `GB/s` counts the keys and values that it must read, `GFLOP/s` its multiplications and
additions (causal).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pegainfer.kernels import load_providers
from pegainfer.ops.activation import SiluAndMulFacts, silu_and_mul
from pegainfer.ops.attention import AttentionFacts, paged_attention
from pegainfer.ops.norm import RmsNormFacts, rms_norm
from pegainfer.ops.op import Launcher, bind
from pegainfer.ops.rope import QkvRopeFacts, qkv_rope_write
from pegainfer.ops.sampling import SamplingFacts, sample
from pegainfer.runtime.cpu.device import CpuDevice, make_cpu_device
from pegainfer.runtime.device import DeviceKind
from pegainfer.runtime.dtypes import DType

BLOCK_SIZE = 16
SHAPES = {  # heads, kv heads, head_dim, hidden, intermediate
    "SmolLM2-135M": (9, 3, 64, 576, 1536),
    "Qwen3-0.6B": (16, 8, 128, 1024, 3072),
}


def measure(device: CpuDevice, launcher: Launcher, arguments: dict[str, Any], repeats: int = 20) -> float:
    """Seconds of one call, from captured graphs of many so that the host's part does not count."""
    tensors = {k: device.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
    calls = 50
    stream = device.stream
    stream.begin_capture()
    for _ in range(calls):
        launcher(**tensors)
    graph = stream.end_capture()

    def once() -> float:
        start = time.perf_counter()
        graph.replay()
        stream.synchronize()
        return time.perf_counter() - start

    if once() > 0.2:
        repeats = 3
    return min(once() for _ in range(repeats)) / calls


def attention(device: CpuDevice, shape: tuple[int, ...], kv_dtype: DType, new: int, length: int) -> str:
    num_heads, num_kv_heads, head_dim, *_ = shape
    facts = AttentionFacts(
        num_heads, num_kv_heads, head_dim, head_dim**-0.5, DType.float32, kv_dtype, BLOCK_SIZE
    )
    blocks = -(-length // BLOCK_SIZE)
    stride = 2 * num_kv_heads * BLOCK_SIZE * head_dim * kv_dtype.itemsize
    rng = np.random.default_rng(0)
    kv = rng.normal(0, 1, blocks * stride // kv_dtype.itemsize).astype(kv_dtype.numpy).view(np.uint8)
    q = rng.normal(0, 1, (new, num_heads * head_dim)).astype(np.float32)
    seconds = measure(
        device,
        bind(paged_attention, facts, device),
        {
            "q": q,
            "kv": kv,
            "kv_block_stride": stride,
            "block_tables": rng.permutation(blocks).astype(np.int32)[None],
            "query_start_loc": np.array([0, new], np.int32),
            "seq_lens": np.array([length], np.int32),
            "num_decodes": int(new == 1),
            "out": np.zeros_like(q),
        },
    )
    pairs = new * (length - new) + new * (new + 1) / 2
    flops = 4 * pairs * num_heads * head_dim
    rates = f"{kv.nbytes / seconds / 1e9:6.1f} GB/s {flops / seconds / 1e9:7.1f} GFLOP/s"
    return f"{seconds * 1e6:9.1f} us/layer {rates}"


def small_ops(device: CpuDevice, shape: tuple[int, ...], kv_dtype: DType, rows: int) -> dict[str, float]:
    num_heads, num_kv_heads, head_dim, hidden, intermediate = shape
    rng = np.random.default_rng(0)
    rope = QkvRopeFacts(
        num_heads, num_kv_heads, head_dim, head_dim, False, 1e-5, DType.float32, kv_dtype, BLOCK_SIZE
    )
    blocks = -(-rows // BLOCK_SIZE)

    def normal(*size: int) -> np.ndarray[Any, Any]:
        return rng.normal(0, 1, size).astype(np.float32)

    return {
        "rms_norm": measure(
            device,
            bind(rms_norm, RmsNormFacts(hidden, 1e-5, DType.float32), device),
            {"x": normal(rows, hidden), "weight": normal(hidden), "out": normal(rows, hidden)},
        ),
        "qkv_rope_write": measure(
            device,
            bind(qkv_rope_write, rope, device),
            {
                "qkv": normal(rows, (num_heads + 2 * num_kv_heads) * head_dim),
                "positions": np.arange(rows, dtype=np.int32),
                "slot_mapping": np.arange(rows, dtype=np.int32),
                "cos_sin": normal(rows, head_dim),
                "q_norm": None,
                "k_norm": None,
                "kv": np.zeros(blocks * rope.block_bytes, np.uint8),
                "kv_block_stride": rope.block_bytes,
                "out": normal(rows, num_heads * head_dim),
            },
        ),
        "silu_and_mul": measure(
            device,
            bind(silu_and_mul, SiluAndMulFacts(intermediate, DType.float32), device),
            {"gate_up": normal(rows, 2 * intermediate), "out": normal(rows, intermediate)},
        ),
    }


def sampling(device: CpuDevice, vocab_size: int, rows: int, **settings: float) -> float:
    rng = np.random.default_rng(0)
    logits = np.repeat(rng.normal(0, 3, (1, vocab_size)).astype(np.float32), rows, axis=0)

    def each(name: str, default: float, dtype: Any = np.float32) -> np.ndarray[Any, Any]:
        return np.full(rows, settings.get(name, default), dtype)

    none = np.zeros(0, np.int32)
    starts = np.zeros(rows + 1, np.int32)
    return measure(
        device,
        bind(sample, SamplingFacts(vocab_size, vocab_size, 20), device),
        {
            "logits": logits,
            "temperature": each("temperature", 1),
            "top_k": each("top_k", 0, np.int32),
            "top_p": each("top_p", 1),
            "min_p": each("min_p", 0),
            "presence": each("presence", 0),
            "frequency": each("frequency", 0),
            "repetition": each("repetition", 1),
            "seeds": np.arange(rows, dtype=np.uint64),
            "counters": np.zeros(rows, np.int64),
            "history": none,
            "history_start": starts,
            "prompt_lens": np.zeros(rows, np.int32),
            "bias_ids": none,
            "bias_values": np.zeros(0, np.float32),
            "bias_start": starts,
            "allowed": None,
            "num_logprobs": each("num_logprobs", -1, np.int32),
            "sampled": np.zeros(rows, np.int32),
            "logprobs": np.zeros(rows, np.float32),
            "ranks": np.zeros(rows, np.int32),
            "top_ids": np.zeros((rows, 20), np.int32),
            "top_logprobs": np.zeros((rows, 20), np.float32),
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv-dtype", type=DType, default=DType.bfloat16)
    options = parser.parse_args()
    load_providers(DeviceKind.cpu)
    device = make_cpu_device(options.threads)
    print(f"{device.name}, {device.arch}, keys and values in {options.kv_dtype}")
    report: Callable[[str, str], None] = lambda what, value: print(f"{what:44}{value}")  # noqa: E731
    for model, shape in SHAPES.items():
        for context in (128, 512, 2048, 8192):
            report(f"{model} decode at {context}", attention(device, shape, options.kv_dtype, 1, context))
        report(f"{model} prefill of 512", attention(device, shape, options.kv_dtype, 512, 512))
        for rows in (1, 512):
            for name, seconds in small_ops(device, shape, options.kv_dtype, rows).items():
                report(f"{model} {name} of {rows} rows", f"{seconds * 1e6:9.1f} us")
    flavours: dict[str, dict[str, float]] = {
        "greedy": {"temperature": 0},
        "greedy, 5 logprobs": {"temperature": 0, "num_logprobs": 5},
        "temperature 1": {},
        "top-k 50": {"top_k": 50},
        "top-p 0.95": {"top_p": 0.95},
        "top-k 50, top-p 0.95": {"top_k": 50, "top_p": 0.95},
        "min-p 0.05": {"min_p": 0.05},
    }
    for vocab_size in (49152, 151936):
        for rows in (1, 8):
            for name, settings in flavours.items():
                seconds = sampling(device, vocab_size, rows, **settings)
                report(f"sample {rows} x {vocab_size}: {name}", f"{seconds * 1e6:9.1f} us")


if __name__ == "__main__":
    main()
