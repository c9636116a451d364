"""Compiles the CPU kernels while the package is built; everything else is in pyproject.toml.

Without a C++ compiler the package installs all the same: the CPU device then runs on NumPy and says so.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def kernel_build() -> ModuleType:
    """`pegainfer.kernels.build`, loaded by its path: nothing is installed yet."""
    spec = importlib.util.spec_from_file_location("kernel_build", ROOT / "pegainfer" / "kernels" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class BuildPyAndKernels(build_py):
    """Python files, and one library per instruction set level: in place for an editable install."""

    def run(self) -> None:
        super().run()
        package = ROOT / "pegainfer" if self.editable_mode else Path(self.build_lib) / "pegainfer"
        build = kernel_build()
        try:
            build.build(package / "_native", objects=ROOT / "build" / "native")
        except build.BuildError as error:
            print(f"warning: the CPU kernels were not compiled: {error}", file=sys.stderr)


class BinaryDistribution(Distribution):
    """The libraries fit one kind of machine."""

    def has_ext_modules(self) -> bool:
        return True


class AnyPythonWheel(bdist_wheel):
    """They do not fit one version of Python only."""

    def get_tag(self) -> tuple[str, str, str]:
        *_, platform = super().get_tag()
        return "py3", "none", platform


commands: dict[str, Any] = {"build_py": BuildPyAndKernels, "bdist_wheel": AnyPythonWheel}
setup(cmdclass=commands, distclass=BinaryDistribution)
