"""Mixture of experts on a GPU: a router, and experts that are read pair by pair or in a grouped product.

The weights of all experts lie one after the other, row-major in the activation type; quantised ones are
expanded when they are packed, fp8 ones of usual sizes on the GPU.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from pegainfer.errors import WeightsError
from pegainfer.kernels.cuda_source import cuda_device, type_define
from pegainfer.kernels.linear.expand_fp8 import ExpandFp8, packed_fp8_bytes
from pegainfer.kernels.moe.grouped import GroupedExperts
from pegainfer.ops.moe import MoeExpertsFacts, MoeRouterFacts, moe_experts, moe_router
from pegainfer.ops.op import Launcher
from pegainfer.ops.raw_weight import RawWeight
from pegainfer.runtime.cuda.module import KernelSource
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.dtypes import DType, WeightFormat
from pegainfer.runtime.tensor import Tensor

if TYPE_CHECKING:
    from pegainfer.runtime.cuda.device import CudaDevice

__all__ = ["CudaExperts"]

_WARPS = 8
_WARP_BYTES = 8192  # of shared memory, as in direct.cu
_ROUTER_WARPS = 4
_MAX_EXPERTS = 512
_MAX_TOP_K = 32
_DIRECT_TOKENS = 4
"""Up to here most pairs have an expert of their own, and sorting them would cost more than it saves."""

_MAX_STEP_TOKENS = 4096
_MAX_PAIRS = 65535  # a dimension of a grid
_SCRATCH_BYTES = 192 << 20
_FORMAT = {
    DType.float32: WeightFormat.f32,
    DType.bfloat16: WeightFormat.bf16,
    DType.float16: WeightFormat.f16,
}


@moe_router.provider("cuda", DeviceKind.cuda)
def _bind_router(facts: MoeRouterFacts, device: Device) -> Launcher | None:
    if facts.num_experts > _MAX_EXPERTS or facts.top_k > _MAX_TOP_K:
        return None
    gpu = cuda_device(device)
    source = KernelSource.of(
        "moe/router.cu",
        NUM_EXPERTS=facts.num_experts,
        TOP_K=facts.top_k,
        RENORMALIZE=int(facts.renormalize),
        WARPS=_ROUTER_WARPS,
        **type_define("ACT", facts.act),
    )
    kernel = gpu.kernel(source, "moe_router", signature="ppppppi")
    stream = gpu.stream.handle

    def launch(*, logits: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        kernel.launch(
            stream,
            (-(-logits.shape[0] // _ROUTER_WARPS),),
            _ROUTER_WARPS * 32,
            logits.data_ptr,
            logits.strides[0],
            topk_ids.data_ptr,
            topk_ids.strides[0],
            topk_weights.data_ptr,
            topk_weights.strides[0],
            logits.shape[0],
        )

    return launch


class CudaExperts:
    """The launcher of the op `moe_experts`. Long steps are cut, so that scratch memory stays bounded."""

    def __init__(self, facts: MoeExpertsFacts, gpu: CudaDevice) -> None:
        self._facts = facts
        self._gpu = gpu
        self._stream = gpu.stream.handle
        source = KernelSource.of(
            "moe/direct.cu",
            HIDDEN=facts.hidden_size,
            INTERMEDIATE=facts.intermediate_size,
            TOP_K=facts.top_k,
            WARPS=_WARPS,
            **type_define("ACT", facts.act),
        )
        shared_bytes = _WARPS * _WARP_BYTES
        self._direct_gate_up = gpu.kernel(
            source, "direct_gate_up", signature="pppppp", shared_bytes=shared_bytes
        )
        self._direct_down = gpu.kernel(source, "direct_down", signature="pppppppp", shared_bytes=shared_bytes)
        pair_bytes = (facts.hidden_size + facts.intermediate_size) * facts.act.itemsize
        most = min(_MAX_STEP_TOKENS, _MAX_PAIRS // facts.top_k, _SCRATCH_BYTES // (facts.top_k * pair_bytes))
        self._step_tokens = max(most, 1)
        activated_bytes = self._step_tokens * facts.top_k * facts.intermediate_size * facts.act.itemsize
        self._activated = gpu.workspace("moe-activated", activated_bytes)
        self._expand: ExpandFp8 | None = None
        if facts.format is WeightFormat.fp8 and ExpandFp8.serves(
            facts.act, math.gcd(facts.hidden_size, facts.intermediate_size)
        ):
            self._expand = ExpandFp8(gpu, facts.act)
            largest = packed_fp8_bytes(2 * facts.intermediate_size, facts.hidden_size)
            self._staging = gpu.workspace("fp8-staging", largest)
        self._grouped: GroupedExperts | None = None
        if GroupedExperts.serves(facts):
            self._grouped = GroupedExperts(
                facts, gpu, max_tokens=self._step_tokens, activated=self._activated
            )

    def gate_up_bytes(self) -> int:
        """Bytes of all experts' gate and up rows."""
        return 2 * self.down_bytes()

    def down_bytes(self) -> int:
        """Bytes of all experts' down rows."""
        facts = self._facts
        return facts.num_experts * facts.hidden_size * facts.intermediate_size * facts.act.itemsize

    def pack_expert(
        self, expert: int, gate_up_raw: RawWeight, down_raw: RawWeight, gate_up: Tensor, down: Tensor
    ) -> None:
        """Copy one expert's rows into place; raises `WeightsError` when they are not those that the facts
        name.
        """
        hidden, intermediate = self._facts.hidden_size, self._facts.intermediate_size
        self._copy(expert, gate_up_raw, (2 * intermediate, hidden), gate_up)
        self._copy(expert, down_raw, (hidden, intermediate), down)

    def __call__(
        self,
        *,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        out: Tensor,
    ) -> None:
        """Enqueue the experts of every row and the sum of what they say."""
        num_tokens = x.shape[0]
        run = self._run_direct
        if self._grouped is not None and num_tokens > _DIRECT_TOKENS:
            run = self._grouped.run
        for start in range(0, num_tokens, self._step_tokens):
            stop = min(start + self._step_tokens, num_tokens)
            rows = (tensor.slice(0, start, stop) for tensor in (x, topk_ids, topk_weights, out))
            run(gate_up, down, *rows)

    def _run_direct(
        self, gate_up: Tensor, down: Tensor, x: Tensor, ids: Tensor, weights: Tensor, out: Tensor
    ) -> None:
        facts, num_tokens = self._facts, x.shape[0]
        self._direct_gate_up.launch(
            self._stream,
            (-(-facts.intermediate_size // _WARPS), num_tokens * facts.top_k),
            _WARPS * 32,
            x.data_ptr,
            x.strides[0],
            gate_up.data_ptr,
            ids.data_ptr,
            ids.strides[0],
            self._activated.data_ptr,
        )
        self._direct_down.launch(
            self._stream,
            (-(-facts.hidden_size // _WARPS), num_tokens),
            _WARPS * 32,
            self._activated.data_ptr,
            down.data_ptr,
            ids.data_ptr,
            ids.strides[0],
            weights.data_ptr,
            weights.strides[0],
            out.data_ptr,
            out.strides[0],
        )

    def _copy(self, expert: int, raw: RawWeight, shape: tuple[int, int], packed: Tensor) -> None:
        from pegainfer.runtime.cuda.driver import check, cuda

        act, format = self._facts.act, self._facts.format
        if raw.format is not format or raw.shape != shape:
            raise WeightsError(
                f"expected a {format} weight of shape {list(shape)}, got {raw.format} {list(raw.shape)}"
            )
        if self._expand is not None:
            target = packed.data_ptr + expert * shape[0] * shape[1] * act.itemsize
            self._expand.load(raw, target, self._staging)
            return
        data = raw.data
        if format is not _FORMAT[act]:
            data = raw.dequantize().astype(act.numpy).view(np.uint8)
        data = np.ascontiguousarray(data)
        target = packed.data_ptr + expert * data.nbytes
        check(cuda.cuMemcpyHtoDAsync(target, data.ctypes.data, data.nbytes, self._stream))
        self._gpu.stream.synchronize()


@moe_experts.provider("cuda", DeviceKind.cuda)
def _bind_experts(facts: MoeExpertsFacts, device: Device) -> Launcher | None:
    return CudaExperts(facts, cuda_device(device))
