"""Compiling the CPU kernels: for another processor family, twice, and without a compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pegainfer.kernels.build import BuildError, build, find_compiler

KERNELS = Path(__file__).parents[2] / "pegainfer" / "kernels"
SOURCES = sorted(KERNELS.rglob("*.cpp"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_source_compiles_for_aarch64(source: Path, tmp_path: Path) -> None:
    zig = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-gnu"]
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{KERNELS / 'include'}"]
    command = [*zig, *flags, "-c", str(source), "-o", str(tmp_path / "out.o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A kernel tree with one source and one header."""
    include = tmp_path / "kernels" / "include" / "cpu"
    include.mkdir(parents=True)
    (include / "seven.h").write_text("#pragma once\nconstexpr int seven = 7;\n")
    code = '#include "cpu/seven.h"\nextern "C" int answer() { return 6 * seven; }\n'
    (tmp_path / "kernels" / "one.cpp").write_text(code)
    return tmp_path / "kernels"


def test_a_second_build_compiles_only_what_changed(tree: Path, tmp_path: Path) -> None:
    objects, out = tmp_path / "objects", tmp_path / "out"

    def names() -> set[str]:
        assert [library.parent for library in build(out, objects=objects, levels=["portable"], kernels=tree)]
        return {path.name for path in objects.iterdir()}

    first = names()
    assert len(first) == 1
    assert names() == first
    (tree / "include" / "cpu" / "seven.h").write_text("#pragma once\nconstexpr int seven = 8;\n")
    assert len(names()) == 2
    assert not [path for path in out.iterdir() if path.suffix != ".so"]


def test_what_the_compiler_says_is_the_error(tree: Path, tmp_path: Path) -> None:
    (tree / "one.cpp").write_text("int broken( {\n")
    with pytest.raises(BuildError, match=r"one\.cpp"):
        build(tmp_path / "out", levels=["portable"], kernels=tree)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(BuildError, match="CXX=/no/such/compiler"):
        find_compiler()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BuildError, match="install g"):
        find_compiler()
