"""fp8 weights on a GPU as rows of the activation type: expanded where they lie, not on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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

Scales = np.ndarray[Any, np.dtype[np.float32]]


def packed_fp8_bytes(n: int, k: int) -> int:
    """Bytes of the numbers `[n, k]`, and behind them the float32 scales of their blocks."""
    return n * k + -(-n // FP8_BLOCK) * (k // FP8_BLOCK) * 4


def block_scales(by_row: Sequence[Scales]) -> Scales:
    """The scales of the blocks of fp8 weights below one another, float32 `[ceil(n / 128), k / 128]`, from
    those of their rows. Raises `WeightsError` when rows of one block have several.
    """
    rows = by_row[0] if len(by_row) == 1 else np.concatenate(by_row)
    scales = np.ascontiguousarray(rows[::FP8_BLOCK])
    if not np.array_equal(np.repeat(scales, FP8_BLOCK, axis=0)[: len(rows)], rows):
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
        assert raw.scales is not None
        numbers, scales = np.ascontiguousarray(raw.data), block_scales([raw.scales])
        for array, target in ((numbers, staging.data_ptr), (scales, staging.data_ptr + n * k)):
            stream = self._gpu.stream.handle
            check(cuda.cuMemcpyHtoDAsync(target, array.ctypes.data, array.nbytes, stream))
        self(staging.data_ptr, out, n, k)
        self._gpu.stream.synchronize()
