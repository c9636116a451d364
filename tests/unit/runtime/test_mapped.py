"""Mapped files that are read past the map."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pegainfer.errors import WeightsError
from pegainfer.runtime.mapped import MappedFile, copy_bytes, mapping_of
from pegainfer.weights.safetensors import map_file

SIZE = 3 << 20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, SIZE).astype(np.uint8).tobytes())
    return path


def resident_pages(path: Path) -> int:
    """KiB of a mapped file that count as memory of this process."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.endswith(str(path)):
            return next(int(row.split()[1]) for row in lines if row.startswith("Rss:"))
    raise AssertionError(f"{path} is not mapped")


@pytest.mark.parametrize(("start", "stop"), [(0, SIZE), (1, 2), (4097, SIZE - 3), (SIZE - 1, SIZE)])
def test_a_view_is_copied_from_the_file_and_its_pages_stay_out_of_memory(
    file: Path, start: int, stop: int
) -> None:
    data = map_file(file)
    target = np.zeros(stop - start, np.uint8)
    copy_bytes(data.reshape(1, -1)[:, start:stop].reshape(-1), target)
    assert resident_pages(file) == 0
    assert target.tobytes() == file.read_bytes()[start:stop]


def test_what_is_no_view_of_a_file_is_copied_from_memory() -> None:
    source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
    copy_bytes(source, target)
    assert mapping_of(source) is None
    assert np.array_equal(source, target)


def test_a_file_that_became_shorter_is_named(file: Path) -> None:
    data = map_file(file)
    os.truncate(file, SIZE // 2)
    with pytest.raises(WeightsError, match=rf"{file}: ends at byte {SIZE // 2} now"):
        copy_bytes(data, np.zeros(SIZE, np.uint8))


def test_a_disk_that_fails_is_an_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    data = map_file(file)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(WeightsError, match=rf"{file}: cannot be read \(Input/output error\)"):
        copy_bytes(data, np.zeros(SIZE, np.uint8))


def test_a_read_that_stops_early_goes_on(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: whole(fd, [buffers[0][:70001]], offset))
    target = np.zeros(SIZE, np.uint8)
    copy_bytes(map_file(file), target)
    assert target.tobytes() == file.read_bytes()


def test_the_file_is_closed_with_the_last_view(file: Path) -> None:
    def is_open() -> bool:
        links = (os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd"))
        return str(file) in links

    mapped = MappedFile.open(file)
    view = np.frombuffer(mapped, np.uint8)[5:9]
    del mapped
    gc.collect()
    assert is_open()
    del view
    gc.collect()
    assert not is_open()
