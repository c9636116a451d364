"""Weights on their way to the device: threads copy them out of the page cache into page-locked memory, from
where the GPU fetches them, all at the same time.

Views of mapped files are read from the files: their pages are released as soon as a tensor has been sent, and
a thread that came later would map them again, until the whole model counted as memory of this process.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pegainfer.runtime.cuda.driver import check, cuda
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.mapped import copy_bytes
from pegainfer.runtime.tensor import Tensor

if TYPE_CHECKING:
    from pegainfer.runtime.cuda.device import CudaDevice

__all__ = ["UploadRing"]

_SLOTS, _SLOT_BYTES = 12, 8 << 20
_THREADS = 8

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(slots=True)
class _Slot:
    buffer: Tensor
    event: Any


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of an array that a thread is copying into a slot, and where in `target` it belongs. Both are
    held until it is on its way, whoever else has let go of them.
    """

    copied: Future[None]
    slot: _Slot
    source: Bytes
    target: Tensor
    start: int


class UploadRing:
    """Slots of pinned memory, which pieces of arrays pass through in order."""

    def __init__(self, device: CudaDevice) -> None:
        self._stream = device.stream.handle
        self._threads = ThreadPoolExecutor(_THREADS, "upload")
        flags = cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING.value
        self._free = deque(
            _Slot(device.pinned((_SLOT_BYTES,), DType.uint8), check(cuda.cuEventCreate(flags)))
            for _ in range(_SLOTS)
        )
        self._pieces: deque[_Piece] = deque()

    def send(self, source: Bytes, target: Tensor) -> None:
        """Enqueue the copy of a flat array to a tensor of its size. It is read later, until `close`. Raises
        what a thread that read an earlier one has raised.
        """
        for start in range(0, len(source), _SLOT_BYTES):
            part = source[start : start + _SLOT_BYTES]
            if not self._free:
                self._pass_on()
            slot = self._free.popleft()
            check(cuda.cuEventSynchronize(slot.event))  # the piece that it held before is on the device
            landing = slot.buffer.numpy()[: len(part)]
            copied = self._threads.submit(copy_bytes, part, landing)
            self._pieces.append(_Piece(copied, slot, part, target, start))

    def close(self) -> None:
        """Wait until everything is on the device, and free the slots. Raises what a thread raised."""
        try:
            while self._pieces:
                self._pass_on()
            check(cuda.cuStreamSynchronize(self._stream))
        finally:
            self._threads.shutdown(cancel_futures=True)
            cuda.cuStreamSynchronize(self._stream)  # after an error, too, the GPU may still read the slots
            for slot in (*self._free, *(piece.slot for piece in self._pieces)):
                cuda.cuEventDestroy(slot.event)
            self._free.clear()
            self._pieces.clear()

    def _pass_on(self) -> None:
        """Let the GPU fetch the oldest piece as soon as it has been copied."""
        piece = self._pieces[0]
        piece.copied.result()
        target, landing = piece.target.data_ptr + piece.start, piece.slot.buffer.data_ptr
        check(cuda.cuMemcpyHtoDAsync(target, landing, len(piece.source), self._stream))
        check(cuda.cuEventRecord(piece.slot.event, self._stream))
        self._free.append(self._pieces.popleft().slot)  # not before: `close` frees the slots of both
