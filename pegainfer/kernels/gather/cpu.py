"""Rows by index on the CPU."""

from __future__ import annotations

from pegainfer.kernels.native import native_kernel
from pegainfer.ops.gather import GatherRowsFacts, gather_rows
from pegainfer.ops.op import Launcher
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

__all__: list[str] = []


@gather_rows.provider("native", DeviceKind.cpu)
def _bind(facts: GatherRowsFacts, device: Device) -> Launcher | None:
    kernel = native_kernel(device, "pega_gather_rows")
    if kernel is None or facts.act is not DType.float32:
        return None
    size = facts.size

    def launch(*, x: Tensor, indices: Tensor, out: Tensor) -> None:
        kernel(
            x.data_ptr,
            x.strides[0],
            indices.data_ptr,
            out.data_ptr,
            out.strides[0],
            indices.shape[0],
            size,
            x.shape[0],
        )

    return launch
