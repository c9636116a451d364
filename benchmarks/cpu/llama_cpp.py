"""llama.cpp as a yardstick: built for this machine from the sdist of `llama-cpp-python`, run by its own bench
tools.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["LlamaCpp", "build"]

VERSION = "0.3.36"
TOOLS = ("llama-bench", "llama-batched-bench")


class LlamaCpp:
    """The bench tools in a folder. Flash attention is on, everything else is the default."""

    def __init__(self, folder: Path, *, threads: int) -> None:
        self._folder = folder
        self._threads = threads

    def bench(self, model: Path, *, prompt: int, generate: int) -> tuple[float, float]:
        """Tokens/s of processing a prompt, and of generating from an empty context."""
        words = ["-p", str(prompt), "-n", str(generate), "-r", "1", "-fa", "on", "-o", "json"]
        tests = json.loads(self._run("llama-bench", model, words))
        by_kind = {test["n_gen"] > 0: float(test["avg_ts"]) for test in tests}
        return by_kind[False], by_kind[True]

    def batched(self, model: Path, *, batch: int, prompt: int, generate: int) -> float:
        """Generated tokens/s of `batch` requests together, their prompts not counted."""
        sizes = ["-npp", str(prompt), "-ntg", str(generate), "-npl", str(batch)]
        context = ["-c", str(2 * batch * (prompt + generate)), "-b", "2048", "-ub", "512"]
        output = self._run(
            "llama-batched-bench", model, [*sizes, *context, "-fa", "on", "--output-format", "jsonl"]
        )
        rows: list[dict[str, Any]] = [
            json.loads(line) for line in output.splitlines() if line.startswith("{")
        ]
        return float(rows[-1]["speed_tg"])

    def _run(self, tool: str, model: Path, words: Sequence[str]) -> str:
        command = [str(self._folder / tool), "-m", str(model), "-t", str(self._threads), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        return done.stdout


def build(cache: Path) -> Path:
    """The folder of the bench tools, built below `cache` when it is not there yet (takes minutes)."""
    folder = cache / f"llama-cpp-python-{VERSION}"
    tools = folder / "build" / "bin"
    if all((tools / name).is_file() for name in TOOLS):
        return tools
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "venv" / "bin" / "python"
    _run([sys.executable, "-m", "venv", str(folder / "venv")])
    _run([str(python), "-m", "pip", "install", "--quiet", "cmake", "ninja"])
    package = f"llama-cpp-python=={VERSION}"
    _run(
        [
            str(python),
            "-m",
            "pip",
            "download",
            "--no-deps",
            "--no-binary",
            ":all:",
            "-d",
            str(folder),
            package,
        ]
    )
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    source = next(folder.glob("llama_cpp_python-*/vendor/llama.cpp"))
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    options = [
        "-DCMAKE_BUILD_TYPE=Release",
        "-DGGML_NATIVE=ON",
        "-DLLAMA_CURL=OFF",
        "-DLLAMA_BUILD_TESTS=OFF",
    ]
    _run(["cmake", "-S", str(source), "-B", str(folder / "build"), "-G", "Ninja", *options], path=path)
    _run(["cmake", "--build", str(folder / "build"), "--target", *TOOLS], path=path)
    return tools


def _run(command: Sequence[str], *, path: str | None = None) -> None:
    environment = {**os.environ, "PATH": path or os.environ["PATH"]}
    subprocess.run(command, env=environment, check=True)
