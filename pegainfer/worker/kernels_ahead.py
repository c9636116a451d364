"""Start-up on a GPU whose kernels are not in the cache: all that a worker will load are compiled side by
side, while it is being built. With a warm cache nothing happens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from tqdm import tqdm

from pegainfer.kernels.cuda_source import cuda_device
from pegainfer.log import get_logger
from pegainfer.runtime.device import Device, DeviceKind

if TYPE_CHECKING:
    from pegainfer.runtime.cuda.module import KernelSource

__all__ = ["kernels_ahead"]


@contextmanager
def kernels_ahead(device: Device, bind_all: Callable[[Device], object]) -> Iterator[None]:
    """In this block ops are bound to `device`: those that `bind_all` binds to a device that it is given."""
    if device.kind is not DeviceKind.cuda:
        yield
        return
    gpu = cuda_device(device)

    def plan() -> Iterable[KernelSource]:
        from pegainfer.kernels.artifacts import PlannedGpu

        planned = PlannedGpu(gpu.arch, num_multiprocessors=gpu.num_multiprocessors)
        bind_all(planned)
        return planned.sources

    with ExitStack() as stack:

        def on_start(count: int) -> Callable[[], object]:
            get_logger(__name__).info("compiling %d kernels for %s", count, gpu.arch)
            bar = tqdm(
                desc="Compiling kernels",
                total=count,
                unit="kernel",
                leave=False,
                disable=not sys.stderr.isatty(),
            )
            stack.enter_context(bar)
            return lambda: bar.update()

        stack.enter_context(gpu.cubins.expecting(plan, on_start=on_start))
        yield
