"""The CPU device."""

from pegainfer.runtime.cpu.device import CpuDevice, make_cpu_device
from pegainfer.runtime.cpu.stream import CpuGraph, CpuStream, float_bits

__all__ = ["CpuDevice", "CpuGraph", "CpuStream", "float_bits", "make_cpu_device"]
