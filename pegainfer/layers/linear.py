"""Linear layers: several checkpoint matrices over the same input become one multiplication where possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol, cast

from pegainfer.layers.parameters import BuildContext, Parameter
from pegainfer.ops.linear import LinearFacts, linear
from pegainfer.ops.op import bind
from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.dtypes import FP8_BLOCK, DType, WeightFormat
from pegainfer.runtime.tensor import Tensor

__all__ = ["Linear", "Piece"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a linear layer: the checkpoint prefix (without `.weight`) and its number of outputs."""

    name: str
    out_features: int


class _LinearLauncher(Protocol):
    """A bound `linear`, which packs its own weights."""

    def __call__(self, **arguments: Any) -> None: ...

    def packed_bytes(self) -> int: ...

    def pack(self, *parts: RawWeight) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class _Group:
    """Neighbouring pieces of one format: one packed weight, one launch, columns `[start, stop)` of the
    output.
    """

    facts: LinearFacts
    launch: _LinearLauncher
    weight: Parameter
    bias: Parameter | None
    start: int
    stop: int


class Linear:
    """`out = x W^T + b`, or `out += ...` with `accumulate`.

    The outputs of the pieces stand side by side. A checkpoint may store them in different formats; then each
    run of equal formats is a launch of its own, and so is an fp8 piece whose rows are no whole blocks. `out`
    names an element type of the result other than that of activations.
    """

    def __init__(
        self,
        context: BuildContext,
        pieces: Sequence[Piece],
        *,
        in_features: int,
        bias: bool = False,
        accumulate: bool = False,
        out: DType | None = None,
    ) -> None:
        self.in_features = in_features
        self.out_features = sum(piece.out_features for piece in pieces)
        self._groups: list[_Group] = []
        start = 0

        def kind_of(piece: Piece) -> tuple[WeightFormat, str]:
            format = context.table.format_of(f"{piece.name}.weight")
            cuts = format is WeightFormat.fp8 and piece.out_features % FP8_BLOCK != 0
            return format, piece.name if cuts else ""

        for (format, _), members in groupby(pieces, kind_of):
            group = list(members)
            stop = start + sum(piece.out_features for piece in group)
            facts = LinearFacts(in_features, stop - start, format, context.act, bias, accumulate, out)
            self._groups.append(_make_group(context, group, facts, start=start))
            start = stop

    @property
    def packed_weight(self) -> Parameter:
        """The weight of a layer of one piece, for whoever shares it (a tied embedding)."""
        assert len(self._groups) == 1
        return self._groups[0].weight

    @property
    def packed_bias(self) -> Parameter | None:
        """The bias that belongs to `packed_weight`."""
        return self._groups[0].bias

    @property
    def whole(self) -> LinearFacts | None:
        """The multiplication, if it is a single one."""
        return self._groups[0].facts if len(self._groups) == 1 else None

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """`x` `[T, in_features]`, `out` `[T, out_features]`."""
        whole = len(self._groups) == 1
        for group in self._groups:
            group.launch(
                x=x,
                weight=group.weight.tensor,
                bias=group.bias.tensor if group.bias is not None else None,
                out=out if whole else out.slice(1, group.start, group.stop),
            )


def _make_group(context: BuildContext, pieces: list[Piece], facts: LinearFacts, *, start: int) -> _Group:
    sizes = [piece.out_features for piece in pieces]
    launch = cast(_LinearLauncher, bind(linear, facts, context.device))
    weight = context.table.matrix(
        [f"{piece.name}.weight" for piece in pieces],
        sizes,
        facts.in_features,
        format=facts.format,
        pack=launch.pack,
        nbytes=launch.packed_bytes(),
    )
    bias = context.table.vector([f"{piece.name}.bias" for piece in pieces], sizes) if facts.has_bias else None
    return _Group(facts, launch, weight, bias, start, start + facts.out_features)
