"""fp8 weights on a GPU as rows of the activation type: expanded where they lie, not on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pegainfer.errors import WeightsError
from pegainfer.kernels.cuda_source import type_define
from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.cuda.module import KernelSource
from pegainfer.runtime.dtypes import FP8_BLOCK, DType
from pegainfer.runtime.tensor import Tensor

if TYPE_CHECKING:
    from pegainfer.runtime.cuda.device import CudaDevice

__all__ = ["ExpandFp8", "block_scales", "packed_fp8_bytes"]

_THREADS = 256
_NUMBERS = 16  # a thread's


def packed_fp8_bytes(n: int, k: int) -> int:
    """Bytes of the numbers `[n, k]`, and behind them the float32 scales of their blocks."""
    return n * k + -(-n // FP8_BLOCK) * (k // FP8_BLOCK) * 4


def block_scales(raw: RawWeight) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """The scales of the blocks of an fp8 weight, float32 `[ceil(n / 128), k / 128]`. Raises `WeightsError`
    when rows of one block have several (matrices that were stacked at no multiple of 128).
    """
    assert raw.scales is not None
    scales = np.ascontiguousarray(raw.scales[::FP8_BLOCK])
    if not np.array_equal(np.repeat(scales, FP8_BLOCK, axis=0)[: raw.shape[0]], raw.scales):
        raise WeightsError("rows of one block of an fp8 weight have different scales")
    return scales


class ExpandFp8:
    """`out[n, k] = numbers * scales`, rounded to the 16-bit type `act`; `k` must be a multiple of 128."""

    def __init__(self, gpu: CudaDevice, act: DType) -> None:
        self._gpu = gpu
        source = KernelSource.of("linear/expand_fp8.cu", **type_define("ACT", act))
        self._kernel = gpu.kernel(source, "expand_fp8", signature="pppii")

    @staticmethod
    def serves(act: DType, k: int) -> bool:
        """Whether the kernel handles this activation type and row length."""
        return act is not DType.float32 and k % FP8_BLOCK == 0

    def __call__(self, packed: int, out: int, n: int, k: int) -> None:
        """Enqueue the expansion of what lies at the address `packed` to the address `out`."""
        blocks = -(-n * k // (_THREADS * _NUMBERS))
        stream = self._gpu.stream.handle
        self._kernel.launch(stream, (blocks,), _THREADS, packed, packed + n * k, out, n, k)

    def load(self, raw: RawWeight, out: int, staging: Tensor) -> None:
        """Expand a weight of the host to the address `out`, through `staging` of `packed_fp8_bytes`."""
        from pegainfer.runtime.cuda.driver import check, cuda

        n, k = raw.shape
        numbers, scales = np.ascontiguousarray(raw.data), block_scales(raw)
        for array, target in ((numbers, staging.data_ptr), (scales, staging.data_ptr + n * k)):
            stream = self._gpu.stream.handle
            check(cuda.cuMemcpyHtoDAsync(target, array.ctypes.data, array.nbytes, stream))
        self(staging.data_ptr, out, n, k)
        self._gpu.stream.synchronize()
