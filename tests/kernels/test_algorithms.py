"""The table of measured cuBLASLt algorithms: sizes, what is asked for, the file. Needs no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegainfer.runtime.cuda.algorithms import SIZES, AlgorithmTable, Product, size_of
from pegainfer.runtime.dtypes import DType

DOWN = Product(64, 128, DType.bfloat16, DType.bfloat16, True)
HEAD = Product(1000, 64, DType.bfloat16, DType.float32, False)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PEGAINFER_CACHE", str(tmp_path))
    return tmp_path


def measured(table: AlgorithmTable, limit: int, *, head_limit: int = 100) -> list[int]:
    """Measure as a device would; the head is only called with few rows. The sizes that were run."""
    ran = []

    def forward(rows: int) -> None:
        ran.append(rows)
        for product in (DOWN, HEAD):
            if (product is DOWN or rows <= head_limit) and table.is_wanted(product, rows):
                table.keep(product, rows, bytes([rows % 251]) * 64)

    assert table.measure({DOWN, HEAD}, forward, limit) == len(ran)
    return ran


def test_sizes_round_up() -> None:
    assert [size_of(rows) for rows in (1, 32, 33, 8192, 8193)] == [32, 32, 64, 8192, None]
    assert list(SIZES) == sorted(SIZES)


def test_nothing_is_wanted_outside_of_a_measurement() -> None:
    table = AlgorithmTable("NVIDIA H200", 130000)
    assert not table.is_wanted(DOWN, 32)
    assert table.find(DOWN, 32) is None


def test_what_was_measured_is_found_again_and_not_measured_twice() -> None:
    table = AlgorithmTable("NVIDIA H200", 130000)
    assert measured(table, 512) == [size for size in SIZES if size <= 512]
    again = AlgorithmTable("NVIDIA H200", 130000)
    assert again.find(DOWN, 200) == bytes([256 % 251]) * 64
    assert again.find(HEAD, 90) == bytes([96]) * 64
    assert again.find(HEAD, 200) is None  # was never called with so many rows
    assert measured(again, 512) == []
    assert measured(again, 1024) == [size for size in SIZES if 512 < size <= 1024]


def test_another_gpu_or_library_has_its_own(cache: Path) -> None:
    measured(AlgorithmTable("NVIDIA H200", 130000), 64)
    assert AlgorithmTable("NVIDIA H200", 130001).find(DOWN, 64) is None
    assert AlgorithmTable("NVIDIA L4", 130000).find(DOWN, 64) is None
    assert [path.name for path in cache.rglob("*.json")] == ["nvidia-h200-130000.json"]


@pytest.mark.parametrize("damage", [b"", b"{}", b"garbage" * 50])
def test_a_damaged_file_is_as_good_as_none(cache: Path, damage: bytes) -> None:
    measured(AlgorithmTable("NVIDIA H200", 130000), 64)
    (file,) = cache.rglob("*.json")
    file.write_bytes(damage)
    table = AlgorithmTable("NVIDIA H200", 130000)
    assert table.find(DOWN, 64) is None
    assert measured(table, 64) == [32, 64]
