"""Routed experts: a router that picks a few of many feed-forward layers for each token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

from pegainfer.layers.linear import Linear, Piece
from pegainfer.layers.norm import RmsNorm
from pegainfer.layers.parameters import BuildContext, Parameter, common_format, when_complete
from pegainfer.layers.scratch import RowScratch
from pegainfer.ops.moe import MoeExpertsFacts, MoeRouterFacts, moe_experts, moe_router
from pegainfer.ops.op import bind
from pegainfer.ops.raw_weight import RawWeight, stack
from pegainfer.runtime.arena import Arena
from pegainfer.runtime.dtypes import DType, WeightFormat
from pegainfer.runtime.tensor import Tensor

__all__ = ["MoeSizes", "RoutedExperts"]


@dataclass(frozen=True, slots=True)
class MoeSizes:
    """Sizes and the routing rule of one layer; `renormalize` divides the chosen weights by their sum."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    renormalize: bool


class RoutedExperts:
    """`residual += sum_j w_j * expert_j(x)` over the `top_k` experts with the largest softmax weights.

    Takes `<name>.gate.weight` and `<name>.experts.<e>.{gate,up,down}_proj.weight`. All experts of a layer are
    kept in one format.
    """

    def __init__(self, context: BuildContext, name: str, sizes: MoeSizes, *, norm: RmsNorm) -> None:
        self._norm = norm
        self._gate = Linear(
            context, [Piece(f"{name}.gate", sizes.num_experts)], in_features=sizes.hidden_size
        )
        self._route = bind(
            moe_router,
            MoeRouterFacts(sizes.num_experts, sizes.top_k, sizes.renormalize, context.act),
            context.device,
        )
        prefixes = [f"{name}.experts.{expert}" for expert in range(sizes.num_experts)]
        format = common_format(
            [
                context.table.format_of(f"{prefix}.{part}_proj.weight")
                for prefix in prefixes
                for part in ("gate", "up", "down")
            ]
        )
        facts = MoeExpertsFacts(
            num_experts=sizes.num_experts,
            top_k=sizes.top_k,
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.intermediate_size,
            format=format,
            act=context.act,
        )
        self._experts = cast(_ExpertsLauncher, bind(moe_experts, facts, context.device))
        self._weights = _ExpertWeights(context, self._experts, prefixes, sizes, format)
        self._scratch = RowScratch(
            ((sizes.num_experts, context.act), (sizes.top_k, DType.int32), (sizes.top_k, DType.float32))
        )

    def __call__(self, residual: Tensor, normed: Tensor, arena: Arena) -> None:
        """See `FeedForward`."""
        with arena.scope():
            logits, ids, weights = self._scratch.take(arena, residual.shape[0])
            self._norm(residual, normed)
            self._gate(normed, logits)
            self._route(logits=logits, topk_ids=ids, topk_weights=weights)
            self._experts(
                x=normed,
                gate_up=self._weights.gate_up.tensor,
                down=self._weights.down.tensor,
                topk_ids=ids,
                topk_weights=weights,
                out=residual,
            )

    def arena_bytes(self, num_tokens: int) -> int:
        """See `FeedForward`."""
        return self._scratch.nbytes(num_tokens)


class _ExpertsLauncher(Protocol):
    """A bound `moe_experts`, which packs its own weights."""

    def __call__(self, **arguments: Any) -> None: ...

    def gate_up_bytes(self) -> int: ...

    def down_bytes(self) -> int: ...

    def pack_expert(
        self, expert: int, gate_up_raw: RawWeight, down_raw: RawWeight, gate_up: Tensor, down: Tensor
    ) -> None: ...


class _ExpertWeights:
    """Two packed weights that hold all experts, filled expert by expert as their tensors arrive."""

    def __init__(
        self,
        context: BuildContext,
        launch: _ExpertsLauncher,
        prefixes: list[str],
        sizes: MoeSizes,
        format: WeightFormat,
    ) -> None:
        self._device = context.device
        self._launch = launch
        self.gate_up = Parameter()
        self.down = Parameter()
        context.table.nbytes += launch.gate_up_bytes() + launch.down_bytes()
        up_shape = (sizes.intermediate_size, sizes.hidden_size)
        shapes = {"gate": up_shape, "up": up_shape, "down": up_shape[::-1]}
        for expert, prefix in enumerate(prefixes):
            acceptors = when_complete(3, partial(self._pack, expert))
            for (part, shape), accept in zip(shapes.items(), acceptors, strict=True):
                context.table.declare(f"{prefix}.{part}_proj.weight", shape, format=format, accept=accept)

    def _pack(self, expert: int, parts: list[RawWeight]) -> None:
        if not self.gate_up.is_loaded:
            self.gate_up.set(self._device.empty((self._launch.gate_up_bytes(),), DType.uint8))
            self.down.set(self._device.empty((self._launch.down_bytes(),), DType.uint8))
        gate, up, down = parts
        self._launch.pack_expert(expert, stack([gate, up]), down, self.gate_up.tensor, self.down.tensor)
