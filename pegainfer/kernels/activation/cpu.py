"""SwiGLU on the CPU."""

from __future__ import annotations

from pegainfer.kernels.native import native_kernel
from pegainfer.ops.activation import SiluAndMulFacts, silu_and_mul
from pegainfer.ops.op import Launcher
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

__all__: list[str] = []


@silu_and_mul.provider("native", DeviceKind.cpu)
def _bind(facts: SiluAndMulFacts, device: Device) -> Launcher | None:
    kernel = native_kernel(device, "pega_silu_and_mul")
    if kernel is None or facts.act is not DType.float32:
        return None
    size = facts.size

    def launch(*, gate_up: Tensor, out: Tensor) -> None:
        kernel(gate_up.data_ptr, gate_up.strides[0], out.data_ptr, out.strides[0], gate_up.shape[0], size)

    return launch
