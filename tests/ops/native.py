"""Devices with compiled kernels: every level that was built and that this machine can run."""

from __future__ import annotations

from functools import cache

from pegainfer.runtime.cpu.device import CpuDevice
from pegainfer.runtime.cpu.isa import cpu_flags, supported_levels
from pegainfer.runtime.cpu.library import built_levels, load_library

__all__ = ["LEVELS", "device_of"]

LEVELS = [level for level in supported_levels(cpu_flags()) if level in built_levels()]


@cache
def device_of(level: str, num_threads: int) -> CpuDevice:
    """The CPU with the kernels of a level; made once."""
    return CpuDevice(load_library(level), num_threads)
