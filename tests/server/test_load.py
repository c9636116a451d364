"""The server under load, without a model: nothing fails, nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.server.servers import serving, until


def test_a_thousand_requests_at_concurrency_256(tiny_model: Path, tmp_path: Path) -> None:
    words = (str(tiny_model), "--simulate", "--sim-ttft-ms", "1", "--sim-tpot-ms", "5")
    with serving(tmp_path / "log", *words, "--max-num-seqs", "256") as server:
        result = tmp_path / "result.json"
        command = [
            *(sys.executable, "-m", "pegainfer", "bench", "serve", "--port", str(server.port)),
            *("--random-input-len", "32", "--random-output-len", "16", "--num-prompts", "1000"),
            *("--max-concurrency", "256", "--ignore-eos", "--save-result", "--result-filename", str(result)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stderr
        figures = json.loads(result.read_text())
        assert figures["completed"] == 1000
        assert figures.get("failed", 0) == 0
        assert figures["total_output_tokens"] == 16_000
        assert until(server.is_idle)
        assert server.metric("vllm:generation_tokens_total") >= 16_000
