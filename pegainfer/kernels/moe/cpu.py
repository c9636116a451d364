"""Mixture of experts on the CPU."""

from __future__ import annotations

import numpy as np

from pegainfer.errors import WeightsError
from pegainfer.kernels.linear.cpu import NATIVE_FORMATS, packed_bytes
from pegainfer.kernels.native import native_kernel
from pegainfer.ops.moe import MoeExpertsFacts, MoeRouterFacts, moe_experts, moe_router
from pegainfer.ops.op import Launcher
from pegainfer.ops.raw_weight import RawWeight
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


class _NativeExperts:
    """The launcher of `moe_experts`."""

    def __init__(self, facts: MoeExpertsFacts, device: Device) -> None:
        kernel = native_kernel(device, f"pega_moe_experts_{facts.format}")
        pack = native_kernel(device, f"pega_linear_pack_{facts.format}")
        assert kernel is not None
        assert pack is not None
        self._facts = facts
        self._device = device
        self._kernel = kernel
        self._pack = pack
        self._gate_up_shape = (2 * facts.intermediate_size, facts.hidden_size)
        self._down_shape = (facts.hidden_size, facts.intermediate_size)

    def gate_up_bytes(self) -> int:
        """Bytes of all experts' packed gates and ups."""
        return self._facts.num_experts * packed_bytes(self._facts.format, *self._gate_up_shape)

    def down_bytes(self) -> int:
        """Bytes of all experts' packed downs."""
        return self._facts.num_experts * packed_bytes(self._facts.format, *self._down_shape)

    def pack_expert(
        self, expert: int, gate_up_raw: RawWeight, down_raw: RawWeight, gate_up: Tensor, down: Tensor
    ) -> None:
        """Pack one expert into place; raises `WeightsError` for another shape or format."""
        for raw, shape, target in (
            (gate_up_raw, self._gate_up_shape, gate_up),
            (down_raw, self._down_shape, down),
        ):
            if raw.format is not self._facts.format or raw.shape != shape:
                raise WeightsError(
                    f"expected a {self._facts.format} weight of shape {list(shape)}, "
                    f"got {raw.format} {list(raw.shape)}"
                )
            data = np.ascontiguousarray(raw.data)
            offset = expert * packed_bytes(raw.format, *shape)
            self._pack(data.ctypes.data, *shape, target.data_ptr + offset)
            self._device.stream.synchronize()

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
        """Enqueue the experts."""
        facts = self._facts
        self._kernel(
            x.data_ptr,
            x.strides[0],
            x.shape[0],
            gate_up.data_ptr,
            down.data_ptr,
            topk_ids.data_ptr,
            topk_ids.strides[0],
            topk_weights.data_ptr,
            topk_weights.strides[0],
            out.data_ptr,
            out.strides[0],
            facts.num_experts,
            facts.top_k,
            facts.hidden_size,
            facts.intermediate_size,
        )


@moe_experts.provider("native", DeviceKind.cpu)
def _bind_experts(facts: MoeExpertsFacts, device: Device) -> Launcher | None:
    if facts.act is not DType.float32 or facts.format not in NATIVE_FORMATS:
        return None
    if native_kernel(device, f"pega_moe_experts_{facts.format}") is None:
        return None
    return _NativeExperts(facts, device)
