"""A linear layer behind an RMSNorm, with its gate where it has one: one launch where the device can."""

from __future__ import annotations

from typing import Any

from pegainfer.layers.linear import Linear
from pegainfer.layers.norm import RmsNorm
from pegainfer.layers.parameters import BuildContext
from pegainfer.ops.activation import SiluAndMulFacts, silu_and_mul
from pegainfer.ops.norm_linear import NormLinearFacts, norm_linear
from pegainfer.ops.op import Launcher, bind, bind_fused
from pegainfer.runtime.tensor import Tensor

__all__ = ["NormedLinear"]


class NormedLinear:
    """`out = linear(norm(x))`; with `gated`, of a linear of gate and up, `out = silu(gate) * up`."""

    def __init__(self, context: BuildContext, norm: RmsNorm, linear: Linear, *, gated: bool = False) -> None:
        self._norm = norm
        self._linear = linear
        self._activation: Launcher | None = None
        width = linear.out_features
        if gated:
            width //= 2
            self._activation = bind(silu_and_mul, SiluAndMulFacts(width, context.act), context.device)
        self._fused: Any = None
        whole = linear.whole
        if whole is not None:
            facts = NormLinearFacts(
                linear.in_features,
                width,
                whole.format,
                context.act,
                norm.eps,
                has_bias=whole.has_bias,
                gated=gated,
                out=whole.out,
            )
            self._fused = bind_fused(norm_linear, facts, context.device)

    def __call__(self, x: Tensor, out: Tensor, *, normed: Tensor, wide: Tensor | None = None) -> None:
        """`x` `[T, in_features]`; `normed` (like `x`) and, when gated, `wide` (like the linear's output) are
        scratch.
        """
        if self._fused is not None and self._fused.serves(x.shape[0]):
            bias = self._linear.packed_bias
            self._fused(
                x=x,
                norm=self._norm.weight.tensor,
                weight=self._linear.packed_weight.tensor,
                bias=None if bias is None else bias.tensor,
                normed=normed,
                out=out,
            )
            return
        self._norm(x, normed)
        if self._activation is None:
            self._linear(normed, out)
            return
        assert wide is not None
        self._linear(normed, wide)
        self._activation(gate_up=wide, out=out)
