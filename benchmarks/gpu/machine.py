"""Where a measurement was made, and where its snapshot belongs."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

from pegainfer.version import __version__

__all__ = ["describe_machine", "snapshot_path"]

ROOT = Path(__file__).resolve().parents[2]


def describe_machine() -> dict[str, str]:
    """Version, commit (the environment's COMMIT where there is no repository), GPU, driver, date."""
    commit = os.environ.get("COMMIT") or _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    return {
        "version": __version__,
        "gpu": _gpu("name,driver_version"),
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
    }


def snapshot_path(stem: str) -> Path:
    """`benchmarks/snapshots/h200/STEM.json` on an H200, `.../cpu/` without a GPU."""
    name = re.sub(r"^nvidia ", "", _gpu("name").lower()) or "cpu"
    return ROOT / "benchmarks" / "snapshots" / re.sub(r"[^a-z0-9]+", "-", name) / f"{stem}.json"


def _gpu(query: str) -> str:
    return _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader").split("\n")[0]


def _output(*command: str) -> str:
    """What a command prints; nothing where it cannot run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
