"""The benchmark of GPU kernels binds and launches what it times, also where there is no GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pegainfer.kernels.artifacts import ARCHITECTURES
from pegainfer.runtime.cuda.module import KernelSource, compile_cubin

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu" / "kernels.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def rows(output: str) -> dict[str, tuple[int, int]]:
    """Bytes and FLOP of each printed case."""
    found = re.findall(r"^(\w+ .*?) +(\d+) bytes, (\d+) FLOP$", output, re.MULTILINE)
    return {" ".join(name.split()): (int(nbytes), int(flop)) for name, nbytes, flop in found}


def test_a_dry_run_counts_bytes_and_flop() -> None:
    done = run("--dry-run")
    assert done.returncode == 0, done.stderr
    found = rows(done.stdout)
    hidden, heads, kv_heads, size, layers, vocab = 2560, 32, 8, 128, 36, 151936
    columns = (heads + 2 * kv_heads) * size
    assert found["matrices qkv x1 fused"] == (2 * (columns * hidden + hidden + columns), 2 * columns * hidden)
    assert found["matrices down x8192"][1] == 2 * 8192 * hidden * 9728
    a_layer = columns * hidden + heads * size * hidden + 3 * 9728 * hidden
    assert found["chain x8"][1] == 2 * 8 * (layers * a_layer + vocab * hidden)
    in_out = 2 * 64 * 2 * heads * size
    assert found["attention decode 64 x 4096"][0] == 64 * 4096 * 2 * 2 * kv_heads * size + in_out
    assert found["attention prompt 1024"][1] == 4 * heads * size * 1024 * 1025 // 2
    assert found["sampling greedy x16"] == (16 * vocab * 4, 0)
    assert {name.split()[0] for name in found} == {"matrices", "chain", "attention", "small", "sampling"}


@pytest.mark.parametrize("model", ["llama_smol", "qwen2"])
def test_other_models_and_architectures(model: str) -> None:
    config = f"tests/golden/{model}/config.json"
    done = run(config, "--dry-run", "--arch", "sm_80", "--only", "chain", "small")
    assert done.returncode == 0, done.stderr
    assert {name.split()[0] for name in rows(done.stdout)} == {"chain", "small"}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["tests/golden/qwen3_moe/config.json", "--dry-run"], "without experts"),
        (["none.json", "--dry-run"], "is no file"),
        (["--dry-run", "--out", "rows.json"], "dry run measures nothing"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments: list[str], complaint: str) -> None:
    done = run(*arguments)
    assert done.returncode != 0
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_reading_kernel_compiles_for(arch: str) -> None:
    assert compile_cubin(KernelSource(str(SCRIPT.with_name("read.cu"))), arch)
