"""The multiplication by packed weights on the CPU."""

from __future__ import annotations

import numpy as np

from pegainfer.kernels.native import address_of, native_kernel
from pegainfer.ops.linear import LinearFacts, linear
from pegainfer.ops.op import Launcher
from pegainfer.ops.raw_weight import RawWeight, require_parts, stack
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.dtypes import DType, WeightFormat
from pegainfer.runtime.tensor import Tensor

__all__ = ["NATIVE_FORMATS", "packed_bytes"]

NATIVE_FORMATS = frozenset(WeightFormat) - {WeightFormat.fp8}
"""What there are kernels for. Loading expands fp8 weights on a CPU; see `kept_format`."""

PANEL = 32  # outputs side by side; see include/cpu/linear.h
_GROUP_BYTES = {WeightFormat.q8_0: 1024 + 64, WeightFormat.q4_0: 512 + 64, WeightFormat.q4_1: 512 + 128}


def packed_bytes(format: WeightFormat, out_features: int, in_features: int) -> int:
    """Bytes of a packed weight: whole panels."""
    if format.is_quantized:
        panel = in_features // format.block_size * _GROUP_BYTES[format]
    else:
        # Pairs of bfloat16 inputs lie together, so an odd one takes the room of two.
        columns = in_features + in_features % 2 if format is WeightFormat.bf16 else in_features
        panel = columns * PANEL * format.block_bytes
    return -(-out_features // PANEL) * panel


class _NativeLinear:
    """The launcher of `linear`."""

    def __init__(self, facts: LinearFacts, device: Device) -> None:
        kernel = native_kernel(device, f"pega_linear_{facts.format}")
        pack = native_kernel(device, f"pega_linear_pack_{facts.format}")
        assert kernel is not None
        assert pack is not None
        self._facts = facts
        self._device = device
        self._kernel = kernel
        self._pack = pack
        self._sizes = (facts.out_features, facts.in_features)
        self._accumulate = int(facts.accumulate)

    def packed_bytes(self) -> int:
        """Bytes of the packed weight."""
        return packed_bytes(self._facts.format, *self._sizes)

    def pack(self, *parts: RawWeight) -> Tensor:
        """The matrices in panels, a single one from where it lies. Raises `WeightsError` for others."""
        require_parts(parts, self._facts.format, self._sizes)
        data = np.ascontiguousarray(stack(parts).data)
        packed = self._device.empty((self.packed_bytes(),), DType.uint8)
        self._pack(data.ctypes.data, *self._sizes, packed.data_ptr)
        self._device.stream.synchronize()
        return packed

    def __call__(self, *, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        """Enqueue the product."""
        self._kernel(
            x.data_ptr,
            x.strides[0],
            x.shape[0],
            weight.data_ptr,
            *self._sizes,
            address_of(bias),
            out.data_ptr,
            out.strides[0],
            self._accumulate,
        )


@linear.provider("native", DeviceKind.cpu)
def _bind(facts: LinearFacts, device: Device) -> Launcher | None:
    if facts.act is not DType.float32 or facts.out_dtype is not DType.float32:
        return None
    if facts.format not in NATIVE_FORMATS:
        return None
    if native_kernel(device, f"pega_linear_{facts.format}") is None:
        return None
    return _NativeLinear(facts, device)
