"""The decoder that the llama and Qwen families share: embedding, layers of attention and feed-forward, head.

A family composes it with flags; what differs beyond flags is given as a feed-forward factory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pegainfer.kvcache.spec import FullAttention
from pegainfer.layers.attention import AttentionSizes, SelfAttention
from pegainfer.layers.embedding import Embedding, LmHead
from pegainfer.layers.mlp import FeedForward, Mlp
from pegainfer.layers.norm import RmsNorm
from pegainfer.layers.normed_linear import NormedLinear
from pegainfer.layers.parameters import BuildContext, ParameterTable
from pegainfer.layers.rotary import RotaryEmbedding
from pegainfer.layers.scratch import RowScratch
from pegainfer.models.base import ForwardBatch
from pegainfer.models.config import ModelConfig
from pegainfer.ops.gather import GatherRowsFacts, gather_rows
from pegainfer.ops.op import bind
from pegainfer.runtime.arena import Arena
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

__all__ = ["Decoder", "FeedForwardFactory", "dense_feed_forward"]

FeedForwardFactory = Callable[[BuildContext, ModelConfig, int, str, RmsNorm], FeedForward]
"""Makes the feed-forward of a layer: context, config, layer number, checkpoint prefix, the norm before it."""


def dense_feed_forward(
    context: BuildContext, config: ModelConfig, layer: int, name: str, norm: RmsNorm
) -> FeedForward:
    """The gated feed-forward that most layers have."""
    return Mlp(
        context,
        name,
        norm=norm,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        bias=config.mlp_bias,
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    attention: SelfAttention
    feed_forward: FeedForward


class Decoder:
    """A pre-norm decoder; implements `Model`."""

    def __init__(
        self,
        config: ModelConfig,
        context: BuildContext,
        *,
        qkv_bias: bool,
        output_bias: bool,
        qk_norm: bool,
        feed_forward: FeedForwardFactory = dense_feed_forward,
    ) -> None:
        self.config = config
        self._table = context.table
        self._rotary = RotaryEmbedding(context.device, config.rope)
        size, eps = config.hidden_size, config.rms_norm_eps
        tied = config.tie_word_embeddings
        head_name = "model.embed_tokens" if tied else "lm_head"
        self._head = LmHead(context, head_name, vocab_size=config.vocab_size, hidden_size=size)
        self._embedding = Embedding(
            context,
            "model.embed_tokens",
            vocab_size=config.vocab_size,
            hidden_size=size,
            head=self._head if tied else None,
        )
        attention = AttentionSizes(
            hidden_size=size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            qk_norm_eps=eps if qk_norm else None,
        )
        self._layers: list[_Layer] = []
        for index in range(config.num_hidden_layers):
            name = f"model.layers.{index}"
            before, after = (
                RmsNorm(context, f"{name}.{norm}", size=size, eps=eps)
                for norm in ("input_layernorm", "post_attention_layernorm")
            )
            self._layers.append(
                _Layer(
                    SelfAttention(context, f"{name}.self_attn", attention, norm=before, rotary=self._rotary),
                    feed_forward(context, config, index, f"{name}.mlp", after),
                )
            )
        norm = RmsNorm(context, "model.norm", size=size, eps=eps)
        self._normed_head = NormedLinear(context, norm, self._head.linear)
        self._gather = bind(gather_rows, GatherRowsFacts(size, context.act), context.device)
        self._stream = RowScratch(((size, context.act), (size, context.act)))
        self._head_scratch = RowScratch(
            ((size, context.act), (size, context.act), (config.vocab_size, DType.float32))
        )

    @property
    def vocab_size(self) -> int:
        """See `Model`."""
        return self.config.vocab_size

    @property
    def kv_specs(self) -> tuple[FullAttention, ...]:
        """See `Model`."""
        return tuple(layer.attention.kv_spec for layer in self._layers)

    @property
    def parameters(self) -> ParameterTable:
        """See `Model`."""
        return self._table

    @property
    def num_parameters(self) -> int:
        """See `Model`."""
        return self._table.num_parameters

    @property
    def weight_bytes(self) -> int:
        """See `Model`."""
        return self._table.nbytes

    @property
    def bytes_per_position(self) -> int:
        """See `Model`."""
        return self._rotary.bytes_per_position

    def prepare(self, max_positions: int) -> None:
        """See `Model`."""
        self._rotary.prepare(max_positions)

    def forward_bytes(self, num_tokens: int) -> int:
        """See `Model`."""
        in_layer = max(
            max(layer.attention.arena_bytes(num_tokens), layer.feed_forward.arena_bytes(num_tokens))
            for layer in self._layers
        )
        return self._stream.nbytes(num_tokens) + in_layer

    def logits_bytes(self, num_rows: int) -> int:
        """See `Model`."""
        return self._head_scratch.nbytes(num_rows)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """See `Model`."""
        arena = batch.arena
        hidden, normed = self._stream.take(arena, batch.num_tokens)
        self._embedding(batch.token_ids, hidden)
        *others, last = zip(self._layers, batch.kv, strict=True)
        for layer, kv in others:
            layer.attention(hidden, normed, batch, kv)
            layer.feed_forward(hidden, normed, arena)
        layer, kv = last
        if batch.last_rows is None:
            layer.attention(hidden, normed, batch, kv)
        else:
            rows = batch.num_requests
            layer.attention.last_tokens(hidden, normed, batch, kv, batch.last_rows)
            hidden, normed = normed.rows(rows), hidden.rows(rows)
        layer.feed_forward(hidden, normed, arena)
        return hidden

    def compute_logits(self, hidden: Tensor, indices: Tensor, arena: Arena) -> Tensor:
        """See `Model`."""
        rows, normed, logits = self._head_scratch.take(arena, indices.shape[0])
        self._gather(x=hidden, indices=indices, out=rows)
        self._normed_head(rows, logits, normed=normed)
        return logits
