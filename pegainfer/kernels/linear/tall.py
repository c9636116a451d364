"""The GPU product of many rows on Hopper: tiles that leave no multiprocessor idle, with the gate after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegainfer.kernels.cuda_source import type_define
from pegainfer.runtime.cuda.module import KernelSource
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

if TYPE_CHECKING:
    from pegainfer.runtime.cuda.device import CudaDevice

__all__ = ["TallGemm", "share_of_work"]

_STAGES = 4
_ROWS, _WIDTH = 128, 256  # of x and of the weight, a tile
_CLUSTER = 2
_CHUNK = 64  # columns
_SHARED = _STAGES * (_ROWS + _WIDTH) * _CHUNK * 2 + 2048  # and alignment, barriers
_THREADS = 384

_LEAST_SHARE = {False: 0.93, True: 0.76}
"""Of a launch's work that must be of use. Without a gate a library is as fast or faster below; with one it
writes and reads twice as many columns, which takes a tenth of the time.
"""


def share_of_work(rows: int, n: int, *, gated: bool, clusters: int) -> float:
    """The part of what `clusters` clusters could compute for `[rows, n]` results, in as many rounds as they
    need, that they are asked for.
    """
    height, width = _CLUSTER * _ROWS, _WIDTH // (2 if gated else 1)
    rounds = -(-(-(-rows // height) * -(-n // width)) // clusters)
    return rows * n / (rounds * clusters * height * width)


class TallGemm:
    """`out[T, n] (+)= x[T, k] @ weight[n, k].T (+ bias)` for many rows, 16-bit activations; with `gated`, the
    weight holds gate rows then up rows and `out = silu(gate) * up`.
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
        self._gated = gated
        self._accumulate = int(accumulate)
        source = KernelSource.of("linear/hopper_tall.cu", GATED=int(gated), **type_define("ACT", act))
        self._kernel = gpu.kernel(
            source, "hopper_tall", signature="mmpppiiii", shared_bytes=_SHARED, cluster=_CLUSTER
        )
        self._clusters = min(self._kernel.max_clusters(_THREADS), gpu.num_multiprocessors // _CLUSTER)

    @staticmethod
    def serves(gpu: CudaDevice, act: DType, n: int, k: int, out: DType) -> bool:
        """Whether the kernel runs here and handles these types and sizes."""
        fits = n % 8 == 0 and k % 8 == 0
        return gpu.capability == (9, 0) and act is not DType.float32 and out is act and fits

    def suits(self, rows: int) -> bool:
        """Whether it is the fastest for so many rows."""
        share = share_of_work(rows, self._n, gated=self._gated, clusters=self._clusters)
        return share >= _LEAST_SHARE[self._gated]

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor, *, bias: Tensor | None = None) -> None:
        """Enqueue the product for the rows of `x`."""
        rows, k, size = x.shape[0], self._k, self._act.itemsize
        columns = _WIDTH // 2 if self._gated else _WIDTH
        tiles = -(-rows // (_CLUSTER * _ROWS)) * -(-self._n // columns)
        weight_rows = self._n * (2 if self._gated else 1)
        boxes = (
            self._gpu.tensor_map(
                x, self._act, sizes=(k, rows), strides=(x.strides[0] * size,), box=(_CHUNK, _ROWS)
            ),
            self._gpu.tensor_map(
                weight, self._act, sizes=(k, weight_rows), strides=(k * size,), box=(_CHUNK, _WIDTH // 2)
            ),
        )
        self._kernel.launch(
            self._gpu.stream.handle,
            (min(tiles, self._clusters) * _CLUSTER,),
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
