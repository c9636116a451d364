"""Views of memory, and the step arena."""

from __future__ import annotations

import numpy as np
import pytest

from pegainfer.errors import CapacityError
from pegainfer.runtime.arena import ALIGNMENT, Arena
from pegainfer.runtime.cpu.device import CpuDevice
from pegainfer.runtime.dtypes import DType, WeightFormat


@pytest.fixture
def device() -> CpuDevice:
    return CpuDevice(None, 1)


def test_views_share_bytes(device: CpuDevice) -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    tensor = device.from_numpy(array)
    columns = tensor.slice(1, 2, 5)
    assert columns.shape == (4, 3)
    assert columns.strides == (6, 1)
    assert not columns.is_contiguous
    assert np.array_equal(columns.numpy(), array[:, 2:5])
    assert columns.data_ptr == tensor.data_ptr + 8
    tensor.rows(2).view(12).numpy()[0] = 99
    assert array[0, 0] == 99
    with pytest.raises(ValueError, match="contiguous"):
        columns.view(12)
    with pytest.raises(ValueError, match="view"):
        tensor.view(5, 5)
    for start, stop in ((-1, 2), (0, 5), (3, 2)):
        with pytest.raises(IndexError):
            tensor.slice(0, start, stop)


def test_bfloat16_round_trip(device: CpuDevice) -> None:
    array = np.array([1.5, -2.25], DType.bfloat16.numpy)
    assert device.to_numpy(device.from_numpy(array)).tolist() == [1.5, -2.25]
    assert DType.of(array.dtype) is DType.bfloat16


def test_arena_gives_the_same_addresses_again(device: CpuDevice) -> None:
    arena = Arena(device, 4096)

    def layer() -> list[int]:
        pointers = [arena.empty((3, 5), DType.float32).data_ptr]
        with arena.scope():
            pointers.append(arena.empty((7,), DType.uint8).data_ptr)
        pointers.append(arena.empty((2,), DType.int64).data_ptr)
        return pointers

    first = layer()
    assert first[1] == first[2]  # a scope gives back what it took
    assert all((pointer - first[0]) % ALIGNMENT == 0 for pointer in first)
    high = arena.high_water
    arena.reset()
    assert layer() == first
    assert arena.high_water == high <= arena.nbytes
    with pytest.raises(CapacityError, match="too small"):
        arena.empty((4097,), DType.uint8)


def test_block_formats_need_whole_blocks() -> None:
    assert WeightFormat.q4_1.row_bytes(64) == 40
    with pytest.raises(ValueError, match="whole number"):
        WeightFormat.q8_0.row_bytes(33)
