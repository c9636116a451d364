"""What a layer takes from the step arena, described once for both planning and running."""

from __future__ import annotations

from dataclasses import dataclass

from pegainfer.runtime.arena import ALIGNMENT, Arena
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

__all__ = ["RowScratch"]


@dataclass(frozen=True, slots=True)
class RowScratch:
    """Several `[num_rows, width]` tensors: one `(width, dtype)` each."""

    columns: tuple[tuple[int, DType], ...]

    def take(self, arena: Arena, num_rows: int) -> list[Tensor]:
        """The tensors, uninitialised, until the enclosing arena scope ends."""
        return [arena.empty((num_rows, width), dtype) for width, dtype in self.columns]

    def nbytes(self, num_rows: int) -> int:
        """Arena bytes that `take` uses."""
        return sum(
            -(-num_rows * width * dtype.itemsize // ALIGNMENT) * ALIGNMENT for width, dtype in self.columns
        )
