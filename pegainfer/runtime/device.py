"""What a device, its stream and its graphs are. One implementation per device kind, in `runtime/<kind>/`.

Work is *enqueued* on a stream and has happened after `synchronize()`. Between `begin_capture()` and
`end_capture()` enqueued work is recorded instead of run; the resulting graph replays the very same launches
with the same addresses. A graph is therefore only valid while the tensors it names live, and for the sizes
it was captured with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

import numpy as np

from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

__all__ = ["Device", "DeviceKind", "Download", "Graph", "MemoryInfo", "Mirror", "Stream"]


class DeviceKind(StrEnum):
    """The kinds of device that ops have providers for."""

    cpu = "cpu"
    cuda = "cuda"


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes of device memory: all of it, and what this process may still take."""

    total: int
    available: int


class Mirror(Protocol):
    """Memory that the host writes and the device reads, at addresses that never change."""

    @property
    def hosts(self) -> Sequence[np.ndarray[Any, np.dtype[np.uint8]]]:
        """The bytes to write: as many copies as were asked for, so that one can be written while another is
        still to be read; or one, where host and device share their memory.
        """
        ...

    @property
    def tensor(self) -> Tensor:
        """The bytes that the device reads, as of the last `upload`: uint8."""
        ...

    def upload(self, nbytes: int, source: int) -> None:
        """Enqueue the copy of the first `nbytes` of `hosts[source]` to the device (where both are the same
        memory: nothing).
        """
        ...


class Download(Protocol):
    """Contents of tensors under way to the host."""

    def wait(self) -> list[np.ndarray[Any, Any]]:
        """The contents, one array a tensor; called once. Raises `KernelError` if enqueued work failed."""
        ...


class Graph(Protocol):
    """Recorded launches."""

    def replay(self) -> None:
        """Enqueue everything that was recorded."""
        ...


class Stream(Protocol):
    """An ordered queue of work."""

    def synchronize(self) -> None:
        """Return when all enqueued work has happened; raises `KernelError` if some of it failed."""
        ...

    def begin_capture(self) -> None:
        """Record launches from now on instead of running them."""
        ...

    def end_capture(self) -> Graph:
        """Stop recording and return what was recorded."""
        ...


class Device(Protocol):
    """A place where ops run."""

    @property
    def kind(self) -> DeviceKind: ...

    @property
    def name(self) -> str:
        """What a person calls it, e.g. `AMD EPYC, 2 threads` or `NVIDIA H200`."""
        ...

    @property
    def arch(self) -> str:
        """Instruction set that kernels are chosen by: `avx512_bf16`, `avx2`, `portable`, `sm_90a`."""
        ...

    @property
    def stream(self) -> Stream: ...

    @property
    def is_asynchronous(self) -> bool:
        """Whether enqueued work goes on while the host does something else."""
        ...

    def activation_dtype(self, dtype: DType) -> DType:
        """Element type of activations for a model of `dtype` (the CPU always computes in float32)."""
        ...

    def memory_info(self) -> MemoryInfo: ...

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Uninitialised memory, aligned to 64 bytes at least; raises `CapacityError` when there is none."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> Tensor: ...

    def mirror(self, nbytes: int, *, copies: int = 1) -> Mirror:
        """Zeroed memory on both sides, `copies` times on the host's."""
        ...

    def from_numpy(self, array: np.ndarray[Any, Any]) -> Tensor:
        """A tensor with the array's contents. On the CPU a C-contiguous array is aliased, not copied."""
        ...

    def loading(self) -> AbstractContextManager[None]:
        """A block in which weights are packed: they may be under way until it ends, and their sources must
        not change before.
        """
        ...

    def to_numpy(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """A host copy of a tensor's contents; waits for the stream."""
        ...

    def download(self, tensors: Sequence[Tensor]) -> Download:
        """Copies of tensors as they will be when the work enqueued so far is done; what is enqueued later
        does not change them.
        """
        ...

    def tune(self, forward: Callable[[int], object], limit: int) -> int:
        """Let ops find out how they run best with many rows: calls `forward(rows)`, which runs the model on
        `rows` rows of whatever values, for each number of rows up to `limit` that is not known yet. How many
        there were.
        """
        ...

    def close(self) -> None:
        """Free everything; the device must not be used again."""
        ...
