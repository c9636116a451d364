"""Causal attention of new tokens over the paged KV cache, which already holds their own keys and values.

Prefill, decode and chunked prefill are one operation: request `r` brings the tokens
`query_start_loc[r] .. query_start_loc[r + 1]`, the last of which stands at position `seq_lens[r] - 1`; each
sees the positions up to its own. Query head `h` reads key head `h // (num_heads / num_kv_heads)`. The first
`num_decodes` requests bring one token each, which a device may serve in another way than the rest.

A row of the result never depends on the other rows of the call: not on batch mates, nor on how a prompt was
cut into chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pegainfer.ops.op import Case, Launcher, Op
from pegainfer.ops.rope import QkvRopeFacts, qkv_rope_write, reference_cache
from pegainfer.runtime.device import Device
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

__all__ = ["AttentionFacts", "KvContents", "paged_attention"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """Scores are `scale * q . k`. `kv_dtype` and `block_size` describe the cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    act: DType
    kv_dtype: DType
    block_size: int


@dataclass(frozen=True, slots=True)
class KvContents:
    """What the cache of a case holds, free of any layout: keys and values float32
    `[num_tokens, num_kv_heads, head_dim]` at slots int32 `[num_tokens]`. Every other byte is 0xFF, which is
    NaN in every floating point type.
    """

    keys: Array
    values: Array
    slots: Array
    num_blocks: int
    block_stride: int

    def for_reference(self, facts: AttentionFacts) -> Array:
        """The cache's bytes in the layout of the NumPy reference."""
        kv = np.full(self.num_blocks * self.block_stride, 0xFF, np.uint8)
        rope = self._rope_facts(facts, DType.float32)
        arguments = self._arguments(rope)
        qkv_rope_write.reference(rope, kv=kv, **arguments)
        return kv

    def for_device(
        self, facts: AttentionFacts, device: Device, *, provider: str, launcher: Launcher | None = None
    ) -> Tensor:
        """The cache as the `qkv_rope_write` of the provider of that name lays it out."""
        rope = self._rope_facts(facts, facts.act)
        factory = next(
            p.factory for p in qkv_rope_write.providers if p.name == provider and p.kind is device.kind
        )
        launch = factory(rope, device)
        if launch is None:
            raise ValueError(f"provider {provider} of qkv_rope_write does not serve {rope}")
        kv = device.from_numpy(np.full(self.num_blocks * self.block_stride, 0xFF, np.uint8))
        arguments = {
            name: device.from_numpy(value) if isinstance(value, np.ndarray) else value
            for name, value in self._arguments(rope).items()
        }
        launch(kv=kv, **arguments)
        device.stream.synchronize()
        return kv

    def _rope_facts(self, facts: AttentionFacts, act: DType) -> QkvRopeFacts:
        return QkvRopeFacts(
            num_heads=facts.num_heads,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            rotary_dim=facts.head_dim,
            qk_norm=False,
            eps=0.0,
            act=act,
            kv_dtype=facts.kv_dtype,
            block_size=facts.block_size,
        )

    def _arguments(self, facts: QkvRopeFacts) -> dict[str, Any]:
        """A write that rotates by nothing."""
        rows, half = len(self.slots), facts.head_dim // 2
        keys, values = self.keys.reshape(rows, -1), self.values.reshape(rows, -1)
        queries = np.zeros((rows, facts.num_heads * facts.head_dim), np.float32)
        return {
            "qkv": np.concatenate([queries, keys, values], axis=1).astype(facts.act.numpy),
            "positions": np.zeros(rows, np.int32),
            "slot_mapping": self.slots,
            "cos_sin": np.concatenate([np.ones((1, half)), np.zeros((1, half))], axis=1).astype(np.float32),
            "q_norm": None,
            "k_norm": None,
            "kv_block_stride": self.block_stride,
            "out": np.zeros_like(queries, facts.act.numpy),
        }


