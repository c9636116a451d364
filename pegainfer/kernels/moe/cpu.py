"""Mixture of experts on the CPU."""

from __future__ import annotations

from pegainfer.kernels.native import native_kernel
from pegainfer.ops.moe import MoeRouterFacts, moe_router
from pegainfer.ops.op import Launcher
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

__all__: list[str] = []


@moe_router.provider("native", DeviceKind.cpu)
def _bind_router(facts: MoeRouterFacts, device: Device) -> Launcher | None:
    kernel = native_kernel(device, "pega_moe_router")
    if kernel is None or facts.act is not DType.float32:
        return None
    sizes = (facts.num_experts, facts.top_k, int(facts.renormalize))

    def launch(*, logits: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
        kernel(
            logits.data_ptr,
            logits.strides[0],
            logits.shape[0],
            *sizes,
            topk_ids.data_ptr,
            topk_ids.strides[0],
            topk_weights.data_ptr,
            topk_weights.strides[0],
        )

    return launch
