"""Kernels ahead of time: which ones a GPU that need not be there will load, and compiling them in parallel.

`PlannedGpu` stands in for a device while ops are bound: it has a GPU's facts but no memory and no driver, and
remembers the kernels that providers ask for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import as_completed
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from pegainfer.errors import ConfigError
from pegainfer.runtime.cuda.algorithms import Product
from pegainfer.runtime.cuda.arguments import Arguments
from pegainfer.runtime.cuda.cubins import Compilers
from pegainfer.runtime.cuda.module import KernelSource
from pegainfer.runtime.device import Device, DeviceKind, Download, MemoryInfo
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

__all__ = ["ARCHITECTURES", "PlannedGpu", "needed_kernels", "prefetch"]

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
"""What every kernel compiles for (those of one architecture alone aside)."""

_SHARED_KB = {(8, 0): 163, (9, 0): 227, (10, 0): 227}
"""Of one block, where it is more than 99."""

_ADDRESS = 1 << 20
_CLUSTERS = 1 << 10  # that run at once: as many as anybody asks for
_MEMORY = 80 << 30


def needed_kernels(arch: str, bind_all: Callable[[Device], object]) -> list[KernelSource]:
    """The kernels that a GPU of `arch` loads when `bind_all` binds ops to the device that it is given."""
    gpu = PlannedGpu(arch)
    bind_all(gpu)
    return list(gpu.sources)


def prefetch(
    sources: Iterable[KernelSource],
    arch: str,
    *,
    jobs: int | None = None,
    on_done: Callable[[KernelSource], object] = lambda source: None,
) -> None:
    """Have the cubins of `sources` in the cache, `jobs` compilers at once. `on_done` is told of each. Raises
    `KernelError` for the first that does not compile.
    """
    compilers = Compilers(arch, jobs=jobs)
    try:
        futures = {future: source for source, future in compilers.start(sources).items()}
        for future in as_completed(futures):
            future.result()
            on_done(futures[future])
    finally:
        compilers.close()


class PlannedGpu:
    """A GPU of an architecture, only described. Tensors have addresses but no memory; launches check their
    arguments and do nothing.
    """

    kind = DeviceKind.cuda
    is_asynchronous = True

    def __init__(self, arch: str, *, num_multiprocessors: int = 132) -> None:
        matched = re.fullmatch(r"sm_(\d+)(\d)a?", arch)
        if matched is None:
            raise ConfigError(f"{arch!r:.40} is no GPU architecture; known are {', '.join(ARCHITECTURES)}")
        self.arch = arch
        self.capability = (int(matched[1]), int(matched[2]))
        self.num_multiprocessors = num_multiprocessors
        self.max_shared_bytes = _SHARED_KB.get(self.capability, 99) << 10
        self.stream = _PlannedStream()
        self.cublaslt = _PlannedLibrary()
        self.products: set[Product] = set()
        self.sources: dict[KernelSource, None] = {}
        """What was asked for, in that order."""

    @property
    def name(self) -> str:
        """See `Device`."""
        return f"a GPU of architecture {self.arch}"

    def activation_dtype(self, dtype: DType) -> DType:
        """Activations have the model's own type."""
        return dtype

    def memory_info(self) -> MemoryInfo:
        """As much as models usually need."""
        return MemoryInfo(total=_MEMORY, available=_MEMORY)

    def empty(self, shape: tuple[int, ...], dtype: DType) -> Tensor:
        """A description."""
        return Tensor(_PlannedStorage(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize), dtype, shape)

    zeros = empty

    def mirror(self, nbytes: int, *, copies: int = 1) -> _PlannedMirror:
        """Host memory that is never copied."""
        return _PlannedMirror(self.empty((nbytes,), DType.uint8))

    def from_numpy(self, array: np.ndarray[Any, Any]) -> Tensor:
        """A description of what a copy would be."""
        return self.empty(array.shape, DType.of(array.dtype))

    def loading(self) -> AbstractContextManager[None]:
        """Nothing is loaded."""
        return nullcontext()

    def upload(self, array: np.ndarray[Any, np.dtype[np.uint8]], target: Tensor) -> None:
        """Nothing is loaded."""

    def to_numpy(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """Refused: there is nothing."""
        raise TypeError("a planned GPU holds no values")

    def download(self, tensors: Sequence[Tensor]) -> Download:
        """Refused: there is nothing."""
        raise TypeError("a planned GPU holds no values")

    def tensor_map(self, tensor: Tensor, dtype: DType, **layout: Sequence[int]) -> int:
        """Nothing that could be read."""
        return _ADDRESS

    def workspace(self, name: str, nbytes: int) -> Tensor:
        """A description."""
        return self.empty((nbytes,), DType.uint8)

    def kernel(
        self,
        source: KernelSource,
        name: str,
        *,
        signature: str,
        shared_bytes: int = 0,
        cluster: int = 1,
        dependent: bool = True,
    ) -> _PlannedKernel:
        """Remember that `source` is needed."""
        self.sources[source] = None
        return _PlannedKernel(name, signature)

    def tune(self, forward: Callable[[int], object], limit: int) -> int:
        """Nothing can be measured."""
        return 0

    def close(self) -> None:
        """Nothing is held."""


class _PlannedKernel:
    def __init__(self, name: str, signature: str) -> None:
        self._arguments = Arguments(name, signature)

    def max_clusters(self, block: int) -> int:
        return _CLUSTERS

    def launch(self, stream: Any, grid: tuple[int, ...], block: int, *arguments: int | float) -> None:
        self._arguments.pack(arguments)


class _PlannedStorage:
    __slots__ = ("nbytes",)

    ptr = _ADDRESS

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def host_array(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        raise TypeError("a planned GPU has no memory")


class _PlannedMirror:
    def __init__(self, tensor: Tensor) -> None:
        self.hosts: list[np.ndarray[Any, np.dtype[np.uint8]]] = [np.zeros(tensor.shape, np.uint8)]
        self.tensor = tensor

    def upload(self, nbytes: int, source: int) -> None:
        pass


class _PlannedStream:
    handle = 0

    def synchronize(self) -> None:
        pass

    def begin_capture(self) -> None:
        pass

    def end_capture(self) -> _PlannedGraph:
        return _PlannedGraph()


class _PlannedGraph:
    def replay(self) -> None:
        pass


class _PlannedLibrary:
    """Whatever a library computes needs no kernel of ours, and nothing can be measured."""

    @property
    def algorithms(self) -> _PlannedLibrary:
        return self

    def is_wanted(self, product: Product, rows: int) -> bool:
        return False

    def plan(self, product: Product, m: int, *, x_stride: int, out_stride: int) -> _PlannedLibrary:
        return self

    def run(self, x: int, weight: int, out: int) -> None:
        pass