def _reference(
    facts: AttentionFacts,
    *,
    q: Array,
    kv: Array,
    kv_block_stride: int,
    block_tables: Array,
    query_start_loc: Array,
    seq_lens: Array,
    num_decodes: int,
    out: Array,
) -> None:
    keys, values = reference_cache(
        kv,
        kv_block_stride,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        block_size=facts.block_size,
        dtype=facts.kv_dtype,
    )
    for r, length in enumerate(seq_lens):
        start, stop = query_start_loc[r], query_start_loc[r + 1]
        blocks = block_tables[r, : -(-length // facts.block_size)]
        k, v = (
            np.moveaxis(cache[blocks], 1, 0)  # [num_kv_heads, num_blocks, block_size, head_dim]
            .reshape(facts.num_kv_heads, -1, facts.head_dim)[:, :length]
            .astype(np.float32)
            for cache in (keys, values)
        )
        positions = length - (stop - start) + np.arange(stop - start)
        hidden = np.arange(length) > positions[:, None]
        shape = (stop - start, facts.num_kv_heads, facts.num_heads // facts.num_kv_heads, facts.head_dim)
        # [num_kv_heads, group, tokens, head_dim]
        queries = np.moveaxis(q[start:stop].astype(np.float32).reshape(shape), 0, 2)
        scores = np.matmul(queries, k.swapaxes(1, 2)[:, None]) * np.float32(facts.scale)
        scores[..., hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        out[start:stop] = np.moveaxis(np.matmul(weights, v[:, None]), 2, 0).reshape(stop - start, -1)


def _cases(rng: np.random.Generator) -> Iterator[Case[AttentionFacts]]:
    shapes = (  # heads, kv heads, head_dim, block_size
        (9, 3, 64, 16),
        (16, 8, 128, 16),
        (14, 2, 64, 32),
        (3, 3, 48, 16),
        (8, 1, 256, 48),
    )
    requests = (  # (new tokens, length) of each request
        ((1, 1),),
        ((1, 300), (1, 17), (1, 128), (1, 129)),
        ((70, 70),),
        ((1, 40), (33, 200), (5, 5), (1, 16)),
        (*((1, 100 + 31 * index) for index in range(9)), (1, 16), (140, 300), (70, 70)),
        ((3, 1100), (20, 700), (2, 130)),  # few rows over many keys
        tuple((1, 1 + 9 * index) for index in range(20)),
    )
    for act, kv_dtype in (
        (DType.float32, DType.float32),
        (DType.float32, DType.float16),
        (DType.float32, DType.bfloat16),
        (DType.bfloat16, DType.bfloat16),
    ):
        for num_heads, num_kv_heads, head_dim, block_size in shapes:
            facts = AttentionFacts(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                scale=head_dim**-0.5,
                act=act,
                kv_dtype=kv_dtype,
                block_size=block_size,
            )
            for batch in requests:
                yield _case(facts, batch, rng)


def _case(
    facts: AttentionFacts, batch: tuple[tuple[int, int], ...], rng: np.random.Generator
) -> Case[AttentionFacts]:
    lengths = np.array([length for _, length in batch], np.int32)
    counts = -(-lengths // facts.block_size)
    num_blocks = int(counts.sum()) + 1
    free = rng.permutation(num_blocks)
    tables = np.full((len(batch), counts.max() + 1), -1, np.int32)
    slots: list[Array] = []
    for r, count in enumerate(counts):
        tables[r, :count], free = free[:count], free[count:]
        positions = np.arange(lengths[r])
        slots.append(
            tables[r, positions // facts.block_size] * facts.block_size + positions % facts.block_size
        )
    total, rows = int(lengths.sum()), sum(new for new, _ in batch)
    kv_shape = (total, facts.num_kv_heads, facts.head_dim)
    part = 2 * facts.num_kv_heads * facts.block_size * facts.head_dim * facts.kv_dtype.itemsize
    contents = KvContents(
        keys=rng.normal(0, 1, kv_shape).astype(np.float32),
        values=rng.normal(0, 1, kv_shape).astype(np.float32),
        slots=np.concatenate(slots).astype(np.int32),
        num_blocks=num_blocks,
        block_stride=2 * part,  # as if a second layer followed
    )
    width = facts.num_heads * facts.head_dim
    name = "+".join(f"{new}of{length}" for new, length in batch)
    return Case(
        name=f"{facts.act}-{facts.kv_dtype}-{facts.num_heads}/{facts.num_kv_heads}x{facts.head_dim}-{name}",
        facts=facts,
        arguments={
            "q": rng.normal(0, 2, (rows, width)).astype(facts.act.numpy),
            "kv": contents,
            "kv_block_stride": contents.block_stride,
            "block_tables": tables,
            "query_start_loc": np.cumsum([0, *(new for new, _ in batch)]).astype(np.int32),
            "seq_lens": lengths,
            "num_decodes": next((r for r, (new, _) in enumerate(batch) if new > 1), len(batch)),
            "out": np.zeros((rows, width), facts.act.numpy),
        },
        outputs=("out",),
    )


def _tolerance(facts: AttentionFacts) -> float:
    """Devices with bfloat16 dot products round queries and probabilities to the cache's type."""
    if facts.act is DType.float32 and facts.kv_dtype is not DType.bfloat16:
        return 3e-6
    return 1e-2


paged_attention: Op[AttentionFacts] = Op("paged_attention", _reference, _cases, _tolerance)
