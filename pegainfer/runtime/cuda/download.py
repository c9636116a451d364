"""Results on their way to the host: copies into page-locked memory that is used again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from pegainfer.errors import KernelError
from pegainfer.runtime.cuda.driver import check, cuda
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

if TYPE_CHECKING:
    from pegainfer.runtime.cuda.device import CudaDevice

__all__ = ["CudaDownload", "LandingPool"]

_ALIGNMENT = 64
_SMALLEST = 4096


class LandingPool:
    """Pinned buffers with an event each, by size (powers of two), for downloads that come again and again."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._free: dict[int, list[tuple[Tensor, Any]]] = defaultdict(list)

    def take(self, nbytes: int) -> tuple[Tensor, Any]:
        """A buffer of at least `nbytes`, and its event."""
        size = max(_SMALLEST, 1 << (nbytes - 1).bit_length())
        if self._free[size]:
            return self._free[size].pop()
        flags = cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
        return self._device.pinned((size,), DType.uint8), check(cuda.cuEventCreate(flags))

    def give_back(self, buffer: Tensor, event: Any) -> None:
        """A buffer that has been read."""
        self._free[buffer.numel].append((buffer, event))

    def close(self) -> None:
        """Destroy the events. Buffers free their own memory."""
        for buffers in self._free.values():
            for _, event in buffers:
                cuda.cuEventDestroy(event)
        self._free.clear()


class CudaDownload:
    """Tensors as they are when the stream comes to this point."""

    def __init__(self, pool: LandingPool, stream: Any, tensors: Sequence[Tensor]) -> None:
        self._pool = pool
        self._tensors = [(tensor.shape, tensor.dtype, tensor.nbytes) for tensor in tensors]
        if not all(tensor.is_contiguous for tensor in tensors):
            raise KernelError("only a contiguous tensor can be copied to the host")
        total = sum(_aligned(nbytes) for _, _, nbytes in self._tensors)
        self._buffer, self._event = pool.take(max(total, 1))
        target = self._buffer.data_ptr
        for tensor in tensors:
            if tensor.nbytes:
                check(cuda.cuMemcpyDtoHAsync(target, tensor.data_ptr, tensor.nbytes, stream))
            target += _aligned(tensor.nbytes)
        check(cuda.cuEventRecord(self._event, stream))

    def wait(self) -> list[np.ndarray[Any, Any]]:
        """See `Download`."""
        check(cuda.cuEventSynchronize(self._event))
        memory = self._buffer.numpy()
        arrays, start = [], 0
        for shape, dtype, nbytes in self._tensors:
            part = memory[start : start + nbytes].view(dtype.numpy)
            arrays.append(part.reshape(shape).copy())
            start += _aligned(nbytes)
        self._pool.give_back(self._buffer, self._event)
        return arrays


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
