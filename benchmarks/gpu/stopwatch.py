"""What timing kernels takes: arrays of random numbers, recorded launches, events, a measured roofline.

Launches are recorded in a graph and replayed, as the engine does; a case repeats its graph for some
milliseconds, five times, and the median counts. On a device that is only described (`PlannedGpu`)
everything is bound and launched, and nothing is timed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pegainfer.kernels.artifacts import PlannedGpu
from pegainfer.runtime.cuda.algorithms import Product
from pegainfer.runtime.cuda.driver import check, cuda
from pegainfer.runtime.cuda.module import KernelSource
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

__all__ = ["Roofline", "Row", "Stopwatch", "measure_roofline"]

_WINDOW_MS = 20.0
_ROUNDS = 5
_MIN_LAUNCHES = 64
"""Calls in a graph, so that what starting a graph costs is spread over them."""

_POOL = 4_194_301  # a prime, so that the rows of a matrix differ
_PLANNED_L2 = 60 << 20
_PEAK_SIZE = 8192
_ROOFLINE_BYTES = 2 << 30
_READ_THREADS, _READ_BLOCKS = 512, 4  # blocks a multiprocessor


@dataclass(frozen=True, slots=True)
class Roofline:
    """What this GPU does at best, as measured: bytes copied and read per second (a copied byte counts
    twice), and bfloat16 FLOP per second.
    """

    copy_bytes_s: float
    read_bytes_s: float
    flop_s: float

    def least_us(self, nbytes: float, flop: float) -> float:
        """Microseconds below which work of this size cannot be."""
        return 1e6 * max(nbytes / max(self.copy_bytes_s, self.read_bytes_s), flop / self.flop_s)


@dataclass(frozen=True, slots=True)
class Row:
    """One case: the bytes that must move, the FLOP that must be done, microseconds (None: not timed)."""

    group: str
    case: str
    nbytes: int
    flop: int
    us: float | None

    def facts(self, roofline: Roofline | None) -> dict[str, Any]:
        """The row as it is written; `roofline_share` is 1 where no kernel could be faster."""
        found: dict[str, Any] = {"group": self.group, "case": self.case, "bytes": self.nbytes}
        found["flop"] = self.flop
        if self.us is not None and roofline is not None:
            found["us"] = round(self.us, 2)
            found["tb_s"] = round(self.nbytes / self.us / 1e6, 3)
            found["tflop_s"] = round(self.flop / self.us / 1e6, 1)
            found["roofline_share"] = round(roofline.least_us(self.nbytes, self.flop) / self.us, 3)
        return found


class Stopwatch:
    """Arrays and timings on one GPU, a real or a planned one."""

    def __init__(self, gpu: Any) -> None:
        self.gpu = gpu
        self.planned = isinstance(gpu, PlannedGpu)
        self.l2_bytes = _PLANNED_L2
        self._pools: dict[tuple[DType, float], Tensor] = {}
        if not self.planned:
            attribute = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
            self.l2_bytes = check(cuda.cuDeviceGetAttribute(attribute, check(cuda.cuCtxGetDevice())))
            self._events = check(cuda.cuEventCreate(0)), check(cuda.cuEventCreate(0))

    def copies(self, nbytes: int) -> int:
        """How many arrays of this size, read in turn, are cold in the L2 cache each time."""
        return max(math.ceil(3 * self.l2_bytes / nbytes), 1)

    def random_bytes(self, nbytes: int, dtype: DType, *, std: float = 0.02) -> Tensor:
        """uint8 `[nbytes]` that hold normal numbers of type `dtype`: zeros would spare the GPU power."""
        target = self.gpu.empty((nbytes,), DType.uint8)
        if self.planned or not nbytes:
            return target
        pool = self._pools.get((dtype, std))
        if pool is None:
            values = np.random.default_rng(0).standard_normal(_POOL, np.float32) * np.float32(std)
            pool = self._pools[dtype, std] = self.gpu.from_numpy(values.astype(dtype.numpy))
        filled, stream = min(pool.nbytes, nbytes), self.gpu.stream.handle
        check(cuda.cuMemcpyDtoDAsync(target.data_ptr, pool.data_ptr, filled, stream))
        while filled < nbytes:
            count = min(filled, nbytes - filled)
            check(cuda.cuMemcpyDtoDAsync(target.data_ptr + filled, target.data_ptr, count, stream))
            filled += count
        return target

    def random(self, shape: tuple[int, ...], dtype: DType, *, std: float = 1.0) -> Tensor:
        """Normal numbers."""
        raw = self.random_bytes(math.prod(shape) * dtype.itemsize, dtype, std=std)
        return Tensor(raw.storage, dtype, shape)

    def time(self, calls: Sequence[Callable[[], None]], *, least: int = _MIN_LAUNCHES) -> float | None:
        """Microseconds a call, of calls that are made in turn, `least` or more a graph; None where nothing is
        timed.
        """
        stream, rounds = self.gpu.stream, math.ceil(least / len(calls))
        for call in calls:  # what is compiled or planned at a first launch
            call()
        stream.synchronize()
        stream.begin_capture()
        for _ in range(rounds):
            for call in calls:
                call()
        graph = stream.end_capture()
        if self.planned:
            return None
        self._elapsed_ms(graph, 1)
        repeats = max(math.ceil(_WINDOW_MS / self._elapsed_ms(graph, 1)), 1)
        times = [self._elapsed_ms(graph, repeats) for _ in range(_ROUNDS)]
        return statistics.median(times) / (repeats * rounds * len(calls)) * 1e3

    def _elapsed_ms(self, graph: Any, repeats: int) -> float:
        start, stop = self._events
        stream = self.gpu.stream.handle
        check(cuda.cuEventRecord(start, stream))
        for _ in range(repeats):
            graph.replay()
        check(cuda.cuEventRecord(stop, stream))
        check(cuda.cuEventSynchronize(stop))
        elapsed: float = check(cuda.cuEventElapsedTime(start, stop))
        return elapsed


def measure_roofline(watch: Stopwatch) -> Roofline | None:
    """A large copy, a kernel that only reads, and a large square product; None on a planned GPU."""
    gpu, size = watch.gpu, _PEAK_SIZE
    source = watch.random_bytes(_ROOFLINE_BYTES, DType.bfloat16)
    target = gpu.empty((_ROOFLINE_BYTES,), DType.uint8)

    def copy() -> None:
        if not watch.planned:
            addresses = target.data_ptr, source.data_ptr
            check(cuda.cuMemcpyDtoDAsync(*addresses, _ROOFLINE_BYTES, gpu.stream.handle))

    text = KernelSource(str(Path(__file__).with_name("read.cu").resolve()))
    kernel = gpu.kernel(text, "read_all", signature="ppp", dependent=False)
    grid = (_READ_BLOCKS * gpu.num_multiprocessors,)

    def read() -> None:
        arguments = source.data_ptr, _ROOFLINE_BYTES // 16, target.data_ptr
        kernel.launch(gpu.stream.handle, grid, _READ_THREADS, *arguments)

    x, weight = (watch.random((size, size), DType.bfloat16, std=std) for std in (1.0, 0.02))
    out = gpu.empty((size, size), DType.bfloat16)
    product = Product(size, size, DType.bfloat16, DType.bfloat16, accumulate=False)
    plan = gpu.cublaslt.plan(product, size, x_stride=size, out_stride=size)

    copied, done = watch.time([copy]), watch.time([read])
    multiplied = watch.time([lambda: plan.run(x.data_ptr, weight.data_ptr, out.data_ptr)])
    if copied is None or done is None or multiplied is None:
        return None
    return Roofline(
        copy_bytes_s=2e6 * _ROOFLINE_BYTES / copied,
        read_bytes_s=1e6 * _ROOFLINE_BYTES / done,
        flop_s=2e6 * size**3 / multiplied,
    )
