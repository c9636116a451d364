"""Device addresses that get memory piece by piece, and a KV cache of what is left in the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pegainfer.errors import CapacityError
from pegainfer.runtime.dtypes import DType
from pegainfer.runtime.tensor import Tensor
from tests.models.tiny_models import checkpoint
from tests.models.worker_driver import Driver, make_worker

pytestmark = pytest.mark.gpu

MIB = 1 << 20


@pytest.fixture
def gpu() -> Iterator[Any]:
    from pegainfer.runtime.cuda.device import make_cuda_device

    device = make_cuda_device()
    yield device
    device.close()


def test_what_was_committed_stays_where_it_is(gpu: Any) -> None:
    reserved = gpu.reserve(1024 * MIB + 5)
    memory = Tensor(reserved, DType.uint8, (1024 * MIB + 5,))
    address, rng = memory.data_ptr, np.random.default_rng(0)
    parts = []
    for start, stop in ((0, 3 * MIB + 1), (100 * MIB, 100 * MIB + 77), (1024 * MIB, 1024 * MIB + 5)):
        reserved.commit(stop)
        parts.append((memory.slice(0, start, stop), rng.integers(0, 256, stop - start).astype(np.uint8)))
        gpu.upload(parts[-1][1], parts[-1][0])
        for tensor, expected in parts:
            assert np.array_equal(gpu.to_numpy(tensor), expected)
    reserved.commit(5)  # there already
    assert memory.data_ptr == address


def test_addresses_take_no_memory_and_what_was_taken_goes_back(gpu: Any) -> None:
    free = gpu.memory_info().available
    reserved = gpu.reserve(2 * gpu.memory_info().total)
    assert gpu.memory_info().available == free
    reserved.commit(512 * MIB)
    assert gpu.memory_info().available <= free - 512 * MIB
    with pytest.raises(CapacityError, match=r"no room for another .*GiB are free"):
        reserved.commit(2 * gpu.memory_info().total)
    reserved.commit(600 * MIB)  # what fits still does
    del reserved
    assert gpu.memory_info().available == free


@pytest.mark.parametrize("share", [0.02, 0.05])
def test_the_engine_takes_the_share_that_it_was_given(gpu: Any, share: float) -> None:
    free = gpu.memory_info().available
    worker = make_worker(
        checkpoint(), device="cuda", kv_cache_memory_bytes=None, gpu_memory_utilization=share, max_num_seqs=8
    )
    taken = free - gpu.memory_info().available
    assert 0.95 * share * free < taken <= share * free + 256 * MIB
    assert worker.info.kv_cache_bytes > 0.5 * share * free
    driver = Driver(worker)
    driver.add("request", [1, 2, 3])
    (sampled,) = driver.run("request")
    assert driver.blocks["request"] == [worker.info.num_blocks - 1]  # the very last one exists
    assert sampled.token_id is not None
    worker.close()
