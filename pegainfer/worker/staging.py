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
    """One piece of memory cut into named arrays: `host[name]` to write, `tensors[name]` to read."""

    def __init__(self, device: Device, fields: Mapping[str, tuple[tuple[int, ...], DType]]) -> None:
        nbytes = self.nbytes_of(fields)
        memory = device.zeros((nbytes,), DType.uint8)
        self.nbytes = nbytes
        self.tensors: dict[str, Tensor] = {}
        self.host: dict[str, np.ndarray[Any, Any]] = {}
        start = 0
        for name, (shape, dtype) in fields.items():
            tensor = Tensor(memory.storage, dtype, shape, offset=start // dtype.itemsize)
            self.tensors[name] = tensor
            self.host[name] = tensor.numpy()
            start += _aligned(math.prod(shape) * dtype.itemsize)

    @staticmethod
    def nbytes_of(fields: Mapping[str, tuple[tuple[int, ...], DType]]) -> int:
        """Bytes that a buffer of these fields takes."""
        return sum(_aligned(math.prod(shape) * dtype.itemsize) for shape, dtype in fields.values())


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
