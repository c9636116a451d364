"""Staging: the inputs of a step, written by the host where the device reads them, at addresses that never
change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pegainfer.runtime.device import Device
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

__all__ = ["StagingBuffer"]

_ALIGNMENT = 64


class StagingBuffer:
    """One piece of memory cut into named arrays: `host[name]` to write, `tensors[name]` to read.

    Arrays lie in the order of `fields`; `upload` copies up to the used end of the last one.
    """

    def __init__(self, device: Device, fields: Mapping[str, tuple[tuple[int, ...], DType]]) -> None:
        self.nbytes = self.nbytes_of(fields)
        self._mirror = device.mirror(self.nbytes)
        memory, written = self._mirror.tensor, self._mirror.host
        self.tensors: dict[str, Tensor] = {}
        self.host: dict[str, np.ndarray[Any, Any]] = {}
        start = 0
        for name, (shape, dtype) in fields.items():
            self.tensors[name] = Tensor(memory.storage, dtype, shape, offset=start // dtype.itemsize)
            self.host[name] = np.ndarray(shape, dtype.numpy, buffer=written.data, offset=start)
            self._last = start
            self._row_bytes = math.prod(shape[1:]) * dtype.itemsize
            start += _aligned(math.prod(shape) * dtype.itemsize)

    def upload(self, rows: int) -> None:
        """Enqueue the copy to the device: all arrays, of the last one only the first `rows` rows."""
        self._mirror.upload(self._last + rows * self._row_bytes)

    @staticmethod
    def nbytes_of(fields: Mapping[str, tuple[tuple[int, ...], DType]]) -> int:
        """Bytes that a buffer of these fields takes."""
        return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in fields.values())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
