"""The GPU product of gate and up for many rows on Hopper, with the gate in its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegainfer.kernels.cuda_source import type_define
from pegainfer.runtime.cuda.module import KernelSource
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

if TYPE_CHECKING:
    from pegainfer.runtime.cuda.device import CudaDevice

__all__ = ["GatedGemm", "share_of_work"]

_ROWS, _COLUMNS = 128, 128  # of the result, a tile
_CLUSTER = 2
_CHUNK = 64  # columns of x and the weight, a stage
_STAGES = 4
_SHARED = _STAGES * (_ROWS + 2 * _COLUMNS) * _CHUNK * 2 + 2048  # and alignment, barriers
_THREADS = 384

_LEAST_SHARE = 0.76
"""Of a launch's work that must be of use. Below, a library and a gate after it are faster, though that writes
and reads twice as many columns.
"""


def share_of_work(rows: int, n: int, clusters: int) -> float:
    """The part of what `clusters` clusters could compute for `[rows, n]` results, in as many rounds as they
    need, that they are asked for.
    """
    height = _CLUSTER * _ROWS
    rounds = -(-(-(-rows // height) * -(-n // _COLUMNS)) // clusters)
    return rows * n / (rounds * clusters * height * _COLUMNS)


class GatedGemm:
    """`out[T, n] = silu(x[T, k] @ gate[n, k].T) * (x @ up[n, k].T)` for many rows, 16-bit activations; the
    weight holds gate rows then up rows.
    """

    def __init__(self, gpu: CudaDevice, act: DType, *, n: int, k: int) -> None:
        self._gpu = gpu
        self._act = act
        self._n, self._k = n, k
        self._kernel = gpu.kernel(
            KernelSource.of("linear/hopper_gated.cu", **type_define("ACT", act)),
            "hopper_gated",
            signature="mmpppiii",
            shared_bytes=_SHARED,
            cluster=_CLUSTER,
        )
        self._clusters = min(self._kernel.max_clusters(_THREADS), gpu.num_multiprocessors // _CLUSTER)

    @staticmethod
    def serves(gpu: CudaDevice, act: DType, n: int, k: int, out: DType) -> bool:
        """Whether the kernel runs here and handles these types and sizes."""
        fits = n % 8 == 0 and k % 8 == 0
        return gpu.capability == (9, 0) and act is not DType.float32 and out is act and fits

    def suits(self, rows: int) -> bool:
        """Whether it is the fastest for so many rows."""
        return share_of_work(rows, self._n, self._clusters) >= _LEAST_SHARE

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor, *, bias: Tensor | None = None) -> None:
        """Enqueue the product for the rows of `x`."""
        rows, k, size = x.shape[0], self._k, self._act.itemsize
        tiles = -(-rows // (_CLUSTER * _ROWS)) * -(-self._n // _COLUMNS)
        boxes = (
            self._gpu.tensor_map(
                x, self._act, sizes=(k, rows), strides=(x.strides[0] * size,), box=(_CHUNK, _ROWS)
            ),
            self._gpu.tensor_map(
                weight, self._act, sizes=(k, 2 * self._n), strides=(k * size,), box=(_CHUNK, _COLUMNS)
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
        )
