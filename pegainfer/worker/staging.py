"""Staging: the inputs of a step, written by the host where the device reads them, at addresses that never
change. With several steps in flight the host writes one set of arrays while another is still to be read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from pegainfer.runtime.device import Device
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

__all__ = ["RaggedStaging", "StagingBuffer"]

_ALIGNMENT = 64
_SMALLEST = 4096


class StagingBuffer:
    """One piece of memory cut into named arrays: `host[name]` to write, `tensors[name]` to read.

    Arrays lie in the order of `fields`; `upload` copies up to the used end of the last one. The host has
    `copies` sets of arrays, which it uses in turn.
    """

    def __init__(
        self, device: Device, fields: Mapping[str, tuple[tuple[int, ...], DType]], *, copies: int = 1
    ) -> None:
        self.nbytes = self.nbytes_of(fields)
        self._mirror = device.mirror(self.nbytes, copies=copies)
        memory = self._mirror.tensor
        self.tensors: dict[str, Tensor] = {}
        self._hosts: list[dict[str, np.ndarray[Any, Any]]] = [{} for _ in self._mirror.hosts]
        self._turn = 0
        start = 0
        for name, (shape, dtype) in fields.items():
            self.tensors[name] = Tensor(memory.storage, dtype, shape, offset=start // dtype.itemsize)
            for host, written in zip(self._hosts, self._mirror.hosts, strict=True):
                host[name] = np.ndarray(shape, dtype.numpy, buffer=written.data, offset=start)
            self._last = start
            self._row_bytes = math.prod(shape[1:]) * dtype.itemsize
            start += _aligned(math.prod(shape) * dtype.itemsize)

    @property
    def host(self) -> dict[str, np.ndarray[Any, Any]]:
        """The arrays to write."""
        return self._hosts[self._turn]

    def advance(self) -> None:
        """Go on to the next set of arrays, which must have been read by now."""
        self._turn = (self._turn + 1) % len(self._hosts)

    def upload(self, rows: int) -> None:
        """Enqueue the copy to the device: all arrays, of the last one only the first `rows` rows."""
        self._mirror.upload(self._last + rows * self._row_bytes, self._turn)

    @staticmethod
    def nbytes_of(fields: Mapping[str, tuple[tuple[int, ...], DType]]) -> int:
        """Bytes that a buffer of these fields takes."""
        return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in fields.values())


class RaggedStaging:
    """An array of a size that each step chooses; its memory grows with the largest one so far."""

    def __init__(self, device: Device, dtype: DType, *, copies: int = 1) -> None:
        self._device = device
        self._dtype = dtype
        self._copies = copies
        self._turn = 0
        self._mirror = device.mirror(_SMALLEST, copies=copies)

    def put(self, array: np.ndarray[Any, Any]) -> Tensor:
        """Enqueue the copy of an array, converted to the element type, to the device. The next call takes
        the tensor's memory.
        """
        count = array.size
        nbytes = count * self._dtype.itemsize
        if nbytes > self._mirror.tensor.nbytes:
            self._device.stream.synchronize()  # the old memory may still be read
            self._mirror = self._device.mirror(1 << (nbytes - 1).bit_length(), copies=self._copies)
        self._turn = (self._turn + 1) % len(self._mirror.hosts)
        host = self._mirror.hosts[self._turn][:nbytes].view(self._dtype.numpy)
        host.reshape(array.shape)[...] = array
        self._mirror.upload(nbytes, self._turn)
        return Tensor(self._mirror.tensor.storage, self._dtype, array.shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
