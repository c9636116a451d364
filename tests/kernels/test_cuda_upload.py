"""Arrays on their way to the GPU through pinned memory: every byte arrives, whatever the sizes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.errors import WeightsError
from pegainfer.runtime.dtypes import DType
from pegainfer.weights.safetensors import map_file

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


def test_many_tensors_of_a_mapped_file_arrive_and_its_pages_stay_out_of_memory(
    gpu: Any, tmp_path: Path
) -> None:
    content = np.random.default_rng(1).integers(0, 256, 24 * SLOT + 777, np.uint8)
    path = tmp_path / "weights"
    path.write_bytes(content.tobytes())
    data = map_file(path)
    cuts = [0, 1, 34, 4133, *range(5000, 90_000, 171), SLOT + 1, 20 * SLOT + 3, content.size]
    with gpu.loading():
        tensors = [gpu.from_numpy(data[start:stop]) for start, stop in pairwise(cuts)]
    assert _resident_kib(path) == 0
    for (start, stop), tensor in zip(pairwise(cuts), tensors, strict=True):
        assert np.array_equal(gpu.to_numpy(tensor), content[start:stop])


def test_a_file_that_ends_early_is_an_error_and_leaves_the_device_usable(gpu: Any, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(30 * SLOT))
    data = map_file(path)
    os.truncate(path, 15 * SLOT + 5)

    def load() -> None:
        with gpu.loading():
            gpu.from_numpy(data)

    with pytest.raises(WeightsError, match=f"{path}: ends at byte {15 * SLOT + 5} now"):
        load()
    array = np.arange(1000, dtype=np.uint8)
    with gpu.loading():
        tensor = gpu.from_numpy(array)
    assert np.array_equal(gpu.to_numpy(tensor), array)


def _resident_kib(path: Path) -> int:
    """KiB of a mapped file that count as memory of this process."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.endswith(str(path)):
            return next(int(row.split()[1]) for row in lines if row.startswith("Rss:"))
    raise AssertionError(f"{path} is not mapped")
