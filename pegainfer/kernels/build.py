"""Compiles the CPU kernels: every `.cpp` below `pegainfer/kernels`, once per instruction set level.

Knows compilers and flags; imports nothing but the standard library, since `setup.py` loads this file by its
path before anything is installed. `python -m pegainfer.kernels.build` rebuilds in place for developers.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["LEVELS", "BuildError", "build", "find_compiler", "levels_of_machine", "library_name"]

_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2", "-mpopcnt")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")

LEVELS: dict[str, tuple[str, ...]] = {
    "avx512_bf16": (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
    "avx512": _AVX512,
    "avx2": _AVX2,
    "portable": (),
}
"""Compiler flags of each instruction set level, best first."""

# Results must not depend on what the compiler finds profitable, so contraction is off and there is no
# fast-math; errno and floating-point traps, which nothing here looks at, are given up.
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra",
          "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")  # fmt: skip
# GCC's own AVX-512 headers set off these two.
_QUIET = ("-Wno-uninitialized", "-Wno-maybe-uninitialized")

_KERNELS = Path(__file__).resolve().parent


class BuildError(Exception):
    """There is no compiler, or it refused; the message says which."""


def library_name(level: str) -> str:
    """File name of the library of one level."""
    return f"libpegainfer_cpu_{level}.so"


def levels_of_machine() -> tuple[str, ...]:
    """The levels that the processor family can be compiled for (not only what this machine has)."""
    return tuple(LEVELS) if platform.machine().lower() in ("x86_64", "amd64") else ("portable",)


def find_compiler() -> list[str]:
    """The command of a C++ compiler that works: `$CXX`, g++, clang++, else that of the `ziglang` package.

    Raises `BuildError` when there is none.
    """
    explicit = os.environ.get("CXX")
    candidates = [shlex.split(explicit)] if explicit else [["g++"], ["clang++"], ["c++"]]
    for command in candidates:
        if shutil.which(command[0]) and _works(command):
            return command
    if explicit:
        raise BuildError(f"CXX={explicit} does not compile C++17")
    if importlib.util.find_spec("ziglang") is not None:
        # Zig tunes for the machine it runs on unless it is given a target.
        machine = platform.machine().lower().replace("amd64", "x86_64").replace("arm64", "aarch64")
        cpu = "x86_64" if machine == "x86_64" else "generic"
        target = ["-target", f"{machine}-linux-gnu.2.17", f"-mcpu={cpu}"]
        command = [sys.executable, "-m", "ziglang", "c++", *target]
        if _works(command):
            return command
    raise BuildError(
        "no C++ compiler was found: install g++ or clang++ (Debian, Ubuntu: apt install g++), "
        "or `pip install ziglang`"
    )


def _works(command: Sequence[str]) -> bool:
    """Whether the command links a small C++17 library with threads."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("#include <thread>\nint probe() { std::thread t([] {}); t.join(); return 0; }\n")
        flags = ["-std=c++17", "-fPIC", "-shared", "-pthread"]
        arguments = [*command, *flags, str(source), "-o", f"{folder}/probe.so"]
        return subprocess.run(arguments, capture_output=True, check=False).returncode == 0


def build(
    output: Path,
    *,
    objects: Path | None = None,
    levels: Sequence[str] = (),
    jobs: int | None = None,
    compiler: Sequence[str] = (),
    kernels: Path = _KERNELS,
) -> list[Path]:
    """Compile and link the libraries of `levels` (all by default) into the folder `output`; returns their
    paths.

    `objects` keeps object files by the hash of everything that made them, so that a second build is quick.
    Libraries are replaced atomically: a process that has loaded one keeps the old file. Raises `BuildError`.
    """
    command = list(compiler) or find_compiler()
    sources = sorted(kernels.rglob("*.cpp"))
    headers = sorted((kernels / "include" / "cpu").glob("*.h"))
    identity = subprocess.run([*command, "--version"], capture_output=True, check=False).stdout
    ingredients = [repr((command, _FLAGS)).encode(), identity, *(header.read_bytes() for header in headers)]
    common = hashlib.sha256(b"\0".join(ingredients))
    with tempfile.TemporaryDirectory() as temporary:
        store = objects or Path(temporary)

        def compile_one(level: str, source: Path) -> Path:
            digest = common.copy()
            digest.update(repr(LEVELS[level]).encode() + source.read_bytes())
            target = store / f"{source.parent.name}-{source.stem}-{level}-{digest.hexdigest()[:20]}.o"
            if not target.exists():
                partial = target.with_suffix(f".{os.getpid()}.part")
                flags = [*_FLAGS, *_QUIET, *LEVELS[level], f"-I{kernels / 'include'}"]
                _run([*command, *flags, "-c", str(source), "-o", str(partial)])
                os.replace(partial, target)
            return target

        def link(level: str, parts: Sequence[Path]) -> Path:
            target = output / library_name(level)
            partial = output / f".{target.name}.{os.getpid()}"
            _run([*command, "-shared", "-pthread", "-s", *map(str, parts), "-o", str(partial)])
            os.replace(partial, target)
            return target

        store.mkdir(parents=True, exist_ok=True)
        output.mkdir(parents=True, exist_ok=True)
        chosen = tuple(levels) or levels_of_machine()
        with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as workers:
            # The largest sources first: they are what the others would wait for.
            order = sorted(sources, key=lambda source: -source.stat().st_size)
            compiled = {
                (level, source): workers.submit(compile_one, level, source)
                for source in order
                for level in chosen
            }
            parts = {level: [compiled[level, source].result() for source in sources] for level in chosen}
            return list(workers.map(lambda level: link(level, parts[level]), chosen))


def _run(arguments: Sequence[str]) -> None:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{shlex.join(arguments)} failed:\n{done.stderr.strip()}")
    if done.stderr.strip():
        print(done.stderr.strip(), file=sys.stderr)


def main() -> int:
    """Rebuild in place."""
    parser = argparse.ArgumentParser(prog="python -m pegainfer.kernels.build", description=main.__doc__)
    parser.add_argument(
        "--level", action="append", choices=levels_of_machine(), default=[], help="only this level"
    )
    parser.add_argument("--jobs", type=int, help="compilers at once")
    options = parser.parse_args()
    root = _KERNELS.parent.parent
    try:
        objects = root / "build" / "native"
        libraries = build(
            _KERNELS.parent / "_native", objects=objects, levels=options.level, jobs=options.jobs
        )
    except BuildError as problem:
        print(problem, file=sys.stderr)
        return 1
    for library in libraries:
        print(f"{library.relative_to(root)}  {library.stat().st_size // 1024} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
