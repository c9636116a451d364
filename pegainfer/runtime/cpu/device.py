"""`CpuDevice`: this machine's processors, memory and compiled kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from pegainfer import envs
from pegainfer.errors import ConfigError
from pegainfer.log import get_logger
from pegainfer.runtime.cpu.isa import choose_level, cpu_flags, cpu_name, supported_levels
from pegainfer.runtime.cpu.library import Library, NativePool, built_levels, load_library
from pegainfer.runtime.cpu.limits import default_num_threads, memory_info
from pegainfer.runtime.cpu.memory import HostStorage
from pegainfer.runtime.cpu.stream import CpuStream
from pegainfer.runtime.device import DeviceKind, MemoryInfo
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

__all__ = ["CpuDevice", "make_cpu_device"]

_logger = get_logger(__name__)


class SharedMirror:
    """A `Mirror` whose two sides are one."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.hosts: tuple[np.ndarray[Any, np.dtype[np.uint8]]] = (tensor.numpy(),)

    def upload(self, nbytes: int, source: int) -> None:
        """Nothing: the device reads what the host wrote."""


class Snapshot:
    """A `Download` of what there is already."""

    def __init__(self, arrays: list[np.ndarray[Any, Any]]) -> None:
        self._arrays = arrays

    def wait(self) -> list[np.ndarray[Any, Any]]:
        """The copies."""
        return self._arrays


class CpuDevice:
    """The CPU as a device. `library` holds the compiled kernels; without it only NumPy providers run."""

    is_asynchronous = False

    def __init__(self, library: Library | None, num_threads: int) -> None:
        self.library = library
        self.num_threads = num_threads
        self._pool = NativePool(library, num_threads) if library is not None else None
        self._stream = CpuStream(self._pool)

    @property
    def kind(self) -> DeviceKind:
        return DeviceKind.cpu

    @property
    def name(self) -> str:
        """Processor and number of threads."""
        return f"{cpu_name()}, {self.num_threads} thread{'s' if self.num_threads > 1 else ''}"

    @property
    def arch(self) -> str:
        """Level of the compiled kernels, or `numpy`."""
        return self.library.level if self.library is not None else "numpy"

    @property
    def stream(self) -> CpuStream:
        return self._stream

    def activation_dtype(self, dtype: DType) -> DType:
        """Always float32: weights keep their own type."""
        return DType.float32

    def memory_info(self) -> MemoryInfo:
        """Memory within the limits of the control groups."""
        return memory_info()

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Uninitialised memory; raises `CapacityError` when there is none."""
        return Tensor(HostStorage.allocate(math.prod(shape) * dtype.itemsize), dtype, shape)

    def zeros(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """Memory of zeros; raises `CapacityError` when there is none."""
        return Tensor(HostStorage.allocate(math.prod(shape) * dtype.itemsize, zeroed=True), dtype, shape)

    def mirror(self, nbytes: int, *, copies: int = 1) -> SharedMirror:
        """Zeroed memory, the same for host and device."""
        return SharedMirror(self.zeros((nbytes,), DType.uint8))

    def from_numpy(self, array: np.ndarray[Any, Any]) -> Tensor:
        """A tensor of the array's own memory when that is contiguous, else of a copy."""
        contiguous = np.ascontiguousarray(array)
        flat = contiguous.reshape(-1).view(np.uint8)
        return Tensor(HostStorage(flat), DType.of(array.dtype), array.shape)

    def loading(self) -> AbstractContextManager[None]:
        """Nothing is under way at any time."""
        return nullcontext()

    def to_numpy(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """A copy of the contents; waits for the stream."""
        self._stream.synchronize()
        return tensor.numpy().copy()

    def download(self, tensors: Sequence[Tensor]) -> Snapshot:
        """Copies of the contents; the enqueued work is done here, since nobody else would do it meanwhile."""
        self._stream.synchronize()
        return Snapshot([tensor.numpy().copy() for tensor in tensors])

    def tune(self, forward: Callable[[int], object], limit: int) -> int:
        """Nothing: the kernels are what they are."""
        return 0

    def close(self) -> None:
        """End the threads. Memory goes with the tensors that hold it."""
        if self._pool is not None:
            self._pool.close()


def make_cpu_device(num_threads: int | None = None) -> CpuDevice:
    """The CPU with the best compiled kernels that it can run and that were built.

    `num_threads` is by default what quota and affinity allow. Raises `ConfigError` when
    `PEGAINFER_CPU_ISA` names a level that cannot run here, or that was not built.
    """
    threads = default_num_threads() if num_threads is None else num_threads
    if threads < 1:
        raise ConfigError(f"the number of CPU threads must be at least 1, got {threads}")
    if envs.native_disabled():
        _logger.warning("PEGAINFER_DISABLE_NATIVE is set: everything runs on NumPy, which is slow")
        return CpuDevice(None, threads)
    flags, wanted, built = cpu_flags(), envs.cpu_isa(), built_levels()
    usable = [level for level in supported_levels(flags) if level in built]
    if wanted is not None:
        level = choose_level(flags, wanted)
        if level not in built:
            raise ConfigError(
                f"PEGAINFER_CPU_ISA={level} was not compiled; run `python -m pegainfer.kernels.build`"
            )
        return CpuDevice(load_library(level), threads)
    if not usable:
        _logger.warning(
            "the CPU kernels were not compiled, so everything runs on NumPy, which is slow; install a C++ "
            "compiler (g++, clang++ or `pip install ziglang`) and run `python -m pegainfer.kernels.build`"
        )
        return CpuDevice(None, threads)
    return CpuDevice(load_library(usable[0]), threads)
