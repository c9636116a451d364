"""Kernels as artifacts: CUDA C++ compiled to a cubin by NVRTC, cached by content, loaded into the context.

The key of a cached cubin is a hash of everything that shapes it: source, headers, defines, options,
architecture, versions of compiler and toolkit; but no paths, so that what another machine compiled is found.
A file whose own digest does not match is rebuilt, never trusted.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

from pegainfer import envs
from pegainfer.errors import KernelError
from pegainfer.runtime.cuda.disk_cache import read_checked, write_checked

__all__ = ["KernelSource", "cached_cubin", "compile_cubin", "cubin_path", "load_cubin"]

_VERSION_WITHIN = 1 << 16  # characters from the start of the toolkit's main header
_KERNELS = Path(__file__).parents[2] / "kernels"


@dataclass(frozen=True, slots=True)
class KernelSource:
    """A `.cu` file below `pegainfer/kernels` with the defines that specialise it."""

    path: str
    defines: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, path: str, **defines: str | int | float) -> KernelSource:
        """The source at `path` with `-DNAME=VALUE` for each keyword."""
        return cls(path, tuple(sorted((name, str(value)) for name, value in defines.items())))

    def read(self) -> str:
        """The source text."""
        return (_KERNELS / self.path).read_text()


def compile_cubin(source: KernelSource, arch: str) -> bytes:
    """Compile with NVRTC; raises `KernelError` with the compiler's log. Needs no GPU."""
    from cuda.bindings import nvrtc

    program = _nvrtc(nvrtc.nvrtcCreateProgram(source.read().encode(), source.path.encode(), 0, [], []))
    options = [option.encode() for option in (*_options(source, arch), *_include_options())]
    status = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = b" " * _nvrtc(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise KernelError(
            f"{source.path} {dict(source.defines)} does not compile for {arch}:\n{log.decode().strip()}"
        )
    cubin: bytes = b" " * _nvrtc(nvrtc.nvrtcGetCUBINSize(program))
    _nvrtc(nvrtc.nvrtcGetCUBIN(program, cubin))
    nvrtc.nvrtcDestroyProgram(program)
    return cubin


def cubin_path(source: KernelSource, arch: str) -> Path:
    """Where the cubin of `source` for `arch` is cached."""
    digest = hashlib.sha256()
    for part in (source.read(), _headers(), *_versions(), *_options(source, arch)):
        digest.update(part.encode())
        digest.update(b"\0")
    stem = source.path.removesuffix(".cu").replace("/", "-")
    return envs.cache_dir() / "kernels" / arch / f"{stem}-{digest.hexdigest()[:24]}.cubin"


def cached_cubin(source: KernelSource, arch: str) -> bytes | None:
    """The cubin from the cache; None when it is absent or damaged."""
    return read_checked(cubin_path(source, arch))


def load_cubin(source: KernelSource, arch: str) -> bytes:
    """The cubin from the cache, compiled first where it is not there."""
    cubin = cached_cubin(source, arch)
    if cubin is None:
        cubin = compile_cubin(source, arch)
        write_checked(cubin_path(source, arch), cubin)
    return cubin


def _options(source: KernelSource, arch: str) -> list[str]:
    defines = [f"--define-macro={name}={value}" for name, value in source.defines]
    return [
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--fmad=true",
        "-default-device",
        *defines,
    ]


def _include_options() -> list[str]:
    toolkit = _toolkit_include()
    if toolkit is None:
        raise KernelError("the CUDA headers are missing: pip install nvidia-cuda-runtime, or set CUDA_HOME")
    return [f"--include-path={path}" for path in (_KERNELS / "include", toolkit)]


@functools.cache
def _headers() -> str:
    """The text of every header that kernels may include: they belong to the key of each cubin."""
    return "".join(path.read_text() for path in sorted((_KERNELS / "include").rglob("*.cuh")))


@functools.cache
def _versions() -> tuple[str, str]:
    """Of the compiler, and of the toolkit whose headers it reads."""
    from cuda.bindings import nvrtc

    compiler = "nvrtc {}.{}".format(*_nvrtc(nvrtc.nvrtcVersion()))
    toolkit = _toolkit_include()
    return compiler, f"toolkit {_toolkit_version(toolkit) if toolkit else 'unknown'}"


def _toolkit_version(include: Path) -> str:
    """`13000` for the headers of CUDA 13.0."""
    try:
        with open(include / "cuda_runtime_api.h", errors="replace") as file:
            found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", file.read(_VERSION_WITHIN))
    except OSError:
        found = None
    return found[1] if found else "unknown"


@functools.cache
def _toolkit_include() -> Path | None:
    """The folder that holds `cuda_bf16.h`, of the `nvidia` wheels or an installed toolkit."""
    candidates = []
    spec = util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        candidates += [Path(root) / "cu13" / "include", Path(root) / "cuda_runtime" / "include"]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            candidates.append(Path(os.environ[variable]) / "include")
    candidates.append(Path("/usr/local/cuda/include"))
    return next((path for path in candidates if (path / "cuda_bf16.h").exists()), None)


def _nvrtc(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) != 0:
        raise KernelError(f"NVRTC: {status}")
    return values[0] if len(values) == 1 else tuple(values)
