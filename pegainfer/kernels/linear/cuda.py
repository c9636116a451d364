"""Dense products on a GPU: our own kernels for few rows and for gates, cuBLASLt for everything else.

Weights are row-major in the activation type; quantised ones are expanded when they are packed, but for fp8
ones of usual sizes (see `fp8`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pegainfer.kernels.cuda_source import cuda_device, type_define
from pegainfer.kernels.linear.fp8 import Fp8Linear, Fp8NormLinear
from pegainfer.kernels.linear.gated import GatedGemm
from pegainfer.kernels.linear.hopper import HopperGemm
from pegainfer.kernels.linear.skinny import MAX_ROWS, SkinnyGemm
from pegainfer.ops.linear import LinearFacts, linear
from pegainfer.ops.norm import RmsNormFacts, rms_norm
from pegainfer.ops.norm_linear import NormLinearFacts, norm_linear
from pegainfer.ops.op import Launcher, bind
from pegainfer.ops.raw_weight import RawWeight, require_parts
from pegainfer.runtime.cuda.algorithms import Product
from pegainfer.runtime.cuda.module import KernelSource
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.dtypes import DType, WeightFormat
from pegainfer.runtime.tensor import Tensor

if TYPE_CHECKING:
    from pegainfer.runtime.cuda.device import CudaDevice
    from pegainfer.runtime.cuda.launch import Kernel

__all__ = ["CudaLinear", "device_rows"]

_BIAS_THREADS = 256
_BETTER_FUSED_ROWS = 8
"""Up to so many rows the norm is better part of the product, though it is done in every block."""

_FORMAT = {
    DType.float32: WeightFormat.f32,
    DType.bfloat16: WeightFormat.bf16,
    DType.float16: WeightFormat.f16,
}


def device_rows(gpu: CudaDevice, parts: Sequence[RawWeight], act: DType) -> Tensor:
    """Weights below one another in device memory: uint8, row-major in the type `act`."""
    sizes = [math.prod(raw.shape) * act.itemsize for raw in parts]
    rows, start = gpu.empty((sum(sizes),), DType.uint8), 0
    for raw, size in zip(parts, sizes, strict=True):
        data = raw.data
        if raw.format is not _FORMAT[act]:
            data = raw.dequantize().astype(act.numpy).view(np.uint8)
        gpu.upload(np.ascontiguousarray(data).reshape(-1), rows.slice(0, start, start + size))
        start += size
    return rows


class CudaLinear:
    """The launcher of the op `linear`."""

    def __init__(self, facts: LinearFacts, gpu: CudaDevice) -> None:
        self._facts = facts
        self._gpu = gpu
        self._skinny: SkinnyGemm | None = None
        self._out = facts.out or facts.act
        self._bias_kernel: Kernel | None = None
        if facts.has_bias:
            source = KernelSource.of("linear/add_bias.cu", **type_define("ACT", self._out))
            self._bias_kernel = gpu.kernel(source, "add_bias", signature="pppi")
        if SkinnyGemm.serves(facts.act, facts.in_features):
            self._skinny = SkinnyGemm(
                gpu,
                facts.act,
                n=facts.out_features,
                k=facts.in_features,
                out=self._out,
                accumulate=facts.accumulate,
            )
        self._hopper: HopperGemm | None = None
        if HopperGemm.serves(gpu, facts.act, facts.out_features, facts.in_features, self._out):
            self._hopper = HopperGemm(
                gpu,
                facts.act,
                n=facts.out_features,
                k=facts.in_features,
                accumulate=facts.accumulate,
            )
        self._product = Product(facts.out_features, facts.in_features, facts.act, self._out, facts.accumulate)
        if facts.act is not DType.float32:
            gpu.products.add(self._product)

    def packed_bytes(self) -> int:
        """Bytes of the packed weight."""
        return self._facts.out_features * self._facts.in_features * self._facts.act.itemsize

    def pack(self, *parts: RawWeight) -> Tensor:
        """Matrices below one another in device memory; raises `WeightsError` when they are not what the facts
        name.
        """
        require_parts(parts, self._facts.format, (self._facts.out_features, self._facts.in_features))
        return device_rows(self._gpu, parts, self._facts.act)

    def __call__(self, *, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        """Enqueue the product."""
        rows = x.shape[0]
        if self._skinny is not None and rows <= MAX_ROWS:
            self._skinny(x, weight, out, bias=bias)
            return
        if self._hopper is not None and rows <= self._hopper.max_rows:
            self._hopper(x, weight, out, bias=bias)
            return
        lt, addresses = self._gpu.cublaslt, (x.data_ptr, weight.data_ptr, out.data_ptr)
        plan = lt.plan(self._product, rows, x_stride=x.strides[0], out_stride=out.strides[0])
        if lt.algorithms.is_wanted(self._product, rows):
            lt.measure(plan, *addresses)
        plan.run(*addresses)
        if bias is not None:
            self._add_bias(bias, out)

    def is_to_be_measured(self, rows: int) -> bool:
        """Whether the library's algorithms for so many rows are to be compared at the next call."""
        return self._gpu.cublaslt.algorithms.is_wanted(self._product, rows)

    def _add_bias(self, bias: Tensor, out: Tensor) -> None:
        assert self._bias_kernel is not None, "a linear that was bound without a bias was given one"
        columns = self._facts.out_features
        grid = (out.shape[0], -(-columns // _BIAS_THREADS))
        arguments = (bias.data_ptr, out.data_ptr, out.strides[0], columns)
        self._bias_kernel.launch(self._gpu.stream.handle, grid, _BIAS_THREADS, *arguments)


@linear.provider("cuda", DeviceKind.cuda)
def _bind(facts: LinearFacts, device: Device) -> Launcher | None:
    gpu = cuda_device(device)
    if Fp8Linear.serves(facts):
        return Fp8Linear(facts, gpu, dense=CudaLinear(replace(facts, format=_FORMAT[facts.act]), gpu))
    return CudaLinear(facts, gpu)


class CudaNormLinear:
    """The launcher of the op `norm_linear`, over the rows that `CudaLinear` packs."""

    def __init__(self, facts: NormLinearFacts, gpu: CudaDevice) -> None:
        self._eps = facts.eps
        n, k, out = facts.out_features, facts.in_features, facts.out or facts.act
        self._skinny = SkinnyGemm(gpu, facts.act, n=n, k=k, norm=True, gated=facts.gated, out=out)
        self._norm = bind(rms_norm, RmsNormFacts(k, facts.eps, facts.act), gpu)
        self._skinny_rows, self._hopper_rows = MAX_ROWS, 0
        self._hopper: HopperGemm | None = None
        if HopperGemm.serves(gpu, facts.act, n, k, out):
            self._hopper = HopperGemm(gpu, facts.act, n=n, k=k, gated=facts.gated)
            self._hopper_rows = self._hopper.max_rows
            if self._hopper_rows:
                self._skinny_rows = _BETTER_FUSED_ROWS
        self._gated: GatedGemm | None = None
        if facts.gated and GatedGemm.serves(gpu, facts.act, n, k, out):
            self._gated = GatedGemm(gpu, facts.act, n=n, k=k)

    def serves(self, rows: int) -> bool:
        """Whether it is the way to compute so many rows."""
        few = rows <= max(self._skinny_rows, self._hopper_rows)
        return few or (self._gated is not None and self._gated.suits(rows))

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
        rows = x.shape[0]
        if rows <= self._skinny_rows:
            self._skinny(x, weight, out, bias=bias, norm_weight=norm, eps=self._eps)
            return
        self._norm(x=x, weight=norm, out=normed)
        product = self._hopper if rows <= self._hopper_rows else self._gated
        assert product is not None
        product(normed, weight, out, bias=bias)


@norm_linear.provider("cuda", DeviceKind.cuda)
def _bind_norm(facts: NormLinearFacts, device: Device) -> Launcher | None:
    if Fp8Linear.serves(facts.linear):
        return Fp8NormLinear(facts, cuda_device(device)) if Fp8NormLinear.handles(facts) else None
    if not SkinnyGemm.serves(facts.act, facts.in_features):
        return None
    return CudaNormLinear(facts, cuda_device(device))
