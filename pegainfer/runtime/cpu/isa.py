"""Which instruction set levels this processor has. The libraries of kernels exist once per level."""

from __future__ import annotations

import platform
from pathlib import Path

from pegainfer.errors import ConfigError

__all__ = ["LEVELS", "choose_level", "cpu_flags", "cpu_name", "supported_levels"]

_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2", "popcnt"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}

LEVELS: dict[str, frozenset[str]] = {
    "avx512_bf16": _AVX512 | {"avx512_bf16", "avx512_vnni"},
    "avx512": _AVX512,
    "avx2": _AVX2,
    "portable": frozenset(),
}
"""Processor flags (as Linux spells them) that each level needs, best level first."""

_CPUINFO = Path("/proc/cpuinfo")


def cpu_flags(cpuinfo: Path = _CPUINFO) -> frozenset[str]:
    """Flags of the first processor: what both it and the operating system support. Empty where the system
    does not say.
    """
    return frozenset(_field("flags", cpuinfo).split())


def cpu_name(cpuinfo: Path = _CPUINFO) -> str:
    """What a person calls the processor."""
    return _field("model name", cpuinfo) or platform.processor() or platform.machine()


def supported_levels(flags: frozenset[str]) -> tuple[str, ...]:
    """The levels that a processor with `flags` can run, best first."""
    return tuple(level for level, needed in LEVELS.items() if needed <= flags)


def choose_level(flags: frozenset[str], wanted: str | None) -> str:
    """The best level, or the one that was asked for; raises `ConfigError` when that one cannot run here."""
    supported = supported_levels(flags)
    if wanted is None:
        return supported[0]
    if wanted not in supported:
        raise ConfigError(
            f"PEGAINFER_CPU_ISA={wanted} does not run on this processor; it can run {', '.join(supported)}"
        )
    return wanted


def _field(name: str, cpuinfo: Path) -> str:
    try:
        text = cpuinfo.read_text()
    except OSError:
        return ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
