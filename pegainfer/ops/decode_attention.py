"""Rotation, the write of keys and values, and attention in one, where each request has one new token: what a
device may fuse for decode.

`qkv_rope_write`, then `paged_attention` of its queries; a request without a slot (-1) writes nothing. A
provider's launcher has `max_requests`: with more the parts are launched one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.ops.attention import AttentionFacts, KvContents, paged_attention
from pegainfer.ops.op import Case, Op
from pegainfer.ops.rope import QkvRopeFacts, qkv_rope_write, rotation_table
from pegainfer.runtime.device import Device
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

__all__ = ["DecodeAttentionFacts", "decode_attention"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class DecodeAttentionFacts:
    """The facts of both parts, over the same heads and the same cache."""

    rope: QkvRopeFacts
    attention: AttentionFacts


def _reference(
    facts: DecodeAttentionFacts,
    *,
    qkv: Array,  # [num_requests, (num_heads + 2 * num_kv_heads) * head_dim]
    positions: Array,
    slot_mapping: Array,
    cos_sin: Array,
    q_norm: Array | None,
    k_norm: Array | None,
    kv: Array,
    kv_block_stride: int,
    block_tables: Array,
    seq_lens: Array,
    out: Array,  # [num_requests, num_heads * head_dim]
) -> None:
    queries = np.zeros(out.shape, np.float32)
    qkv_rope_write.reference(
        facts.rope,
        qkv=qkv,
        positions=positions,
        slot_mapping=slot_mapping,
        cos_sin=cos_sin,
        q_norm=q_norm,
        k_norm=k_norm,
        kv=kv,
        kv_block_stride=kv_block_stride,
        out=queries,
    )
    paged_attention.reference(
        facts.attention,
        q=queries,
        kv=kv,
        kv_block_stride=kv_block_stride,
        block_tables=block_tables,
        query_start_loc=np.arange(len(seq_lens) + 1),
        seq_lens=seq_lens,
        num_decodes=len(seq_lens),
        out=out,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _OlderKv:
    """The cache of a case: everything but what the step itself writes."""

    contents: KvContents

    def for_reference(self, facts: DecodeAttentionFacts) -> Array:
        """In the layout of the NumPy reference."""
        return self.contents.for_reference(facts.attention)

    def for_device(
        self, facts: DecodeAttentionFacts, device: Device, *, provider: str, launcher: Any
    ) -> Tensor:
        """As the device lays it out."""
        return self.contents.for_device(facts.attention, device, provider=provider)


def _cases(rng: np.random.Generator) -> Iterator[Case[DecodeAttentionFacts]]:
    shapes = (  # heads, kv heads, head_dim, block_size, norm of heads
        (16, 8, 128, 16, True),
        (14, 2, 64, 32, False),
        (8, 1, 256, 48, True),
        (32, 8, 128, 32, True),
    )
    batches = ((2,), (300, 1, 128, 129), (1100,), tuple(1 + 9 * index for index in range(20)))
    for num_heads, num_kv_heads, head_dim, block_size, qk_norm in shapes:
        attention = AttentionFacts(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            act=DType.bfloat16,
            kv_dtype=DType.bfloat16,
            block_size=block_size,
        )
        rope = QkvRopeFacts(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rotary_dim=head_dim,
            qk_norm=qk_norm,
            eps=1e-6,
            act=DType.bfloat16,
            kv_dtype=DType.bfloat16,
            block_size=block_size,
        )
        for lengths in batches:
            yield _case(DecodeAttentionFacts(rope, attention), np.array(lengths, np.int32), rng)


def _case(
    facts: DecodeAttentionFacts, lengths: Array, rng: np.random.Generator
) -> Case[DecodeAttentionFacts]:
    attention = facts.attention
    size, head_dim = attention.block_size, attention.head_dim
    counts = -(-lengths // size)
    tables = np.full((len(lengths), counts.max() + 1), -1, np.int32)
    free = rng.permutation(int(counts.sum()) + 1)
    slots: list[Array] = []
    for r, count in enumerate(counts):
        tables[r, :count], free = free[:count], free[count:]
        positions = np.arange(lengths[r])
        slots.append((tables[r, positions // size] * size + positions % size).astype(np.int32))
    older = np.concatenate([of_request[:-1] for of_request in slots])
    kv_shape = (len(older), attention.num_kv_heads, head_dim)
    contents = KvContents(
        keys=rng.normal(0, 1, kv_shape).astype(np.float32),
        values=rng.normal(0, 1, kv_shape).astype(np.float32),
        slots=older,
        num_blocks=int(counts.sum()) + 1,
        block_stride=2 * facts.rope.block_bytes,  # as if a second layer followed
    )
    width = (attention.num_heads + 2 * attention.num_kv_heads) * head_dim
    inv_freq = 1e4 ** (-np.arange(head_dim // 2) / (head_dim // 2))
    norms = [rng.normal(1, 0.3, head_dim).astype(np.float32) if facts.rope.qk_norm else None for _ in "qk"]
    sizes = f"{attention.num_heads}/{attention.num_kv_heads}x{head_dim}"
    return Case(
        name=f"{sizes}-{'+'.join(map(str, lengths))}",
        facts=facts,
        arguments={
            "qkv": rng.normal(0, 1, (len(lengths), width)).astype(attention.act.numpy),
            "positions": lengths - 1,
            "slot_mapping": np.array([of_request[-1] for of_request in slots], np.int32),
            "cos_sin": rotation_table(inv_freq, int(lengths.max())),
            "q_norm": norms[0],
            "k_norm": norms[1],
            "kv": _OlderKv(contents),
            "kv_block_stride": contents.block_stride,
            "block_tables": tables,
            "seq_lens": lengths,
            "out": np.zeros((len(lengths), attention.num_heads * head_dim), attention.act.numpy),
        },
        outputs=("out",),
    )


def _tolerance(facts: DecodeAttentionFacts) -> float:
    return paged_attention.tolerance(facts.attention)


decode_attention: Op[DecodeAttentionFacts] = Op("decode_attention", _reference, _cases, _tolerance)
