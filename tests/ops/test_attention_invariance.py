"""The bits of a token's attention do not depend on chunking, batch mates, block tables or threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import pegainfer.kernels.attention.cpu
import pegainfer.kernels.rope.cpu  # noqa: F401
from pegainfer.errors import KernelError
from pegainfer.ops.attention import AttentionFacts, paged_attention
from pegainfer.ops.op import bind
from pegainfer.ops.rope import QkvRopeFacts, qkv_rope_write
from pegainfer.runtime.cpu.device import CpuDevice
from pegainfer.runtime.dtypes import DType
from tests.ops.native import LEVELS, device_of

Array = np.ndarray[Any, Any]
Step = list[tuple[int, int]]  # (request, new tokens)


@dataclass(frozen=True)
class Layer:
    """An attention layer and the projections of some requests' tokens."""

    rope: QkvRopeFacts
    attention: AttentionFacts
    projections: list[Array]  # per request [length, (num_heads + 2 * num_kv_heads) * head_dim]
    norms: tuple[Array, Array]
    cos_sin: Array

    @classmethod
    def random(
        cls,
        lengths: list[int],
        *,
        heads: tuple[int, int] = (6, 2),
        head_dim: int = 64,
        kv_dtype: DType = DType.bfloat16,
        block_size: int = 16,
    ) -> Layer:
        rng = np.random.default_rng(sum(lengths))
        width = (heads[0] + 2 * heads[1]) * head_dim
        rope = QkvRopeFacts(*heads, head_dim, head_dim, True, 1e-6, DType.float32, kv_dtype, block_size)
        attention = AttentionFacts(*heads, head_dim, head_dim**-0.5, DType.float32, kv_dtype, block_size)
        angles = np.arange(512)[:, None] * 1e4 ** (-np.arange(head_dim // 2) / (head_dim // 2))
        return cls(
            rope,
            attention,
            [rng.normal(0, 1, (length, width)).astype(np.float32) for length in lengths],
            (
                rng.normal(2, 0.3, head_dim).astype(np.float32),
                rng.normal(2, 0.3, head_dim).astype(np.float32),
            ),
            np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32),
        )

    def run(self, device: CpuDevice, steps: list[Step], *, seed: int = 0) -> list[Array]:
        """What every token gets when the steps are run one after the other over a fresh cache, whose unused
        bytes are NaN and whose blocks are dealt out in the order of `seed`.
        """
        facts, block_size = self.rope, self.rope.block_size
        counts = [-(-len(rows) // block_size) for rows in self.projections]
        blocks = np.random.default_rng(seed).permutation(sum(counts)).astype(np.int32)
        tables = np.full((len(counts), max(counts)), -1, np.int32)
        for r, count in enumerate(counts):
            tables[r, :count], blocks = blocks[:count], blocks[count:]
        kv = device.from_numpy(np.full(sum(counts) * facts.block_bytes, 0xFF, np.uint8))
        write, attend = bind(qkv_rope_write, facts, device), bind(paged_attention, self.attention, device)
        q_width = facts.num_heads * facts.head_dim
        results = [np.zeros((len(rows), q_width), np.float32) for rows in self.projections]
        done = [0] * len(counts)
        for step in steps:
            requests = [r for r, _ in step]
            positions = [np.arange(done[r], done[r] + new) for r, new in step]
            slots = [
                tables[r, p // block_size] * block_size + p % block_size
                for r, p in zip(requests, positions, strict=True)
            ]
            rows = np.concatenate([self.projections[r][p] for r, p in zip(requests, positions, strict=True)])
            for r, new in step:
                done[r] += new
            starts = np.cumsum([0, *(new for _, new in step)])
            q, out = (device.from_numpy(np.zeros((len(rows), q_width), np.float32)) for _ in range(2))
            inputs = {
                "qkv": rows,
                "positions": np.concatenate(positions).astype(np.int32),
                "slot_mapping": np.concatenate(slots).astype(np.int32),
                "cos_sin": self.cos_sin,
                "q_norm": self.norms[0],
                "k_norm": self.norms[1],
                "block_tables": tables[requests],
                "query_start_loc": starts.astype(np.int32),
                "seq_lens": np.array([done[r] for r in requests], np.int32),
            }
            tensors = {name: device.from_numpy(array) for name, array in inputs.items()}
            layout = {name: tensors.pop(name) for name in ("block_tables", "query_start_loc", "seq_lens")}
            write(**tensors, kv=kv, kv_block_stride=facts.block_bytes, out=q)
            layout["num_decodes"] = next((i for i, (_, new) in enumerate(step) if new > 1), len(step))
            attend(q=q, kv=kv, kv_block_stride=facts.block_bytes, **layout, out=out)
            device.stream.synchronize()
            for (r, new), start in zip(step, starts, strict=False):
                results[r][done[r] - new : done[r]] = out.numpy()[start : start + new]
        return results


def chunks(length: int, size: int) -> list[Step]:
    """Steps that prefill request 0 in chunks."""
    return [[(0, min(size, length - start))] for start in range(0, length, size)]


@pytest.mark.parametrize("kv_dtype", [DType.float32, DType.float16, DType.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
def test_chunks_give_the_bits_of_the_whole_prompt(level: str, kv_dtype: DType) -> None:
    layer = Layer.random([283], kv_dtype=kv_dtype)
    device = device_of(level, 1)
    (whole,) = layer.run(device, [[(0, 283)]])
    assert np.isfinite(whole).all()
    for size in (1, 7, 16, 33):
        (chunked,) = layer.run(device, chunks(283, size), seed=size)
        assert np.array_equal(chunked, whole), f"chunks of {size}"
    (incremental,) = layer.run(device, [[(0, 129)], *chunks(283 - 129, 1)])
    assert np.array_equal(incremental, whole)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size"),
    [((9, 3), 64, 16), ((16, 8), 128, 32), ((7, 1), 48, 48), ((2, 2), 256, 16)],
)
def test_batch_mates_do_not_matter(
    level: str, heads: tuple[int, int], head_dim: int, block_size: int
) -> None:
    lengths = [200, 1, 150, 65]
    layer = Layer.random(lengths, heads=heads, head_dim=head_dim, block_size=block_size)
    device = device_of(level, 2)
    alone = [layer.run(device, [[(r, length)]])[r] for r, length in enumerate(lengths)]
    together = layer.run(
        device, [[(2, 100), (0, 170)], [(0, 29), (1, 1), (2, 49), (3, 65)], [(2, 1), (0, 1)]]
    )
    for r in range(len(lengths)):
        assert np.array_equal(together[r], alone[r]), f"request {r}"


@pytest.mark.parametrize("level", LEVELS)
def test_threads_do_not_matter(level: str) -> None:
    """Three threads have more hands than a decode step has kv heads, so that its keys are shared out."""
    layer = Layer.random([400, 37])
    steps = [[(0, 390)], [(1, 30)], *([(0, 1)] for _ in range(5)), *([(0, 1), (1, 1)] for _ in range(5))]
    one, *others = (layer.run(device_of(level, threads), steps) for threads in (1, 2, 3))
    for other in others:
        for r in range(2):
            assert np.array_equal(one[r], other[r])


@pytest.mark.parametrize("level", LEVELS)
def test_negative_slots_are_not_written(level: str) -> None:
    device = device_of(level, 1)
    layer = Layer.random([20])
    facts = layer.rope
    before = np.full(2 * facts.block_bytes, 0xAB, np.uint8)
    kv = device.from_numpy(before.copy())
    arguments = {
        "qkv": layer.projections[0],
        "positions": np.arange(20, dtype=np.int32),
        "slot_mapping": np.full(20, -1, np.int32),
        "cos_sin": layer.cos_sin,
        "q_norm": layer.norms[0],
        "k_norm": layer.norms[1],
        "out": np.zeros((20, facts.num_heads * facts.head_dim), np.float32),
    }
    launch = bind(qkv_rope_write, facts, device)
    tensors = {name: device.from_numpy(array) for name, array in arguments.items()}
    launch(**tensors, kv=kv, kv_block_stride=facts.block_bytes)
    device.stream.synchronize()
    assert np.array_equal(kv.numpy(), before)
    assert np.abs(tensors["out"].numpy()).min(axis=1).max() > 0


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [("slot_mapping", 2 * 16, "slot"), ("positions", 512, "position"), ("positions", -1, "position")],
)
def test_writes_outside_of_the_cache_are_errors(name: str, wrong: int, message: str) -> None:
    device, layer = device_of(LEVELS[0], 2), Layer.random([20])
    facts = layer.rope
    arguments = {
        "qkv": layer.projections[0],
        "positions": np.arange(20, dtype=np.int32),
        "slot_mapping": np.arange(20, dtype=np.int32),
        "cos_sin": layer.cos_sin,
        "q_norm": layer.norms[0],
        "k_norm": layer.norms[1],
        "kv": np.zeros(2 * facts.block_bytes, np.uint8),
        "out": np.zeros((20, facts.num_heads * facts.head_dim), np.float32),
    }
    arguments[name][11] = wrong
    tensors = {key: device.from_numpy(array) for key, array in arguments.items()}
    bind(qkv_rope_write, facts, device)(**tensors, kv_block_stride=facts.block_bytes)
    with pytest.raises(KernelError, match=message):
        device.stream.synchronize()


@pytest.mark.parametrize(("table", "message"), [([0, 2], "outside"), ([-1, 0], "outside"), ([0], "short")])
@pytest.mark.parametrize("threads", [1, 2])
def test_reads_outside_of_the_cache_are_errors(threads: int, table: list[int], message: str) -> None:
    device, layer = device_of(LEVELS[0], threads), Layer.random([20])
    facts = layer.rope
    width = facts.num_heads * facts.head_dim
    arguments = {
        "q": np.ones((1, width), np.float32),
        "kv": np.zeros(2 * facts.block_bytes, np.uint8),
        "block_tables": np.array([table], np.int32),
        "query_start_loc": np.array([0, 1], np.int32),
        "seq_lens": np.array([20], np.int32),
        "out": np.zeros((1, width), np.float32),
    }
    tensors = {key: device.from_numpy(array) for key, array in arguments.items()}
    attend = bind(paged_attention, layer.attention, device)
    attend(**tensors, kv_block_stride=facts.block_bytes, num_decodes=1)
    with pytest.raises(KernelError, match=message):
        device.stream.synchronize()
