"""NumPy providers: the reference of every op as the slow fallback of the CPU device.

"Packed" weights are the checkpoint's own bytes here, which is what the references read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pegainfer.ops.embedding import EmbeddingFacts
from pegainfer.ops.linear import LinearFacts
from pegainfer.ops.moe import MoeExpertsFacts
from pegainfer.ops.op import Launcher, Op, all_ops
from pegainfer.ops.raw_weight import RawWeight, require_parts
from pegainfer.runtime.cpu.device import CpuDevice
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.tensor import Tensor

__all__ = ["NumpyLauncher", "register_numpy_providers"]


class NumpyLauncher:
    """Calls the reference of an op when the stream comes to it."""

    def __init__(self, op: Op[Any], facts: Any, device: CpuDevice) -> None:
        self._op = op
        self._facts = facts
        self._device = device

    def __call__(self, *nothing: Any, **arguments: Any) -> None:
        """Enqueue the call over views of the tensors' memory."""
        views = {name: v.numpy() if isinstance(v, Tensor) else v for name, v in arguments.items()}
        self._device.stream.call(lambda: self._op.reference(self._facts, **views))


class _NumpyLinear(NumpyLauncher):
    _facts: LinearFacts

    def packed_bytes(self) -> int:
        """Bytes of the rows."""
        return self._facts.out_features * self._facts.format.row_bytes(self._facts.in_features)

    def pack(self, *parts: RawWeight) -> Tensor:
        """The rows, copied; raises `WeightsError` for another shape or format."""
        require_parts(parts, self._facts.format, (self._facts.out_features, self._facts.in_features))
        return self._device.from_numpy(np.concatenate([raw.rows() for raw in parts]).reshape(-1))


class _NumpyEmbedding(NumpyLauncher):
    _facts: EmbeddingFacts

    def packed_bytes(self) -> int:
        """Bytes of the rows."""
        return self._facts.vocab_size * self._facts.format.row_bytes(self._facts.hidden_size)

    def pack(self, raw: RawWeight) -> Tensor:
        """The rows, copied; raises `WeightsError` for another shape or format."""
        raw.require(self._facts.format, (self._facts.vocab_size, self._facts.hidden_size))
        return self._device.from_numpy(raw.rows().reshape(-1).copy())


class _NumpyExperts(NumpyLauncher):
    _facts: MoeExpertsFacts

    def gate_up_bytes(self) -> int:
        """Bytes of all experts' gate and up rows."""
        facts = self._facts
        return facts.num_experts * 2 * facts.intermediate_size * facts.format.row_bytes(facts.hidden_size)

    def down_bytes(self) -> int:
        """Bytes of all experts' down rows."""
        facts = self._facts
        return facts.num_experts * facts.hidden_size * facts.format.row_bytes(facts.intermediate_size)

    def pack_expert(
        self, expert: int, gate_up_raw: RawWeight, down_raw: RawWeight, gate_up: Tensor, down: Tensor
    ) -> None:
        """Copy one expert's rows into place; raises `WeightsError` for another shape or format."""
        facts = self._facts
        gate_up_raw.require(facts.format, (2 * facts.intermediate_size, facts.hidden_size))
        down_raw.require(facts.format, (facts.hidden_size, facts.intermediate_size))
        gate_up.numpy().reshape(facts.num_experts, -1)[expert] = gate_up_raw.rows().reshape(-1)
        down.numpy().reshape(facts.num_experts, -1)[expert] = down_raw.rows().reshape(-1)


_LAUNCHERS: dict[str, type[NumpyLauncher]] = {
    "embedding": _NumpyEmbedding,
    "linear": _NumpyLinear,
    "moe_experts": _NumpyExperts,
}


def register_numpy_providers() -> None:
    """Give every op that has none its NumPy provider, behind whatever else it has."""
    for op in all_ops().values():
        if any(provider.name == "numpy" for provider in op.providers):
            continue
        _register(op, _LAUNCHERS.get(op.name, NumpyLauncher))


def _register(op: Op[Any], launcher: type[NumpyLauncher]) -> None:
    def factory(facts: Any, device: Device) -> Launcher | None:
        assert isinstance(device, CpuDevice)
        return launcher(op, facts, device)

    op.provider("numpy", DeviceKind.cpu)(factory)
    op.providers.insert(0, op.providers.pop())  # tried last
