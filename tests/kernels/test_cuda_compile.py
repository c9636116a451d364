"""Every CUDA kernel compiles for every architecture, in the variants that providers ask for, and keeps what
it works on in registers. Needs NVRTC, no GPU.
"""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cuda.bindings import nvrtc

from pegainfer.errors import ConfigError, KernelError
from pegainfer.kernels import artifacts
from pegainfer.kernels.artifacts import ARCHITECTURES, PlannedGpu, prefetch
from pegainfer.runtime.cuda import module
from pegainfer.runtime.cuda.module import KernelSource
from tests.kernels.planned import MODELS, sources_of_cases, sources_of_model

KERNELS = Path(artifacts.__file__).parent
MAIN = "sm_90a"
SPILL_BYTES = 64
"""What a kernel may spill per thread on the main architecture."""

_SPILLS = re.compile(r"Function properties for (\w+)\n.*?(\d+) bytes spill stores")


def compiler_report(source: KernelSource, arch: str) -> str:
    """What NVRTC and the assembler say about a source; raises `AssertionError` when it does not compile."""
    _, program = nvrtc.nvrtcCreateProgram(source.read().encode(), source.path.encode(), 0, [], [])
    given = (*module._options(source, arch), *module._include_options(), "--ptxas-options=-v")
    options = [option.encode() for option in given]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    text = log.rstrip(b"\0").decode()
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, f"{source} for {arch}:\n{text}"
    return text


def reports(sources: list[KernelSource], arch: str) -> dict[KernelSource, str]:
    """Reports of all sources, two compilers at once."""
    with ThreadPoolExecutor(2) as workers:
        return dict(
            zip(sources, workers.map(lambda source: compiler_report(source, arch), sources), strict=True)
        )


def sources_of_models(arch: str) -> list[KernelSource]:
    return list(dict.fromkeys(source for name in MODELS for source in sources_of_model(name, arch)))


def test_every_source_belongs_to_some_provider() -> None:
    files = {str(path.relative_to(KERNELS)) for path in KERNELS.rglob("*.cu")}
    assert files == {source.path for source in (*sources_of_cases(MAIN), *sources_of_models(MAIN))}


def test_variants_of_all_cases_compile_without_spilling() -> None:
    sources = list(dict.fromkeys([*sources_of_models(MAIN), *sources_of_cases(MAIN)]))
    found = reports(sources, MAIN)
    spilled = {
        (source.path, source.defines, name): int(count)
        for source, report in found.items()
        for name, count in _SPILLS.findall(report)
        if int(count) > SPILL_BYTES
    }
    assert not spilled
    assert all(_SPILLS.search(report) for report in found.values())
    assert not {source: report for source, report in found.items() if "warning" in report}


@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch != MAIN])
def test_kernels_of_models_compile_for(arch: str) -> None:
    sources = sources_of_models(arch)
    assert "attention/prefill.cu" in {source.path for source in sources}
    reports(sources, arch)


def test_hopper_kernels_are_asked_for_on_hopper_alone() -> None:
    for arch in ARCHITECTURES:
        paths = {source.path for source in sources_of_model("Qwen3-4B", arch)}
        assert ("attention/prefill_sm90.cu" in paths) == (arch == MAIN)
        assert ("linear/hopper_gemm.cu" in paths) == (arch == MAIN)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_asks_for_the_same_kernels_each_time(name: str) -> None:
    first = sources_of_model(name, MAIN)
    assert first == sources_of_model(name, MAIN)
    assert len(first) == len(set(first))


def test_prefetch_fills_the_cache_and_reports_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PEGAINFER_CACHE", str(tmp_path))
    sources = sources_of_model("SmolLM2-135M in float32", MAIN)
    sources = [source for source in sources if source.path != "sampling/sample.cu"]
    done: list[KernelSource] = []
    prefetch([*sources, *sources], MAIN, jobs=2, on_done=done.append)
    assert sorted(done, key=str) == sorted(sources, key=str)
    assert {module.cubin_path(source, MAIN) for source in sources} == set(tmp_path.rglob("*.cubin"))
    with pytest.raises(KernelError, match=r"add_bias.cu .*does not compile"):
        prefetch([KernelSource.of("linear/add_bias.cu", ACT_BF16="1\n#error")], MAIN)


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(ConfigError, match="sm_90a"):
        PlannedGpu("hopper")


def test_build_kernels_fills_a_folder_once(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/build-kernels", "tests/golden/qwen3_dense", "--arch", MAIN]
    command += ["--output", str(tmp_path)]
    written = []
    for _ in range(2):
        done = subprocess.run(command, cwd=KERNELS.parents[1], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert f"{MAIN}: 100%" in done.stderr
        files = sorted(tmp_path.glob(f"kernels/{MAIN}/*.cubin"))
        written.append([(path, path.stat().st_mtime_ns) for path in files])
    assert written[0] == written[1]
    stems = {path.name.rpartition("-")[0] for path, _ in written[0]}
    assert {"attention-generic", "gather-gather_rows", "sampling-sample"} <= stems


def test_build_kernels_refuses_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Other"], "model_type": "other"}')
    command = [sys.executable, "scripts/build-kernels", str(tmp_path), "--arch", MAIN]
    done = subprocess.run(command, cwd=KERNELS.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("build-kernels: ")
    assert done.stderr.count("\n") == 1
