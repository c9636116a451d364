"""Token ids of the step before, on a GPU."""

from __future__ import annotations

from pegainfer.kernels.cuda_source import cuda_device, type_define
from pegainfer.ops.feed import FeedTokensFacts, feed_tokens
from pegainfer.ops.op import Launcher
from pegainfer.runtime.cuda.module import KernelSource
from pegainfer.runtime.device import Device, DeviceKind
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor

__all__: list[str] = []

_THREADS = 256


@feed_tokens.provider("cuda", DeviceKind.cuda)
def _bind(facts: FeedTokensFacts, device: Device) -> Launcher | None:
    gpu = cuda_device(device)
    source = KernelSource.of("feed/feed_tokens.cu", THREADS=_THREADS, **type_define("ACT", DType.float32))
    kernel = gpu.kernel(source, "feed_tokens", signature="pipi")
    stream = gpu.stream.handle

    def launch(*, token_ids: Tensor, sampled: Tensor) -> None:
        count = token_ids.shape[0]
        arguments = (token_ids.data_ptr, count, sampled.data_ptr, sampled.shape[0])
        kernel.launch(stream, (-(-count // _THREADS),), _THREADS, *arguments)

    return launch
