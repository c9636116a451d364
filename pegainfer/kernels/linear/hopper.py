"""The GPU product of some rows on Hopper: one launch that reads the weight once, with the gate after it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pegainfer.kernels.cuda_source import type_define
from pegainfer.runtime.cuda.module import KernelSource
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

if TYPE_CHECKING:
    from pegainfer.runtime.cuda.device import CudaDevice
    from pegainfer.runtime.cuda.launch import Kernel

__all__ = ["HopperGemm", "HopperShape", "choose_shape"]

_TOKENS = {False: (64,), True: (64, 128)}
"""Of the kernels without and with a gate. Without one a library is as fast from 65 rows on."""

_CHUNK = 64  # columns
_CHUNK_BYTES = _CHUNK * 2
_THREADS = 384
_MAX_WIDTH = 256  # of a warpgroup's product
_STAGES = range(3, 9)
_STATIC_SHARED = 2048  # alignment and barriers
_CLUSTERS_OF_4 = 0.92 / 4
"""A multiprocessor, as most GPUs have room for."""

_X_COST = 0.6
"""Of a byte of x, which comes from the L2 cache, in bytes of weights."""
_MEETING_COST = 60_000
"""Of adding up what a cluster has, in bytes of weights that a block could have read meanwhile."""
_PARTIAL_COST = 1.7
"""Of a byte of partial sums, likewise. All costs are fitted to times measured on an H200."""


@dataclass(frozen=True, slots=True)
class HopperShape:
    """What hopper_gemm.cu is specialised for; see there."""

    tokens: int
    rows: int
    split: int
    gated: bool
    stages: int = 0

    @property
    def parts(self) -> int:
        """Of the weight rows of a tile, one a warpgroup."""
        return 2 if self.tokens == 64 else 1

    @property
    def outputs(self) -> int:
        """Columns of the result a tile."""
        return self.parts * self.rows

    @property
    def width(self) -> int:
        """Columns of a warpgroup's product."""
        boxes = 2 if self.gated else 1
        return -(-boxes * -(-self.rows // 8) * 8 // 16) * 16

    @property
    def stage_bytes(self) -> int:
        """Of shared memory."""
        return (self.tokens + self.parts * self.width) * _CHUNK_BYTES

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory."""
        return self.stages * self.stage_bytes + _STATIC_SHARED

    def source(self, act: DType) -> KernelSource:
        """The kernel."""
        return KernelSource.of(
            "linear/hopper_gemm.cu",
            TOKENS=self.tokens,
            ROWS=self.rows,
            STAGES=self.stages,
            SPLIT=self.split,
            GATED=int(self.gated),
            **type_define("ACT", act),
        )


def choose_shape(
    tokens: int, n: int, k: int, *, gated: bool, max_shared_bytes: int, clusters_by_size: dict[int, int]
) -> HopperShape | None:
    """The shape for up to `tokens` rows (64 or 128) whose blocks have one tile each and read the least; None
    where the weight is too large for one tile a block. `clusters_by_size`: how many run at once.
    """
    chunks, best = -(-k // _CHUNK), None
    for split, clusters in clusters_by_size.items():
        rows = -(-n // (max(clusters, 1) * (2 if tokens == 64 else 1)))
        shape = HopperShape(tokens, max(rows + rows % 2, 8), split, gated)
        stages = min((max_shared_bytes - _STATIC_SHARED) // shape.stage_bytes, _STAGES[-1])
        if clusters == 0 or chunks < split or shape.width > _MAX_WIDTH or stages < _STAGES[0]:
            continue
        weight_rows = shape.outputs * (2 if gated else 1)
        cost = -(-chunks // split) * _CHUNK_BYTES * (weight_rows + _X_COST * tokens)
        if split > 1:
            cost += _MEETING_COST + _PARTIAL_COST * tokens * shape.parts * shape.width * 4
        if best is None or cost < best[0]:
            best = cost, replace(shape, stages=stages)
    return None if best is None else best[1]


class HopperGemm:
    """`out[T, n] (+)= x[T, k] @ weight[n, k].T (+ bias)` for `T <= max_rows`, 16-bit activations; with
    `gated`, the weight holds gate rows then up rows and `out = silu(gate) * up`.
    """

    def __init__(
        self,
        gpu: CudaDevice,
        act: DType,
        *,
        n: int,
        k: int,
        gated: bool = False,
        accumulate: bool = False,
    ) -> None:
        self._gpu = gpu
        self._act = act
        self._n, self._k = n, k
        self._weight_rows = n * (2 if gated else 1)
        self._accumulate = int(accumulate)
        self._stream = gpu.stream.handle
        self._kernels: list[tuple[HopperShape, Kernel]] = []
        for tokens in _TOKENS[gated]:
            found = self._find(tokens, gated=gated)
            if found is None:
                break
            self._kernels.append(found)

    @staticmethod
    def serves(gpu: CudaDevice, act: DType, n: int, k: int, out: DType) -> bool:
        """Whether the kernel runs here and handles these types and sizes."""
        fits = n % 2 == 0 and k % 8 == 0
        return gpu.capability == (9, 0) and act is not DType.float32 and out is act and fits

    def _find(self, tokens: int, *, gated: bool) -> tuple[HopperShape, Kernel] | None:
        gpu, count = self._gpu, self._gpu.num_multiprocessors
        clusters = {1: count, 2: count // 2, 4: int(count * _CLUSTERS_OF_4)}
        while True:
            shape = choose_shape(
                tokens,
                self._n,
                self._k,
                gated=gated,
                max_shared_bytes=gpu.max_shared_bytes,
                clusters_by_size=clusters,
            )
            if shape is None:
                return None
            kernel = gpu.kernel(
                shape.source(self._act),
                "hopper_gemm",
                signature="mmpppiiii",
                shared_bytes=shape.shared_bytes,
                cluster=shape.split,
            )
            if shape.split == 1 or kernel.max_clusters(_THREADS) >= -(-self._n // shape.outputs):
                return shape, kernel
            clusters[shape.split] = min(kernel.max_clusters(_THREADS), clusters[shape.split] - 1)

    @property
    def max_rows(self) -> int:
        """Most rows of x; 0 for a weight that is too large."""
        return self._kernels[-1][0].tokens if self._kernels else 0

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor, *, bias: Tensor | None = None) -> None:
        """Enqueue the product for the rows of `x`."""
        rows, k, size = x.shape[0], self._k, self._act.itemsize
        shape, kernel = next(pair for pair in self._kernels if rows <= pair[0].tokens)
        boxes = (
            self._gpu.tensor_map(
                x, self._act, sizes=(k, rows), strides=(x.strides[0] * size,), box=(_CHUNK, rows)
            ),
            self._gpu.tensor_map(
                weight, self._act, sizes=(k, self._weight_rows), strides=(k * size,), box=(_CHUNK, shape.rows)
            ),
        )
        kernel.launch(
            self._stream,
            (-(-self._n // shape.outputs) * shape.split,),
            _THREADS,
            *boxes,
            bias.data_ptr if bias else 0,
            out.data_ptr,
            out.strides[0],
            rows,
            self._n,
            -(-k // _CHUNK),
            self._accumulate,
        )
