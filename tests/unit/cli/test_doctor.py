"""The report of `pegainfer doctor` under circumstances that are made up, and what `pull` prints."""

from __future__ import annotations

import ctypes
import importlib.metadata
from pathlib import Path
from typing import Any

import pytest

from pegainfer.cli import doctor, pull
from pegainfer.errors import ConfigError
from pegainfer.runtime.cpu import isa, library, limits
from pegainfer.runtime.device import MemoryInfo

Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def healthy(monkeypatch: Patch, tmp_path: Path) -> None:
    """A machine on which nothing is wrong."""
    monkeypatch.setenv("PEGAINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PEGAINFER_CPU_ISA", raising=False)
    monkeypatch.delenv("PEGAINFER_DISABLE_NATIVE", raising=False)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["numpy>=1.26", 'x>=9; extra == "dev"'])
    monkeypatch.setattr(library, "built_levels", lambda: frozenset(isa.LEVELS))
    monkeypatch.setattr(library, "load_library", lambda level: None)
    monkeypatch.setattr(limits, "memory_info", lambda: MemoryInfo(total=8 << 30, available=4 << 30))
    monkeypatch.setattr(ctypes, "CDLL", no_driver)


def no_driver(name: str) -> Any:
    raise OSError(name)


def report(capsys: Captured) -> tuple[int, str]:
    code = doctor.run([])
    return code, capsys.readouterr().out


def test_nothing_wrong(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "cache" / "models").mkdir(parents=True)
    (tmp_path / "cache" / "models" / "m.gguf").write_bytes(bytes(3 << 20))
    code, text = report(capsys)
    assert code == 0
    assert "!!" not in text
    assert "Problems" not in text
    assert "models 3.0 MiB" in text
    assert "4.0 GiB of 8.0 GiB available" in text
    assert "none (no NVIDIA driver)" in text


def test_missing_and_old_packages(capsys: Captured, monkeypatch: Patch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["numpy>=99.1", "no-such-package"])
    code, text = report(capsys)
    assert code == 1
    assert "is older than 99.1, no-such-package is missing: run `pip install" in text


def test_kernels_that_were_not_built(capsys: Captured, monkeypatch: Patch) -> None:
    monkeypatch.setattr(library, "built_levels", frozenset)
    code, text = report(capsys)
    assert code == 1
    assert "!!  CPU kernels" in text
    assert "  - the CPU kernels are not built: install a C++ compiler" in text


def test_kernels_that_cannot_run_here(capsys: Captured, monkeypatch: Patch) -> None:
    monkeypatch.setenv("PEGAINFER_CPU_ISA", "sse9")
    code, text = report(capsys)
    assert code == 1
    assert "PEGAINFER_CPU_ISA=sse9 does not run on this processor" in text


def test_little_memory(capsys: Captured, monkeypatch: Patch) -> None:
    monkeypatch.setattr(limits, "memory_info", lambda: MemoryInfo(total=1 << 30, available=100 << 20))
    code, text = report(capsys)
    assert code == 1
    assert "less than 1 GiB of memory is free" in text


class Driver:
    """A stand-in for libcuda with one GPU."""

    def __init__(self, version: int) -> None:
        self.version = version

    def cuDriverGetVersion(self, pointer: Any) -> int:
        pointer._obj.value = self.version
        return 0

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, pointer: Any) -> int:
        pointer._obj.value = 1
        return 0

    def cuDeviceGetName(self, text: Any, size: int, ordinal: int) -> int:
        text.value = b"NVIDIA H200"
        return 0


@pytest.mark.parametrize(
    ("version", "hint"), [(12040, "needs a driver for CUDA 13.0"), (13000, "pegainfer[cuda]")]
)
def test_a_gpu_that_is_not_used(capsys: Captured, monkeypatch: Patch, version: int, hint: str) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(version))
    monkeypatch.setattr(doctor, "_is_installed", lambda name: False)
    code, text = report(capsys)
    assert code == 0
    assert f"NVIDIA H200, driver for CUDA {version // 1000}.{version % 1000 // 10}" in text
    assert hint in text


def test_pull_prints_where_a_model_is(capsys: Captured, tmp_path: Path) -> None:
    assert pull.run([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    with pytest.raises(ConfigError, match="no-such-model"):
        pull.run(["no-such-model"])
