"""Start-up with a cold kernel cache: what a worker loads is compiled side by side. Needs NVRTC, no GPU."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pegainfer.config import EngineConfig
from pegainfer.errors import KernelError
from pegainfer.kernels.artifacts import PlannedGpu
from pegainfer.runtime.cuda import module
from pegainfer.runtime.cuda.cubins import CubinLoader
from pegainfer.runtime.cuda.module import KernelSource, cubin_path, load_cubin
from pegainfer.weights.loader import open_checkpoint
from pegainfer.worker.build import bind_ops
from pegainfer.worker.kernels_ahead import kernels_ahead
from tests.models.worker_driver import golden_worker

ARCH = "sm_90a"
SOURCES = [KernelSource.of("linear/add_bias.cu", **{f"ACT_{name}": 1}) for name in ("BF16", "F16", "F32")]
WRONG = KernelSource.of("linear/add_bias.cu", ACT_BF16="1\n#error")


class LoadingGpu(PlannedGpu):
    """A planned GPU that takes the cubins of its kernels from a loader, as a real one does."""

    def __init__(self) -> None:
        super().__init__(ARCH)
        self.cubins = CubinLoader(ARCH)
        self.loaded: dict[KernelSource, bytes] = {}

    def kernel(self, source: KernelSource, name: str, **options: Any) -> Any:
        self.loaded[source] = self.cubins.load(source)
        return super().kernel(source, name, **options)


def binding(sources: list[KernelSource]) -> Callable[[Any], None]:
    """Binds ops that load these."""

    def bind_all(device: Any) -> None:
        for source in sources:
            device.kernel(source, "add_bias", signature="pppi")

    return bind_all


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[KernelSource, str]]:
    """What is compiled from now on into an empty cache, and by which thread."""
    monkeypatch.setenv("PEGAINFER_CACHE", str(tmp_path))
    monkeypatch.setattr(logging.getLogger("pegainfer"), "propagate", True)  # a command may have set it
    notes: list[tuple[KernelSource, str]] = []
    compile_cubin = module.compile_cubin

    def noting(source: KernelSource, arch: str) -> bytes:
        notes.append((source, threading.current_thread().name))
        return compile_cubin(source, arch)

    monkeypatch.setattr(module, "compile_cubin", noting)
    return notes


def test_a_cold_cache_is_filled_by_threads_and_says_so(
    compiled: list[tuple[KernelSource, str]], caplog: pytest.LogCaptureFixture
) -> None:
    load_cubin(SOURCES[1], ARCH)
    compiled.clear()
    gpu, bind_all = LoadingGpu(), binding(SOURCES)
    with caplog.at_level(logging.INFO, "pegainfer"), kernels_ahead(gpu, bind_all):
        bind_all(gpu)
    assert {source for source, _ in compiled} == {SOURCES[0], SOURCES[2]}
    assert len(compiled) == 2
    assert all(thread.startswith("compile") for _, thread in compiled)
    assert [record.getMessage() for record in caplog.records] == [f"compiling 2 kernels for {ARCH}"]
    assert gpu.loaded == {source: load_cubin(source, ARCH) for source in SOURCES}
    assert all(cubin_path(source, ARCH).exists() for source in SOURCES)


def test_all_that_a_model_loads_is_compiled_ahead(compiled: list[tuple[KernelSource, str]]) -> None:
    config = EngineConfig.from_flat(model="tests/golden/qwen3_moe")
    checkpoint = open_checkpoint(config.model, config.load)
    gpu = LoadingGpu()
    with kernels_ahead(gpu, lambda device: bind_ops(config, checkpoint, device=device)):
        bind_ops(config, checkpoint, device=gpu)
    checkpoint.close()
    assert {source.path for source in gpu.loaded} >= {"sampling/sample.cu", "norm/rms_norm.cu"}
    assert {source for source, _ in compiled} == set(gpu.loaded)
    assert all(thread.startswith("compile") for _, thread in compiled)


def test_a_warm_cache_plans_nothing(
    compiled: list[tuple[KernelSource, str]], caplog: pytest.LogCaptureFixture
) -> None:
    for source in SOURCES:
        load_cubin(source, ARCH)
    compiled.clear()
    planned: list[Any] = []
    gpu = LoadingGpu()
    with caplog.at_level(logging.INFO, "pegainfer"), kernels_ahead(gpu, planned.append):
        binding(SOURCES)(gpu)
    assert (planned, compiled, caplog.records) == ([], [], [])


def test_what_is_not_expected_is_compiled_all_the_same(compiled: list[tuple[KernelSource, str]]) -> None:
    gpu = LoadingGpu()
    with kernels_ahead(gpu, binding(SOURCES[:1])):
        binding(SOURCES[1:2])(gpu)
    binding(SOURCES[2:])(gpu)  # after start-up
    assert set(gpu.loaded) == set(SOURCES[1:])


def test_a_source_that_does_not_compile_fails_where_it_is_loaded(
    compiled: list[tuple[KernelSource, str]],
) -> None:
    gpu = LoadingGpu()
    with kernels_ahead(gpu, binding([*SOURCES, WRONG])):
        binding(SOURCES)(gpu)
        with pytest.raises(KernelError, match="does not compile"):
            binding([WRONG])(gpu)


def test_after_a_failure_nothing_new_is_begun(
    compiled: list[tuple[KernelSource, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one compiler: the first is done, the second under way, and the third never begins."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    entered, release, ended = threading.Event(), threading.Event(), threading.Event()
    inner = module.compile_cubin

    def slow(source: KernelSource, arch: str) -> bytes:
        if not compiled:
            return inner(source, arch)
        entered.set()
        assert release.wait(60)
        cubin = inner(source, arch)
        ended.set()
        return cubin

    monkeypatch.setattr(module, "compile_cubin", slow)
    loader = CubinLoader(ARCH)

    def run_out_of_memory() -> None:
        with loader.expecting(lambda: SOURCES, on_start=lambda count: lambda: None):
            loader.load(SOURCES[0])
            assert entered.wait(60)
            raise MemoryError

    with pytest.raises(MemoryError):
        run_out_of_memory()
    release.set()
    assert ended.wait(60)
    assert not loader._started
    assert [source for source, _ in compiled] == SOURCES[:2]


@pytest.mark.gpu
def test_a_worker_on_a_gpu_starts_from_a_cold_cache(
    tmp_path: Path, compiled: list[tuple[KernelSource, str]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "pegainfer"):
        worker = golden_worker("qwen3_dense", device="cuda")
    worker.close()
    assert all(thread.startswith("compile") for _, thread in compiled)
    assert len(list(tmp_path.rglob("*.cubin"))) == len(compiled)
    assert f"compiling {len(compiled)} kernels for sm_" in caplog.text


def test_the_cpu_device_never_loads_the_cuda_runtime() -> None:
    program = """
import sys
from pegainfer.config import EngineConfig
from pegainfer.runtime.cpu import make_cpu_device
from pegainfer.weights.loader import open_checkpoint
from pegainfer.worker.build import build_worker

config = EngineConfig.from_flat(model="tests/golden/qwen3_dense", kv_cache_memory_bytes=1 << 20)
device = make_cpu_device(1)
build_worker(config, open_checkpoint(config.model, config.load), device=device).close()
print([name for name in sys.modules if "cuda" in name and "cuda_source" not in name])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"
