"""RMSNorm with a plain weight."""

from __future__ import annotations

from pegainfer.layers.parameters import BuildContext
from pegainfer.ops.norm import RmsNormFacts, rms_norm
from pegainfer.ops.op import bind
from pegainfer.runtime.tensor import Tensor

__all__ = ["RmsNorm"]


class RmsNorm:
    """`out = x / sqrt(mean(x^2) + eps) * weight` over the last dimension."""

    def __init__(self, context: BuildContext, name: str, *, size: int, eps: float) -> None:
        self.eps = eps
        self.weight = context.table.vector([f"{name}.weight"], [size])
        self._launch = bind(rms_norm, RmsNormFacts(size, eps, context.act), context.device)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """`x` and `out` `[T, size]`."""
        self._launch(x=x, weight=self.weight.tensor, out=out)
