"""Token embedding and language-model head, which may share one weight."""

from __future__ import annotations

from typing import Any, Protocol, cast

from pegainfer.layers.linear import Linear, Piece
from pegainfer.layers.parameters import BuildContext
from pegainfer.ops.embedding import EmbeddingFacts, embedding
from pegainfer.ops.op import bind
from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

__all__ = ["Embedding", "LmHead"]


class LmHead:
    """Logits of hidden states: float32 `[rows, vocab_size]`."""

    def __init__(self, context: BuildContext, name: str, *, vocab_size: int, hidden_size: int) -> None:
        piece = Piece(name, vocab_size)
        self.linear = Linear(context, [piece], in_features=hidden_size, out=DType.float32)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """`x` `[rows, hidden_size]`."""
        self.linear(x, out)


class _EmbeddingLauncher(Protocol):
    """A bound `embedding`, which packs a table of its own."""

    def __call__(self, **arguments: Any) -> None: ...

    def packed_bytes(self) -> int: ...

    def pack(self, raw: RawWeight) -> Tensor: ...


class Embedding:
    """Rows of a table by token id. With `head`, its packed weight is the table (a tied checkpoint)."""

    def __init__(
        self, context: BuildContext, name: str, *, vocab_size: int, hidden_size: int, head: LmHead | None
    ) -> None:
        weight_name = f"{name}.weight"
        format = context.table.format_of(weight_name)
        tied = head is not None
        facts = EmbeddingFacts(vocab_size, hidden_size, format, context.act, tied)
        self._launch = cast(_EmbeddingLauncher, bind(embedding, facts, context.device))
        if head is not None:
            self._weight = head.linear.packed_weight
            return
        self._weight = context.table.matrix(
            [weight_name],
            [vocab_size],
            hidden_size,
            format=format,
            pack=self._launch.pack,
            nbytes=self._launch.packed_bytes(),
        )

    def __call__(self, token_ids: Tensor, out: Tensor) -> None:
        """`token_ids` int32 `[T]`, `out` `[T, hidden_size]`."""
        self._launch(token_ids=token_ids, weight=self._weight.tensor, out=out)
