"""`Tensor`: storage, dtype, shape, strides. Views only; arithmetic lives in `ops`."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

from pegainfer.runtime.dtypes import DType

__all__ = ["Storage", "Tensor"]


class Storage(Protocol):
    """A piece of memory of one device. The device that made it owns it and frees it when it is dropped."""

    @property
    def ptr(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def host_array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The bytes as a NumPy array without a copy; raises `TypeError` where the host cannot address
        them.
        """
        ...


class Tensor:
    """A strided view of a storage. Immutable; slicing and reshaping give new views of the same bytes.

    `strides` and `offset` are in elements. `data_ptr` is the address of the first element.
    """

    __slots__ = ("data_ptr", "dtype", "offset", "shape", "storage", "strides")

    def __init__(
        self,
        storage: Storage,
        dtype: DType,
        shape: tuple[int, ...],
        *,
        strides: tuple[int, ...] | None = None,
        offset: int = 0,
    ) -> None:
        self.storage = storage
        self.dtype = dtype
        self.shape = shape
        self.strides = strides if strides is not None else contiguous_strides(shape)
        self.offset = offset
        self.data_ptr = storage.ptr + offset * dtype.itemsize

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that the elements take (not counting gaps between rows)."""
        return self.numel * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in row-major order without gaps."""
        return self.strides == contiguous_strides(self.shape)

    def slice(self, dim: int, start: int, stop: int) -> Tensor:
        """The view `[start, stop)` of dimension `dim`."""
        if not 0 <= start <= stop <= self.shape[dim]:
            raise IndexError(f"slice [{start}, {stop}) of dimension {dim} of {self.shape}")
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        offset = self.offset + start * self.strides[dim]
        return Tensor(self.storage, self.dtype, shape, strides=self.strides, offset=offset)

    def rows(self, count: int) -> Tensor:
        """The first `count` rows."""
        return self.slice(0, 0, count)

    def view(self, *shape: int) -> Tensor:
        """A contiguous tensor under another shape of the same number of elements."""
        if not self.is_contiguous:
            raise ValueError("only a contiguous tensor can be reshaped without a copy")
        if math.prod(shape) != self.numel:
            raise ValueError(f"cannot view {self.shape} as {shape}")
        return Tensor(self.storage, self.dtype, shape, offset=self.offset)

    def numpy(self) -> np.ndarray[Any, Any]:
        """The elements as a NumPy view, without a copy (host-addressable storage only)."""
        flat = self.storage.host_array()
        itemsize = self.dtype.itemsize
        return np.ndarray(
            self.shape,
            dtype=self.dtype.numpy,
            buffer=flat.data,
            offset=self.offset * itemsize,
            strides=tuple(s * itemsize for s in self.strides),
        )

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}, {list(self.shape)}, ptr={self.data_ptr:#x})"


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides of `shape`, in elements."""
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return tuple(strides)
