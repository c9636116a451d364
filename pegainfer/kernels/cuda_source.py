"""What the CUDA providers share: the define of an element type, and the device behind the protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from pegainfer.runtime.device import Device
from pegainfer.runtime.dtypes import DType

if TYPE_CHECKING:
    from pegainfer.runtime.cuda.device import CudaDevice

__all__ = ["cuda_device", "type_define"]

_SUFFIX = {DType.float32: "F32", DType.bfloat16: "BF16", DType.float16: "F16"}


def cuda_device(device: Device) -> CudaDevice:
    """The device as what it is; providers of kind cuda are only asked with one."""
    return cast("CudaDevice", device)


def type_define(prefix: str, dtype: DType) -> dict[str, int]:
    """The define that chooses an element type in a source: `ACT_BF16=1`, `KV_F32=1`."""
    return {f"{prefix}_{_SUFFIX[dtype]}": 1}
