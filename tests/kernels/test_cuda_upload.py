"""Arrays on their way to the GPU through pinned memory: every byte arrives, whatever the sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pegainfer.runtime.dtypes import DType

pytestmark = pytest.mark.gpu

SLOT = 8 << 20


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    from pegainfer.runtime.cuda.device import make_cuda_device

    device = make_cuda_device()
    yield device
    device.close()


def test_every_byte_arrives(gpu: Any) -> None:
    rng = np.random.default_rng(0)
    sizes = [1, 17, 4096, SLOT - 1, SLOT, SLOT + 1, 5 * SLOT + 12345, 20 * SLOT, 3]
    arrays = [rng.integers(0, 256, size).astype(np.uint8) for size in sizes]
    with gpu.loading():
        tensors = [gpu.from_numpy(array) for array in arrays]
        whole = gpu.empty((sizes[5] + sizes[1],), DType.uint8)
        gpu.upload(arrays[5], whole.slice(0, 0, sizes[5]))
        gpu.upload(arrays[1], whole.slice(0, sizes[5], sizes[5] + sizes[1]))
    for array, tensor in zip(arrays, tensors, strict=True):
        assert np.array_equal(gpu.to_numpy(tensor), array)
    assert np.array_equal(gpu.to_numpy(whole), np.concatenate([arrays[5], arrays[1]]))
    assert np.array_equal(gpu.to_numpy(gpu.from_numpy(arrays[6])), arrays[6])  # and without


def test_an_error_ends_the_block_and_leaves_the_device_usable(gpu: Any) -> None:
    array = np.arange(1000, dtype=np.uint8)

    def fail() -> None:
        with gpu.loading():
            gpu.from_numpy(array)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert np.array_equal(gpu.to_numpy(gpu.from_numpy(array)), array)
