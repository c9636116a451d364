"""Loading cuBLASLt in advance, which must not stop the threads that it is to spare the waiting. Needs neither
the library nor a GPU.
"""

from __future__ import annotations

import importlib.metadata
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pegainfer.kernels.build import find_compiler
from pegainfer.runtime.cuda.cublaslt import preload_library

SLOW_S = 0.5
SOURCE = f"""
#include <unistd.h>
__attribute__((constructor)) static void slow() {{ usleep({int(SLOW_S * 1e6)}); }}
"""


def use_package(monkeypatch: pytest.MonkeyPatch, *files: Path) -> None:
    found = [SimpleNamespace(name=file.name, locate=lambda file=file: file) for file in files]

    def distribution(name: str) -> Any:
        assert name == "nvidia-cublas"
        return SimpleNamespace(files=found)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)


def longest_pause(work: Callable[[], object]) -> float:
    """Seconds for which this thread was kept from running while another one did `work`."""
    thread = threading.Thread(target=work)
    longest, last = 0.0, time.perf_counter()
    thread.start()
    while thread.is_alive():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest


def test_other_threads_run_while_the_library_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libcublasLt.so.13"
    (tmp_path / "slow.cpp").write_text(SOURCE)
    command = [*find_compiler(), "-shared", "-fPIC", str(tmp_path / "slow.cpp"), "-o", str(library)]
    subprocess.run(command, check=True)
    use_package(monkeypatch, tmp_path / "LICENSE", library)
    start = time.perf_counter()
    pause = longest_pause(preload_library)
    assert time.perf_counter() - start >= SLOW_S
    assert pause < SLOW_S / 2
    assert str(library) in Path("/proc/self/maps").read_text()


def test_without_the_library_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_package(monkeypatch, tmp_path / "LICENSE")
    preload_library()
    use_package(monkeypatch, tmp_path / "libcublasLt.so.13")  # named, but not there
    preload_library()

    def missing(name: str) -> Any:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    preload_library()
