"""Rotary embedding of queries and keys, with the write of keys and values to the paged cache in one pass.

The rotation is half-split: with `d = rotary_dim`, element `i < d/2` pairs with `i + d/2`, and
`(a, b) -> (a cos - b sin, b cos + a sin)`; elements from `d` on pass unchanged. Where a model normalises its
queries and keys (RMSNorm per head), that happens before the rotation.

How a device lays out keys and values inside a block is its own business. `reference_cache` is the layout of
the NumPy reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.ops.op import Case, Op
from pegainfer.runtime.dtypes import DType

__all__ = ["QkvRopeFacts", "qkv_rope_write", "reference_cache", "rotation_table"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class QkvRopeFacts:
    """`kv_dtype` and `block_size` describe the cache; `eps` is used where `qk_norm` is set, whose weights are
    float32.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    qk_norm: bool
    eps: float
    act: DType
    kv_dtype: DType
    block_size: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one layer's part of a block: its keys, followed by its values."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * self.kv_dtype.itemsize


def rotation_table(inv_freq: Array, max_positions: int) -> Array:
    """float32 `[max_positions, 2 * len(inv_freq)]`: the cosines of `position * inv_freq`, then the sines."""
    angles = np.arange(max_positions, dtype=np.float64)[:, None] * inv_freq.astype(np.float64)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def reference_cache(
    kv: Array, block_stride: int, *, num_kv_heads: int, head_dim: int, block_size: int, dtype: DType
) -> tuple[Array, Array]:
    """Keys and values of the NumPy layout: views `[num_blocks, num_kv_heads, block_size, head_dim]` of the
    bytes `kv`.
    """
    part = num_kv_heads * block_size * head_dim * dtype.itemsize
    num_blocks = (kv.nbytes - 2 * part) // block_stride + 1
    shape = (num_blocks, num_kv_heads, block_size, head_dim)
    row = head_dim * dtype.itemsize
    strides = (block_stride, block_size * row, row, dtype.itemsize)
    keys = np.ndarray(shape, dtype.numpy, buffer=kv.data, strides=strides)
    values = np.ndarray(shape, dtype.numpy, buffer=kv.data, offset=part, strides=strides)
    return keys, values


def _reference(
    facts: QkvRopeFacts,
    *,
    qkv: Array,
    positions: Array,
    slot_mapping: Array,
    cos_sin: Array,
    q_norm: Array | None,
    k_norm: Array | None,
    kv: Array,
    kv_block_stride: int,
    out: Array,
) -> None:
    rows, hd = qkv.shape[0], facts.head_dim
    heads = qkv.astype(np.float32).reshape(rows, -1, hd)
    q, k, v = np.split(heads, [facts.num_heads, facts.num_heads + facts.num_kv_heads], axis=1)
    if facts.qk_norm:
        assert q_norm is not None
        assert k_norm is not None
        q, k = _rms(q, q_norm, facts.eps), _rms(k, k_norm, facts.eps)
    table = cos_sin[positions]
    out[...] = _rotate(q, table, facts.rotary_dim).reshape(rows, -1)
    keys, values = reference_cache(
        kv,
        kv_block_stride,
        num_kv_heads=facts.num_kv_heads,
        head_dim=hd,
        block_size=facts.block_size,
        dtype=facts.kv_dtype,
    )
    written = slot_mapping >= 0
    block, offset = np.divmod(slot_mapping[written], facts.block_size)
    keys[block, :, offset] = _rotate(k, table, facts.rotary_dim)[written]
    values[block, :, offset] = v[written]


def _rms(x: Array, weight: Array, eps: float) -> Array:
    mean_square = np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True)
    result: Array = x / np.sqrt(mean_square + eps).astype(np.float32) * weight
    return result


def _rotate(x: Array, table: Array, rotary_dim: int) -> Array:
    half = rotary_dim // 2
    cos, sin = table[:, None, :half], table[:, None, half:]
    a, b = x[..., :half], x[..., half:rotary_dim]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., rotary_dim:]], axis=-1)


def _cases(rng: np.random.Generator) -> Iterator[Case[QkvRopeFacts]]:
    """The written cache is checked by the cases of paged attention, which read it."""
    shapes = (  # rows, heads, kv heads, head_dim, rotary_dim, qk_norm, block_size
        (1, 9, 3, 64, 64, False, 16),
        (5, 16, 8, 128, 128, True, 16),
        (33, 4, 2, 48, 32, True, 32),
        (3, 2, 1, 256, 64, False, 16),
    )
    for act in (DType.float32, DType.bfloat16):
        for rows, num_heads, num_kv_heads, head_dim, rotary_dim, qk_norm, block_size in shapes:
            facts = QkvRopeFacts(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                rotary_dim=rotary_dim,
                qk_norm=qk_norm,
                eps=1e-6,
                act=act,
                kv_dtype=DType.bfloat16,
                block_size=block_size,
            )
            num_blocks = rows // block_size + 2
            slots = rng.permutation(num_blocks * block_size)[:rows].astype(np.int32)
            slots[rows // 2] = -1
            inv_freq = 1e4 ** (-np.arange(rotary_dim // 2) / (rotary_dim // 2))
            width = (num_heads + 2 * num_kv_heads) * head_dim
            norms = [rng.normal(1, 0.3, head_dim).astype(np.float32) if qk_norm else None for _ in range(2)]
            yield Case(
                name=f"{act}-{rows}x{num_heads}/{num_kv_heads}x{head_dim}{'-norm' if qk_norm else ''}",
                facts=facts,
                arguments={
                    "qkv": rng.normal(0, 1, (rows, width)).astype(act.numpy),
                    "positions": rng.integers(0, 500, rows).astype(np.int32),
                    "slot_mapping": slots,
                    "cos_sin": rotation_table(inv_freq, 500),
                    "q_norm": norms[0],
                    "k_norm": norms[1],
                    "kv": np.zeros(num_blocks * facts.block_bytes, np.uint8),
                    "kv_block_stride": facts.block_bytes,
                    "out": np.zeros((rows, num_heads * head_dim), act.numpy),
                },
                outputs=("out",),
            )


def _tolerance(facts: QkvRopeFacts) -> float:
    return 1e-6 if facts.act is DType.float32 else 4e-3


qkv_rope_write: Op[QkvRopeFacts] = Op("qkv_rope_write", _reference, _cases, _tolerance)
