"""The step arena: one block of memory from which the outputs of a step's ops are cut.

Planned once with the largest step, so pointers are the same every time a step of the same size runs: that is
what lets a graph replay a forward. Scopes give back what a layer took, so the peak is that of one layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pegainfer.errors import CapacityError
from pegainfer.runtime.device import Device
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

__all__ = ["ALIGNMENT", "Arena"]

ALIGNMENT = 256  # bytes; enough for TMA and for any vector load


class Arena:
    """A bump allocator over `nbytes` of device memory. `high_water` is the most that was ever in use."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._memory = device.empty((max(nbytes, ALIGNMENT),), DType.uint8)
        self._used = 0
        self.high_water = 0

    @property
    def nbytes(self) -> int:
        """Size of the arena."""
        return self._memory.nbytes

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Uninitialised memory until the enclosing scope ends; raises `CapacityError` when the arena is too
        small.
        """
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        count = 1
        for size in shape:
            count *= size
        end = start + count * dtype.itemsize
        if end > self._memory.nbytes:
            raise CapacityError(
                f"step arena of {self._memory.nbytes} bytes is too small: {end} bytes are needed"
            )
        self._used = end
        self.high_water = max(self.high_water, end)
        return Tensor(self._memory.storage, dtype, shape, offset=start // dtype.itemsize)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Give back on exit everything that was taken inside."""
        used = self._used
        try:
            yield
        finally:
            self._used = used

    def reset(self) -> None:
        """Give everything back; called at the start of a step."""
        self._used = 0
