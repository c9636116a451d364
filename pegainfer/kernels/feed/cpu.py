"""Token ids of the step before, on the CPU."""

from __future__ import annotations

from pegainfer.kernels.native import native_kernel
from pegainfer.ops.feed import FeedTokensFacts, feed_tokens
from pegainfer.ops.op import Launcher
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.tensor import Tensor

__all__: list[str] = []


@feed_tokens.provider("native", DeviceKind.cpu)
def _bind(facts: FeedTokensFacts, device: Device) -> Launcher | None:
    kernel = native_kernel(device, "pega_feed_tokens")
    if kernel is None:
        return None

    def launch(*, token_ids: Tensor, sampled: Tensor) -> None:
        kernel(token_ids.data_ptr, token_ids.shape[0], sampled.data_ptr, sampled.shape[0])

    return launch
