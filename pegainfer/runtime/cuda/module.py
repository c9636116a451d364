"""Kernels as artifacts: CUDA C++ compiled to a cubin by NVRTC, cached by content, loaded into the context.

The key of a cached cubin is a hash of everything that shapes it: source, headers, defines, options,
architecture and compiler version. A file whose own digest does not match is rebuilt, never trusted.
"""

from __future__ import annotations

import functools
import hashlib
import os
from dataclasses import dataclass
from importlib import util
from pathlib import Path
from typing import Any

from pegainfer import envs
from pegainfer.errors import KernelError
from pegainfer.runtime.cuda.disk_cache import read_checked, write_checked

__all__ = ["KernelSource", "compile_cubin", "cubin_path", "load_cubin"]

_TOOLKIT_HEADERS = ("cuda_bf16.h", "cuda_bf16.hpp", "cuda_fp16.h", "cuda_fp16.hpp")
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
    """Where the cubin of `source` for `arch` is cached. The name tells where nothing is installed, so that
    files can be made on another machine.
    """
    digest = hashlib.sha256()
    for part in (source.read(), _headers(), _toolkit(), *_options(source, arch)):
        digest.update(part.encode())
        digest.update(b"\0")
    stem = source.path.removesuffix(".cu").replace("/", "-")
    return envs.cache_dir() / "kernels" / arch / f"{stem}-{digest.hexdigest()[:24]}.cubin"


def load_cubin(source: KernelSource, arch: str) -> bytes:
    """The cubin from the cache, compiled first when it is absent or damaged."""
    path = cubin_path(source, arch)
    cubin = read_checked(path)
    if cubin is None:
        cubin = compile_cubin(source, arch)
        write_checked(path, cubin)
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
    return [f"--include-path={path}" for path in (_KERNELS / "include", *_toolkit_includes())]


@functools.cache
def _headers() -> str:
    """The text of every header that kernels may include: they belong to the key of each cubin."""
    return "".join(path.read_text() for path in sorted((_KERNELS / "include").rglob("*.cuh")))


@functools.cache
def _toolkit() -> str:
    """Version of the compiler, and digest of the toolkit's headers that kernels include."""
    from cuda.bindings import nvrtc

    version = _nvrtc(nvrtc.nvrtcVersion())
    digest = hashlib.sha256()
    for folder in _toolkit_includes():
        for name in _TOOLKIT_HEADERS:
            digest.update((folder / name).read_bytes())
    return f"nvrtc {version} {digest.hexdigest()}"


@functools.cache
def _toolkit_includes() -> tuple[Path, ...]:
    """Folders that hold `cuda_bf16.h`: the `nvidia` wheels or an installed toolkit."""
    candidates = []
    spec = util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec else ():
        candidates += [Path(root) / "cu13" / "include", Path(root) / "cuda_runtime" / "include"]
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            candidates.append(Path(os.environ[variable]) / "include")
    candidates.append(Path("/usr/local/cuda/include"))
    found = tuple(path for path in candidates if (path / "cuda_bf16.h").exists())
    if not found:
        raise KernelError("the CUDA headers are missing: pip install nvidia-cuda-runtime, or set CUDA_HOME")
    return found[:1]


def _nvrtc(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if int(status) != 0:
        raise KernelError(f"NVRTC: {status}")
    return values[0] if len(values) == 1 else tuple(values)
