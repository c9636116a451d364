"""Tensor maps: how the copy engine of a multiprocessor finds boxes of a tensor. From Hopper on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pegainfer.runtime.cuda.driver import check, cuda
from pegainfer.runtime.dtypes import DType

__all__ = ["make_tensor_map"]

_DATA_TYPE = {DType.bfloat16: "BFLOAT16", DType.float16: "FLOAT16"}


def make_tensor_map(
    address: int, dtype: DType, *, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> Any:
    """The map of a tensor of 16-bit elements, dimensions fastest first; `strides` are bytes, of all but the
    first. Boxes of 128-byte rows come to lie in shared memory with the 128-byte swizzle.
    """
    kinds = cuda.CUtensorMapDataType
    return check(
        cuda.cuTensorMapEncodeTiled(
            getattr(kinds, f"CU_TENSOR_MAP_DATA_TYPE_{_DATA_TYPE[dtype]}"),
            len(sizes),
            address,
            [cuda.cuuint64_t(size) for size in sizes],
            [cuda.cuuint64_t(stride) for stride in strides],
            [cuda.cuuint32_t(size) for size in box],
            [cuda.cuuint32_t(1) for _ in sizes],
            cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
