"""RMSNorm on the CPU."""

from __future__ import annotations

from pegainfer.kernels.native import native_kernel
from pegainfer.ops.norm import RmsNormFacts, rms_norm
from pegainfer.ops.op import Launcher
from pegainfer.runtime.cpu.stream import float_bits
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

__all__: list[str] = []


@rms_norm.provider("native", DeviceKind.cpu)
def _bind(facts: RmsNormFacts, device: Device) -> Launcher | None:
    kernel = native_kernel(device, "pega_rms_norm")
    if kernel is None or facts.act is not DType.float32:
        return None
    size, eps = facts.size, float_bits(facts.eps)

    def launch(*, x: Tensor, weight: Tensor, out: Tensor) -> None:
        kernel(
            x.data_ptr,
            x.strides[0],
            weight.data_ptr,
            out.data_ptr,
            out.strides[0],
            x.shape[0],
            size,
            eps,
        )

    return launch
