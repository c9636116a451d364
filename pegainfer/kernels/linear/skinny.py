"""The GPU product of few rows: one launch that reads the weight once, with norm before and gate after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pegainfer.kernels.cuda_source import type_define
from pegainfer.runtime.cuda.module import KernelSource
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

if TYPE_CHECKING:
    from pegainfer.runtime.cuda.device import CudaDevice

__all__ = ["MAX_ROWS", "SkinnyGemm", "skinny_source"]

MAX_ROWS = 16
_WARPS = 8
_CHUNK = 64  # columns
_VARIANTS = {8: ((2, 5), (2, 4), (2, 3), (1, 3)), 16: ((2, 4), (2, 3), (2, 2), (1, 2))}
"""Of skinny_gemm.cu, by most tokens: row tiles and ring stages, the best first."""

_STATIC_SHARED = 1024  # room for what the kernel declares itself


def skinny_source(
    act: DType,
    tokens: int,
    row_tiles: int,
    stages: int,
    *,
    norm: bool = False,
    gated: bool = False,
    out: DType | None = None,
) -> KernelSource:
    """The kernel for up to `tokens` rows (8 or 16), tiles of `row_tiles` times 16 weight rows, `stages`."""
    defines = {
        "TOKENS": tokens,
        "ROW_TILES": row_tiles,
        "STAGES": stages,
        "NORM": int(norm),
        "GATED": int(gated),
    }
    if out is DType.float32:
        defines["OUT_F32"] = 1
    return KernelSource.of("linear/skinny_gemm.cu", **defines, **type_define("ACT", act))


class SkinnyGemm:
    """`out[T, n] (+)= x[T, k] @ weight[n, k].T (+ bias)` for `T <= MAX_ROWS`, 16-bit activations.

    With `norm`, x is RMS-normalised first; with `gated`, the weight holds gate rows then up rows and
    `out = silu(gate) * up`.
    """

    def __init__(
        self,
        gpu: CudaDevice,
        act: DType,
        *,
        n: int,
        k: int,
        norm: bool = False,
        gated: bool = False,
        out: DType | None = None,
        accumulate: bool = False,
    ) -> None:
        self._sizes = (n, k)
        self._accumulate = int(accumulate)
        self._blocks = min(gpu.num_multiprocessors, n)
        self._stream = gpu.stream.handle
        self._variants = []
        # More than half of what there is, so that two blocks never share a multiprocessor: a kernel that
        # starts while its predecessor still runs would crowd onto those that are free, and leave others idle.
        least = gpu.max_shared_bytes // 2 + _STATIC_SHARED
        for tokens, shapes in _VARIANTS.items():
            for row_tiles, stages in shapes:
                rows = 16 * row_tiles
                stage_bytes = (rows + tokens) * _CHUNK * 2 + int(norm) * _CHUNK * 4
                buffers = 1 if tokens > 8 else 2
                shared_bytes = _WARPS * (stages * stage_bytes + buffers * rows * tokens * 4)
                if shared_bytes + _STATIC_SHARED <= gpu.max_shared_bytes:
                    break
            kernel = gpu.kernel(
                skinny_source(act, tokens, row_tiles, stages, norm=norm, gated=gated, out=out),
                "skinny_gemm",
                signature="pppppppiiiif",
                shared_bytes=max(shared_bytes, least),
            )
            self._variants.append((tokens, kernel))

    @staticmethod
    def serves(act: DType, k: int) -> bool:
        """Whether the kernel handles this activation type and row length."""
        return act is not DType.float32 and k % _CHUNK == 0

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        out: Tensor,
        *,
        bias: Tensor | None = None,
        norm_weight: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        """Enqueue the product for the rows of `x`."""
        rows = x.shape[0]
        kernel = next(kernel for tokens, kernel in self._variants if rows <= tokens)
        n, k = self._sizes
        kernel.launch(
            self._stream,
            (self._blocks,),
            _WARPS * 32,
            x.data_ptr,
            x.strides[0],
            weight.data_ptr,
            bias.data_ptr if bias else 0,
            norm_weight.data_ptr if norm_weight else 0,
            out.data_ptr,
            out.strides[0],
            rows,
            n,
            k,
            self._accumulate,
            eps,
        )
