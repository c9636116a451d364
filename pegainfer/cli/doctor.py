"""`pegainfer doctor`: what this machine and this installation have, what is wrong with them, how to fix it.

Looks only: nothing is downloaded, built or written.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pegainfer import envs
from pegainfer.cli.arguments import ArgumentParser
from pegainfer.errors import PegaInferError
from pegainfer.version import __version__

__all__ = ["Finding", "run"]

_LOW_MEMORY = 1 << 30
_CUDA_EXTRA = ("cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cublas")
_MINIMUM_CUDA = 13000


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. A `problem` keeps the engine from working well, a `hint` does not."""

    subject: str
    value: str
    problem: str = ""
    hint: str = ""


def run(arguments: list[str]) -> int:
    """Print the report; 1 when there is a problem."""
    parser = ArgumentParser(
        "doctor",
        "Check this machine and this installation. The exit code is 1 when something is wrong.",
        examples=("pegainfer doctor",),
    )
    parser.parse(arguments)
    checks: tuple[Callable[[], Finding], ...] = (
        _python,
        _packages,
        _processor,
        _cpu_kernels,
        _compiler,
        _memory,
        _cache,
        _gpu,
    )
    findings = [check() for check in checks]
    print(f"pegainfer {__version__} in {Path(__file__).parents[1]}")
    for finding in findings:
        mark = "!!" if finding.problem else "ok"
        print(f"  {mark}  {finding.subject:<14}{finding.value}")
    for title, notes in (
        ("Hints", [finding.hint for finding in findings if finding.hint]),
        ("Problems", [finding.problem for finding in findings if finding.problem]),
    ):
        if notes:
            print(f"{title}:")
            for note in notes:
                print(f"  - {note}")
    return 1 if any(finding.problem for finding in findings) else 0


def _python() -> Finding:
    value = f"{platform.python_version()} ({sys.executable}) on {platform.system()} {platform.machine()}"
    if sys.platform != "linux":
        return Finding("Python", value, problem="pegainfer runs on Linux only")
    return Finding("Python", value)


def _packages() -> Finding:
    try:
        requirements = importlib.metadata.requires("pegainfer") or []
    except importlib.metadata.PackageNotFoundError:
        return Finding("packages", "unknown", hint="this is no installation: run `pip install -e .`")
    found, wrong = [], []
    for requirement in requirements:
        name, minimum = _requirement(requirement)
        if "extra ==" in requirement:
            continue
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{name} is missing")
            continue
        found.append(f"{name} {version}")
        if _numbers(version) < _numbers(minimum):
            wrong.append(f"{name} {version} is older than {minimum}")
    problem = f"{', '.join(wrong)}: run `pip install --upgrade pegainfer`" if wrong else ""
    return Finding("packages", ", ".join(found), problem=problem)


def _processor() -> Finding:
    from pegainfer.runtime.cpu.isa import cpu_name
    from pegainfer.runtime.cpu.limits import cpu_quota, default_num_threads

    quota = cpu_quota()
    limit = f", quota of {quota:g} processors" if quota is not None else ""
    return Finding("processor", f"{cpu_name()}, {default_num_threads()} threads{limit}")


def _cpu_kernels() -> Finding:
    from pegainfer.runtime.cpu.isa import choose_level, cpu_flags
    from pegainfer.runtime.cpu.library import built_levels, load_library

    built = ", ".join(sorted(built_levels())) or "none"
    try:
        level = choose_level(cpu_flags(), envs.cpu_isa())
        if envs.native_disabled():
            return Finding(
                "CPU kernels",
                "NumPy",
                problem="PEGAINFER_DISABLE_NATIVE is set: the CPU is slow without kernels",
            )
        if level not in built_levels():
            return Finding(
                "CPU kernels",
                f"{level} is not built (built: {built})",
                problem="the CPU kernels are not built: install a C++ compiler and run "
                "`python -m pegainfer.kernels.build`",
            )
        load_library(level)
    except PegaInferError as error:
        return Finding("CPU kernels", f"unusable (built: {built})", problem=str(error))
    return Finding("CPU kernels", f"{level} (built: {built})")


def _compiler() -> Finding:
    from pegainfer.kernels.build import BuildError, find_compiler

    try:
        return Finding("C++ compiler", " ".join(find_compiler()))
    except BuildError:
        return Finding("C++ compiler", "none (only needed to build the CPU kernels)")


def _memory() -> Finding:
    from pegainfer.runtime.cpu.limits import memory_info

    memory = memory_info()
    value = f"{_size(memory.available)} of {_size(memory.total)} available"
    if memory.available < _LOW_MEMORY:
        return Finding("memory", value, problem="less than 1 GiB of memory is free: close other programs")
    return Finding("memory", value)


def _cache() -> Finding:
    folder = envs.cache_dir()
    if not folder.exists():
        return Finding("cache", f"{folder} (empty)")
    parts = [f"{child.name} {_size(_tree_size(child))}" for child in sorted(folder.iterdir())]
    return Finding("cache", f"{folder}: {', '.join(parts) or 'empty'}")


def _gpu() -> Finding:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Finding("GPU", "none (no NVIDIA driver)")
    version, count = ctypes.c_int(0), ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(version))
    status = driver.cuInit(0)
    if status or driver.cuDeviceGetCount(ctypes.byref(count)):
        return Finding("GPU", f"none (the NVIDIA driver fails with error {status})")
    names = []
    for ordinal in range(count.value):
        text = ctypes.create_string_buffer(100)
        driver.cuDeviceGetName(text, len(text), ordinal)
        names.append(text.value.decode(errors="replace"))
    speaks = f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"
    value = f"{', '.join(names) or 'none visible'}, driver for {speaks}"
    if names and version.value < _MINIMUM_CUDA:
        return Finding("GPU", value, hint="the GPU needs a driver for CUDA 13.0 (release 580) or newer")
    missing = [name for name in _CUDA_EXTRA if not _is_installed(name)]
    if names and missing:
        needs = "`pip install 'pegainfer[cuda]'`"
        return Finding(
            "GPU", value, hint=f"the GPU is not used without {needs} ({', '.join(missing)} missing)"
        )
    return Finding("GPU", value)


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _requirement(text: str) -> tuple[str, str]:
    """Name and least version of `name>=1.2; marker`."""
    match = re.match(r"([\w.-]+)[^;]*?(?:>=\s*([\d.]+))?(?:[;,\s]|$)", text)
    assert match is not None
    return match[1], match[2] or "0"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _tree_size(path: Path) -> int:
    files = [path] if path.is_file() else [child for child in path.rglob("*") if child.is_file()]
    return sum(file.stat().st_size for file in files)


def _size(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB" if nbytes >= 1 << 30 else f"{nbytes / (1 << 20):.1f} MiB"
