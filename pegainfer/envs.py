"""Every environment variable that pegainfer reads, in one place. Settings of serving are flags, not
variables.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = [
    "api_keys",
    "cache_dir",
    "cpu_isa",
    "log_level",
    "native_disabled",
    "openai_api_key",
    "package_indexes",
]


def cache_dir() -> Path:
    """`PEGAINFER_CACHE`: where downloads and built kernels are kept; by default `~/.cache/pegainfer`
    (XDG).
    """
    explicit = os.environ.get("PEGAINFER_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "pegainfer"


def api_keys() -> tuple[str, ...]:
    """`PEGAINFER_API_KEY` (or `VLLM_API_KEY`): keys that clients must present, separated by commas."""
    keys = os.environ.get("PEGAINFER_API_KEY") or os.environ.get("VLLM_API_KEY") or ""
    return tuple(key for key in keys.split(",") if key)


def log_level(default: str = "INFO") -> str:
    """`PEGAINFER_LOG_LEVEL`: DEBUG, INFO, WARNING or ERROR; `default` for anything else."""
    level = os.environ.get("PEGAINFER_LOG_LEVEL", "").upper()
    return level if level in ("DEBUG", "INFO", "WARNING", "ERROR") else default


def cpu_isa() -> str | None:
    """`PEGAINFER_CPU_ISA`: run the CPU kernels of this level (avx512_bf16, avx512, avx2, portable) instead
    of the best.
    """
    return os.environ.get("PEGAINFER_CPU_ISA") or None


def native_disabled() -> bool:
    """`PEGAINFER_DISABLE_NATIVE=1`: run the CPU device on the NumPy references alone."""
    return os.environ.get("PEGAINFER_DISABLE_NATIVE", "0") not in ("", "0")


def package_indexes() -> tuple[str, ...]:
    """`UV_DEFAULT_INDEX`, `UV_INDEX_URL`, `PIP_INDEX_URL`, `PIP_EXTRA_INDEX_URL`: simple package indexes to
    ask where there is no pip; then the public one.
    """
    names = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")
    urls = [url for name in names for url in os.environ.get(name, "").split()]
    return (*dict.fromkeys(urls), "https://pypi.org/simple")


def openai_api_key() -> str | None:
    """`OPENAI_API_KEY`: key that the bench and chat clients present to a server."""
    return os.environ.get("OPENAI_API_KEY") or None
