"""The ring that weights pass through on their way to the GPU, over a driver that copies as late as it may.
Needs no GPU.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pegainfer.errors import KernelError, WeightsError
from pegainfer.runtime.cuda import upload
from pegainfer.runtime.cuda.driver import cuda
from pegainfer.runtime.cuda.upload import UploadRing
from pegainfer.runtime.dtypes import DType
from pegainfer.weights.safetensors import map_file

SLOT = upload._SLOT_BYTES
RING = upload._SLOTS * SLOT


class Memory:
    """Host memory in the place of pinned or device memory."""

    def __init__(self, nbytes: int) -> None:
        self.array = np.zeros(nbytes, np.uint8)
        self.data_ptr = self.array.ctypes.data

    def numpy(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self.array


class LazyDriver:
    """A stream that does its work when somebody waits for it, and no sooner: a slot that is filled again
    before its event has been waited for sends the wrong bytes.
    """

    CUevent_flags = cuda.CUevent_flags

    def __init__(self) -> None:
        self.queue: list[Callable[[], object]] = []
        self.recorded: dict[int, int] = {}
        self.events: set[int] = set()
        self.done = self.created = self.copies = 0
        self.fails_at = -1

    def _run(self, until: int) -> tuple[Any]:
        while self.done < until:
            self.queue[self.done]()
            self.done += 1
        return (cuda.CUresult.CUDA_SUCCESS,)

    def cuEventCreate(self, flags: int) -> tuple[Any, int]:
        self.created += 1
        self.events.add(self.created)
        return cuda.CUresult.CUDA_SUCCESS, self.created

    def cuEventDestroy(self, event: int) -> None:
        self.events.remove(event)

    def cuEventRecord(self, event: int, stream: int) -> tuple[Any]:
        self.recorded[event] = len(self.queue)
        return (cuda.CUresult.CUDA_SUCCESS,)

    def cuEventSynchronize(self, event: int) -> tuple[Any]:
        return self._run(self.recorded.get(event, 0))

    def cuStreamSynchronize(self, stream: int) -> tuple[Any]:
        return self._run(len(self.queue))

    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> tuple[Any]:
        self.copies += 1
        if self.copies == self.fails_at:
            return (cuda.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
        self.queue.append(lambda: ctypes.memmove(target, source, nbytes))
        return (cuda.CUresult.CUDA_SUCCESS,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> LazyDriver:
    driver = LazyDriver()
    monkeypatch.setattr(upload, "cuda", driver)
    monkeypatch.setattr("pegainfer.runtime.cuda.driver._describe", repr)  # the driver's own words need one
    return driver


def make_ring() -> UploadRing:
    device: Any = SimpleNamespace(stream=SimpleNamespace(handle=0), pinned=pinned)
    return UploadRing(device)


def pinned(shape: tuple[int, ...], dtype: DType) -> Memory:
    return Memory(shape[0])


def send(ring: UploadRing, source: np.ndarray[Any, Any]) -> Memory:
    target: Any = Memory(source.size)
    ring.send(source, target)
    return target  # type: ignore[no-any-return]


def upload_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("upload")]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ring") / "weights"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, 2 * RING + 4321, np.uint8).tobytes())
    return path


def test_pinned_memory_stays_small() -> None:
    assert RING <= 128 << 20


@pytest.mark.parametrize("is_mapped", [True, False], ids=["file", "memory"])
def test_every_byte_arrives(driver: LazyDriver, weights: Path, is_mapped: bool) -> None:
    data = map_file(weights)
    source = data if is_mapped else data.copy()
    cuts = [0, 1, 18, 18, 4114, SLOT + 4113, 2 * SLOT + 4114, RING + 5 * SLOT + 7, data.size]
    ring = make_ring()
    parts = [source[start:stop] for start, stop in pairwise(cuts)]
    targets = [send(ring, part) for part in parts]
    ring.close()
    for (start, stop), target in zip(pairwise(cuts), targets, strict=True):
        assert np.array_equal(target.array, data[start:stop]), (start, stop)
    assert (driver.events, upload_threads()) == (set(), [])


def test_many_small_tensors_arrive(driver: LazyDriver, weights: Path) -> None:
    data, ring = map_file(weights), make_ring()
    targets = [send(ring, data[start : start + 33]) for start in range(0, 33 * 500, 33)]
    ring.close()
    assert np.array_equal(np.concatenate([target.array for target in targets]), data[: 33 * 500])


def test_a_file_that_ends_early_ends_the_load_at_once(driver: LazyDriver, tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(4 * RING))
    data, ring = map_file(path), make_ring()
    os.truncate(path, SLOT + 5)
    with pytest.raises(WeightsError, match=f"{path}: ends at byte {SLOT + 5} now"):
        send(ring, data)
    assert driver.copies == 1  # of the piece that is still there; none after the one that is not
    with pytest.raises(WeightsError, match="ends at byte"):
        ring.close()
    assert (driver.events, upload_threads()) == (set(), [])


def test_a_read_error_of_the_last_piece_shows_at_the_end(driver: LazyDriver, tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(bytes(100))
    data, ring = map_file(path), make_ring()
    os.truncate(path, 40)
    send(ring, data)
    with pytest.raises(WeightsError, match="ends at byte 40 now"):
        ring.close()
    assert (driver.events, upload_threads()) == (set(), [])


def test_an_error_of_the_driver_frees_the_ring_after_what_is_under_way(
    driver: LazyDriver, weights: Path
) -> None:
    driver.fails_at = 4
    data, ring = map_file(weights), make_ring()
    targets = [send(ring, data[start : start + 100]) for start in range(0, 600, 100)]
    with pytest.raises(KernelError, match="ILLEGAL_ADDRESS"):
        ring.close()
    arrived = np.concatenate([target.array for target in targets[:3]])
    assert np.array_equal(arrived, data[:300])  # waited for, though the load had failed
    assert (driver.events, upload_threads()) == (set(), [])


def test_an_error_of_the_driver_in_the_middle_shows_at_once(driver: LazyDriver, weights: Path) -> None:
    driver.fails_at = 4
    data, ring = map_file(weights), make_ring()
    with pytest.raises(KernelError, match="ILLEGAL_ADDRESS"):
        send(ring, data)
    assert driver.copies == 4
    driver.fails_at = 5  # the same piece again
    with pytest.raises(KernelError, match="ILLEGAL_ADDRESS"):
        ring.close()
    assert (driver.events, upload_threads()) == (set(), [])
