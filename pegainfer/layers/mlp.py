"""The gated feed-forward layer, and what every feed-forward layer looks like to a decoder."""

from __future__ import annotations

from typing import Protocol

from pegainfer.layers.linear import Linear, Piece
from pegainfer.layers.norm import RmsNorm
from pegainfer.layers.normed_linear import NormedLinear
from pegainfer.layers.parameters import BuildContext
from pegainfer.layers.scratch import RowScratch
from pegainfer.runtime.arena import Arena
from pegainfer.runtime.tensor import Tensor

__all__ = ["FeedForward", "Mlp"]


class FeedForward(Protocol):
    """Anything that adds a function of the normalised residual stream to it, token by token."""

    def __call__(self, residual: Tensor, normed: Tensor, arena: Arena) -> None:
        """`residual += f(norm(residual))`; `normed` is scratch; both `[T, hidden_size]`."""
        ...

    def arena_bytes(self, num_tokens: int) -> int:
        """Arena memory of a call."""
        ...


class Mlp:
    """`residual += down(silu(gate(x)) * up(x))` with `x = norm(residual)`."""

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        norm: RmsNorm,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
    ) -> None:
        gate_up = Linear(
            context,
            [Piece(f"{name}.{part}", intermediate_size) for part in ("gate_proj", "up_proj")],
            in_features=hidden_size,
            bias=bias,
        )
        self._gated = NormedLinear(context, norm, gate_up, gated=True)
        self._down = Linear(
            context,
            [Piece(f"{name}.down_proj", hidden_size)],
            in_features=intermediate_size,
            bias=bias,
            accumulate=True,
        )
        self._scratch = RowScratch(((2 * intermediate_size, context.act), (intermediate_size, context.act)))

    def __call__(self, residual: Tensor, normed: Tensor, arena: Arena) -> None:
        """See `FeedForward`."""
        with arena.scope():
            gate_up, hidden = self._scratch.take(arena, residual.shape[0])
            self._gated(residual, hidden, normed=normed, wide=gate_up)
            self._down(hidden, residual)

    def arena_bytes(self, num_tokens: int) -> int:
        """See `FeedForward`."""
        return self._scratch.nbytes(num_tokens)
