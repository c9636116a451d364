"""The table of `pegainfer kernels --explain`: every op of a model with the provider that serves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegainfer.cli import kernels
from pegainfer.errors import ConfigError, UnsupportedModelError

GOLDEN = Path(__file__).parents[2] / "golden"
OPS = {"embedding", "rms_norm", "linear", "qkv_rope_write", "paged_attention", "gather_rows", "sample"}


def rows(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The table's lines by op (one of them where an op has several)."""
    lines = capsys.readouterr().out.splitlines()[2:]
    return {line.split()[0]: line for line in lines}


def test_every_op_on_numpy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PEGAINFER_DISABLE_NATIVE", "1")
    assert kernels.run(["--explain", str(GOLDEN / "qwen3_moe"), "--device", "cpu"]) == 0
    table = rows(capsys)
    assert table.keys() >= {*OPS, "moe_router", "moe_experts"}
    assert all("NumPy" in line for line in table.values())


def test_every_op_compiled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, smollm2: Path
) -> None:
    monkeypatch.setenv("PEGAINFER_CPU_ISA", "portable")
    assert kernels.run([str(smollm2), "--device", "cpu"]) == 0
    table = rows(capsys)
    assert table.keys() >= {*OPS, "silu_and_mul"}
    for line in table.values():
        assert " native " in line
        assert line.endswith("libpegainfer_cpu_portable.so")


def test_what_cannot_be_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="given twice"):
        kernels.run(["a", "--explain", "b"])
    (tmp_path / "config.json").write_text('{"architectures": ["Unheard"], "vocab_size": 1}')
    (tmp_path / "model.safetensors").write_bytes((GOLDEN / "qwen2" / "model.safetensors").read_bytes())
    with pytest.raises(UnsupportedModelError, match="Unheard"):
        kernels.run([str(tmp_path)])
