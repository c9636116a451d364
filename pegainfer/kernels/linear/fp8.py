"""Products with fp8 weights on a GPU, which keeps them as they are: half the bytes to hold and to read.

Up to `_DIRECT_ROWS` rows a kernel of our own reads the numbers and their scales, several times if need be;
for more the matrix is expanded to the activation type in memory that layers share, and a library multiplies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pegainfer.kernels.cuda_source import type_define
from pegainfer.kernels.linear.expand_fp8 import ExpandFp8, block_scales, packed_fp8_bytes
from pegainfer.ops.linear import LinearFacts
from pegainfer.ops.norm_linear import NormLinearFacts
from pegainfer.ops.raw_weight import RawWeight, require_parts
from pegainfer.runtime.cuda.module import KernelSource
from pegainfer.runtime.dtypes import FP8_BLOCK, DType, WeightFormat
from pegainfer.runtime.tensor import Tensor

if TYPE_CHECKING:
    from pegainfer.kernels.linear.cuda import CudaLinear
    from pegainfer.runtime.cuda.device import CudaDevice

__all__ = ["Fp8Linear", "Fp8NormLinear"]

_WARPS = 8
_CHUNK = 64  # columns
_VARIANTS = {8: ((4, 4), (2, 5), (2, 3), (1, 3)), 16: ((4, 3), (2, 4), (2, 2), (1, 2))}
"""Of skinny_fp8.cu, by most tokens: row tiles and ring stages, the best first."""

_KERNEL_ROWS = 16
_DIRECT_ROWS = 64
"""Reading the weight once for 16 rows costs a fifth of expanding it: a byte a number, not one read, two
written and two read again.
"""
_STATIC_SHARED = 1024  # room for what the kernel declares itself


class _SkinnyFp8:
    """`SkinnyGemm` over fp8 numbers and their scales."""

    def __init__(
        self,
        gpu: CudaDevice,
        act: DType,
        *,
        n: int,
        k: int,
        norm: bool = False,
        gated: bool = False,
        out: DType,
        accumulate: bool = False,
    ) -> None:
        self._sizes = (n, k)
        self._numbers = n * k * (2 if gated else 1)
        self._accumulate = int(accumulate)
        self._blocks = min(gpu.num_multiprocessors, n)
        self._stream = gpu.stream.handle
        self._variants = []
        defines = {"NORM": int(norm), "GATED": int(gated)} | ({"OUT_F32": 1} if out is DType.float32 else {})
        least = gpu.max_shared_bytes // 2 + _STATIC_SHARED  # one block a multiprocessor; see `SkinnyGemm`
        for tokens, shapes in _VARIANTS.items():
            for row_tiles, stages in shapes:
                rows = 16 * row_tiles
                stage_bytes = rows * (_CHUNK + 4) + tokens * _CHUNK * 2 + int(norm) * _CHUNK * 4
                buffers = 1 if tokens > 8 else 2
                shared_bytes = _WARPS * (stages * stage_bytes + buffers * rows * tokens * 4)
                if shared_bytes + _STATIC_SHARED <= gpu.max_shared_bytes:
                    break
            sizes = {"TOKENS": tokens, "ROW_TILES": row_tiles, "STAGES": stages}
            kernel = gpu.kernel(
                KernelSource.of("linear/skinny_fp8.cu", **sizes, **defines, **type_define("ACT", act)),
                "skinny_fp8",
                signature="ppppppppiiiif",
                shared_bytes=max(shared_bytes, least),
            )
            self._variants.append((tokens, kernel))

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
        """Enqueue the product for at most `_KERNEL_ROWS` rows."""
        rows = x.shape[0]
        kernel = next(kernel for tokens, kernel in self._variants if rows <= tokens)
        kernel.launch(
            self._stream,
            (self._blocks,),
            _WARPS * 32,
            x.data_ptr,
            x.strides[0],
            weight.data_ptr,
            weight.data_ptr + self._numbers,
            bias.data_ptr if bias else 0,
            norm_weight.data_ptr if norm_weight else 0,
            out.data_ptr,
            out.strides[0],
            rows,
            *self._sizes,
            self._accumulate,
            eps,
        )


class Fp8Linear:
    """The launcher of the op `linear` for fp8 weights. `dense` is the one for the same matrix in the type of
    the activations, row-major.

    A packed weight is the numbers `[out_features, in_features]`, then the scales of its blocks.
    """

    def __init__(self, facts: LinearFacts, gpu: CudaDevice, *, dense: CudaLinear) -> None:
        self._facts = facts
        self._gpu = gpu
        self._dense = dense
        n, k = facts.out_features, facts.in_features
        self._skinny = _SkinnyFp8(gpu, facts.act, n=n, k=k, out=facts.out_dtype, accumulate=facts.accumulate)
        self._expand = ExpandFp8(gpu, facts.act)
        self._expanded = gpu.workspace("fp8-expanded", n * k * facts.act.itemsize)

    @staticmethod
    def serves(facts: LinearFacts) -> bool:
        """Whether the kernels handle these facts."""
        return facts.format is WeightFormat.fp8 and ExpandFp8.serves(facts.act, facts.in_features)

    def packed_bytes(self) -> int:
        """Bytes of the packed weight."""
        return packed_fp8_bytes(self._facts.out_features, self._facts.in_features)

    def pack(self, *parts: RawWeight) -> Tensor:
        """Matrices below one another in device memory; raises `WeightsError` when they are not what the facts
        name, or when rows of one block have several scales (of matrices that meet at no multiple of 128).
        """
        n, k = self._facts.out_features, self._facts.in_features
        require_parts(parts, WeightFormat.fp8, (n, k))
        packed, start = self._gpu.empty((self.packed_bytes(),), DType.uint8), 0
        scales = block_scales([raw.scales for raw in parts if raw.scales is not None])
        for data in (*(raw.data for raw in parts), scales.view(np.uint8)):
            target = packed.slice(0, start, start + data.size)
            self._gpu.upload(np.ascontiguousarray(data).reshape(-1), target)
            start += data.size
        return packed

    def __call__(self, *, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        """Enqueue the product."""
        rows = x.shape[0]
        if rows > _DIRECT_ROWS or (rows > _KERNEL_ROWS and self._dense.is_to_be_measured(rows)):
            self._run_expanded(x, weight, out, bias)
            return
        for start in range(0, rows, _KERNEL_ROWS):
            stop = min(start + _KERNEL_ROWS, rows)
            self._skinny(x.slice(0, start, stop), weight, out.slice(0, start, stop), bias=bias)

    def _run_expanded(self, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None) -> None:
        n, k = self._facts.out_features, self._facts.in_features
        self._expand(weight.data_ptr, self._expanded.data_ptr, n, k)
        self._dense(x=x, weight=self._expanded, out=out, bias=bias)


class Fp8NormLinear:
    """The launcher of the op `norm_linear`, over what `Fp8Linear` packs."""

    def __init__(self, facts: NormLinearFacts, gpu: CudaDevice) -> None:
        self._eps = facts.eps
        self._skinny = _SkinnyFp8(
            gpu,
            facts.act,
            n=facts.out_features,
            k=facts.in_features,
            norm=True,
            gated=facts.gated,
            out=facts.out or facts.act,
        )

    @staticmethod
    def handles(facts: NormLinearFacts) -> bool:
        """Whether the kernel handles these facts: gate and up rows must not share a block."""
        return Fp8Linear.serves(facts.linear) and (not facts.gated or facts.out_features % FP8_BLOCK == 0)

    def serves(self, rows: int) -> bool:
        """Whether it computes so many rows."""
        return rows <= _KERNEL_ROWS

    def __call__(
        self,
        *,
        x: Tensor,
        norm: Tensor,
        weight: Tensor,
        normed: Tensor,
        out: Tensor,
        bias: Tensor | None = None,
    ) -> None:
        """Enqueue the fused product of a number of rows that it serves."""
        self._skinny(x, weight, out, bias=bias, norm_weight=norm, eps=self._eps)
