"""Self-attention with grouped heads over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from pegainfer.kvcache.spec import FullAttention
from pegainfer.layers.linear import Linear, Piece
from pegainfer.layers.norm import RmsNorm
from pegainfer.layers.normed_linear import NormedLinear
from pegainfer.layers.parameters import BuildContext, Parameter
from pegainfer.layers.rotary import RotaryEmbedding
from pegainfer.layers.scratch import RowScratch
from pegainfer.ops.attention import AttentionFacts, paged_attention
from pegainfer.ops.decode_attention import DecodeAttentionFacts, decode_attention
from pegainfer.ops.gather import GatherRowsFacts, gather_rows
from pegainfer.ops.op import bind, bind_fused
from pegainfer.ops.rope import QkvRopeFacts, qkv_rope_write
from pegainfer.runtime.arena import Arena
from pegainfer.runtime.tensor import Tensor

__all__ = ["AttentionInputs", "AttentionSizes", "PagedKv", "SelfAttention"]


class AttentionInputs(Protocol):
    """What attention reads of a step: the fields of `ForwardBatch` that it needs."""

    @property
    def positions(self) -> Tensor: ...

    @property
    def slot_mapping(self) -> Tensor: ...

    @property
    def query_start_loc(self) -> Tensor: ...

    @property
    def seq_lens(self) -> Tensor: ...

    @property
    def block_tables(self) -> Tensor: ...

    @property
    def one_each(self) -> Tensor: ...

    @property
    def num_decodes(self) -> int: ...

    @property
    def arena(self) -> Arena: ...


class PagedKv(Protocol):
    """One layer's part of the cache: `LayerKv`."""

    @property
    def memory(self) -> Tensor: ...

    @property
    def block_stride(self) -> int: ...


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Sizes of one layer. `qk_norm_eps` is set where queries and keys are normalised per head."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm_eps: float | None = None


class SelfAttention:
    """`residual += o(attention(rope(norm(q(x))), rope(norm(k(x))), v(x)))` with `x = norm(residual)`; causal,
    scale `head_dim^-0.5`.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        sizes: AttentionSizes,
        *,
        norm: RmsNorm,
        rotary: RotaryEmbedding,
    ) -> None:
        heads, kv_heads, head_dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
        self.kv_spec = FullAttention(kv_heads, head_dim, context.kv_dtype)
        self._rotary = rotary
        qkv = Linear(
            context,
            [
                Piece(f"{name}.q_proj", heads * head_dim),
                Piece(f"{name}.k_proj", kv_heads * head_dim),
                Piece(f"{name}.v_proj", kv_heads * head_dim),
            ],
            in_features=sizes.hidden_size,
            bias=sizes.qkv_bias,
        )
        self._qkv = NormedLinear(context, norm, qkv)
        self._q_norm: Parameter | None = None
        self._k_norm: Parameter | None = None
        if sizes.qk_norm_eps is not None:
            self._q_norm = context.table.vector([f"{name}.q_norm.weight"], [head_dim])
            self._k_norm = context.table.vector([f"{name}.k_norm.weight"], [head_dim])
        rope_facts = QkvRopeFacts(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rotary_dim=rotary.rotary_dim,
            qk_norm=sizes.qk_norm_eps is not None,
            eps=sizes.qk_norm_eps or 0.0,
            act=context.act,
            kv_dtype=context.kv_dtype,
            block_size=context.block_size,
        )
        facts = AttentionFacts(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            act=context.act,
            kv_dtype=context.kv_dtype,
            block_size=context.block_size,
        )
        self._rope = bind(qkv_rope_write, rope_facts, context.device)
        self._attention = bind(paged_attention, facts, context.device)
        self._decode: Any = bind_fused(
            decode_attention, DecodeAttentionFacts(rope_facts, facts), context.device
        )
        self._output = Linear(
            context,
            [Piece(f"{name}.o_proj", sizes.hidden_size)],
            in_features=heads * head_dim,
            bias=sizes.output_bias,
            accumulate=True,
        )
        width = heads * head_dim
        self._gather_queries, self._gather_residual = (
            bind(gather_rows, GatherRowsFacts(size, context.act), context.device)
            for size in (width, sizes.hidden_size)
        )
        self._scratch = RowScratch(
            ((width + 2 * kv_heads * head_dim, context.act), (width, context.act), (width, context.act))
        )

    def __call__(self, residual: Tensor, normed: Tensor, inputs: AttentionInputs, kv: PagedKv) -> None:
        """`residual` and, as scratch, `normed` are `[T, hidden_size]`; this step's keys and values go to `kv`
        first.
        """
        rows = residual.shape[0]
        with inputs.arena.scope():
            qkv, queries, mixed = self._scratch.take(inputs.arena, rows)
            self._qkv(residual, qkv, normed=normed)
            if self._decode is not None and inputs.num_decodes == rows <= self._decode.max_requests:
                self._decode(
                    **self._rope_arguments(qkv, inputs, kv),
                    block_tables=inputs.block_tables,
                    seq_lens=inputs.seq_lens,
                    out=mixed,
                )
            else:
                self._rope(**self._rope_arguments(qkv, inputs, kv), out=queries)
                starts, num_decodes = inputs.query_start_loc, inputs.num_decodes
                self._attend(queries, mixed, inputs, kv, query_start_loc=starts, num_decodes=num_decodes)
            self._output(mixed, residual)

    def last_tokens(
        self, residual: Tensor, normed: Tensor, inputs: AttentionInputs, kv: PagedKv, last_rows: Tensor
    ) -> None:
        """The same where only the last token of each request is wanted, row `last_rows[r]`: afterwards the
        residual stream of request `r` is row `r` of `normed`, and `residual` is scratch. All keys and values
        go to `kv`.
        """
        num_requests = last_rows.shape[0]
        with inputs.arena.scope():
            qkv, queries, mixed = self._scratch.take(inputs.arena, residual.shape[0])
            self._qkv(residual, qkv, normed=normed)
            self._rope(**self._rope_arguments(qkv, inputs, kv), out=queries)
            stream, last, attended = (tensor.rows(num_requests) for tensor in (normed, mixed, queries))
            self._gather_residual(x=residual, indices=last_rows, out=stream)
            self._gather_queries(x=queries, indices=last_rows, out=last)
            starts = inputs.one_each
            self._attend(last, attended, inputs, kv, query_start_loc=starts, num_decodes=num_requests)
            self._output(attended, stream)

    def _rope_arguments(self, qkv: Tensor, inputs: AttentionInputs, kv: PagedKv) -> dict[str, Any]:
        return {
            "qkv": qkv,
            "positions": inputs.positions,
            "slot_mapping": inputs.slot_mapping,
            "cos_sin": self._rotary.cos_sin,
            "q_norm": self._q_norm.tensor if self._q_norm is not None else None,
            "k_norm": self._k_norm.tensor if self._k_norm is not None else None,
            "kv": kv.memory,
            "kv_block_stride": kv.block_stride,
        }

    def _attend(
        self,
        queries: Tensor,
        out: Tensor,
        inputs: AttentionInputs,
        kv: PagedKv,
        *,
        query_start_loc: Tensor,
        num_decodes: int,
    ) -> None:
        self._attention(
            q=queries,
            kv=kv.memory,
            kv_block_stride=kv.block_stride,
            block_tables=inputs.block_tables,
            query_start_loc=query_start_loc,
            seq_lens=inputs.seq_lens,
            num_decodes=num_decodes,
            out=out,
        )

    def arena_bytes(self, num_tokens: int) -> int:
        """Arena memory of a call."""
        return self._scratch.nbytes(num_tokens)
