"""Mapped files, which can also be read past the map: what is only to be copied once then never counts as
memory of this process, and a disk that fails is an error instead of a signal. Knows nothing of what a file
holds.
"""

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from pegainfer.errors import WeightsError

__all__ = ["MappedFile", "copy_bytes", "mapping_of"]

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class MappedFile(mmap.mmap):
    """A whole file, mapped read-only, that stays open as long as an array views it. Raises `OSError`, and
    `ValueError` for an empty file.
    """

    path: Path
    address: int
    _descriptor: int

    @classmethod
    def open(cls, path: Path) -> MappedFile:
        """Map `path`; nothing of it is read yet."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            mapped = cls(descriptor, 0, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(descriptor)
            raise
        mapped.path = path
        mapped.address = np.frombuffer(mapped, np.uint8).ctypes.data
        mapped._descriptor = descriptor
        weakref.finalize(mapped, os.close, descriptor)
        return mapped

    def read_into(self, target: Bytes, offset: int) -> None:
        """Fill a flat array with the bytes from `offset` on, without touching the map. Safe to call from
        several threads, which run side by side. Raises `WeightsError` when the file cannot be read or has
        become shorter.
        """
        done = 0
        while done < target.size:
            try:
                count = os.preadv(self._descriptor, [target[done:].data], offset + done)
            except OSError as error:
                raise WeightsError(f"{self.path}: cannot be read ({error.strerror})") from None
            if not count:
                raise WeightsError(
                    f"{self.path}: ends at byte {offset + done} now; the file was truncated while it was read"
                )
            done += count


def copy_bytes(source: Bytes, target: Bytes) -> None:
    """Copy a flat array to another of its size: from the file that it is a view of, if it is one of a
    `MappedFile`. Raises `WeightsError` as `MappedFile.read_into` does.
    """
    mapped = mapping_of(source)
    if isinstance(mapped, MappedFile) and source.flags.c_contiguous:
        mapped.read_into(target, source.ctypes.data - mapped.address)
    else:
        np.copyto(target, source)


def mapping_of(array: Any) -> mmap.mmap | None:
    """The memory map that an array is a view of."""
    while array is not None and not isinstance(array, mmap.mmap):
        array = array.obj if isinstance(array, memoryview) else getattr(array, "base", None)
    return array
