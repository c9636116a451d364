"""Host memory that tensors live in: aligned, and in huge pages when it is large."""

from __future__ import annotations

import contextlib
import mmap
from typing import Any

import numpy as np

from pegainfer.errors import CapacityError

__all__ = ["HostStorage"]

_ALIGNMENT = 64
_MAPPED_FROM = 1 << 20  # bytes from which memory is mapped, and goes back to the system when freed

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class HostStorage:
    """The bytes of an array, which it keeps alive."""

    __slots__ = ("_array", "nbytes", "ptr")

    def __init__(self, array: Bytes) -> None:
        self._array = array
        self.ptr = int(array.__array_interface__["data"][0])
        self.nbytes = array.nbytes

    @classmethod
    def allocate(cls, nbytes: int, *, zeroed: bool = False) -> HostStorage:
        """New memory, aligned to 64 bytes at least; raises `CapacityError` when there is none."""
        try:
            return cls(_mapped(nbytes) if nbytes >= _MAPPED_FROM else _small(nbytes, zeroed))
        except (MemoryError, OSError, ValueError, OverflowError):
            raise CapacityError(f"{nbytes} bytes of memory could not be allocated") from None

    def host_array(self) -> Bytes:
        """The bytes, without a copy."""
        return self._array


def _small(nbytes: int, zeroed: bool) -> Bytes:
    make = np.zeros if zeroed else np.empty
    memory = make(nbytes + _ALIGNMENT, dtype=np.uint8)
    start = -int(memory.__array_interface__["data"][0]) % _ALIGNMENT
    return memory[start : start + nbytes]


def _mapped(nbytes: int) -> Bytes:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)
