"""How ops run on a device: a folder per family of ops, providers in `<device kind>.py` beside the sources."""

from __future__ import annotations

from importlib import import_module, util

from pegainfer.runtime.device import DeviceKind

__all__ = ["FAMILIES", "load_providers"]

FAMILIES = (
    "activation",
    "attention",
    "embedding",
    "feed",
    "gather",
    "linear",
    "moe",
    "norm",
    "rope",
    "sampling",
)


def load_providers(kind: DeviceKind) -> None:
    """Register every provider for devices of this kind; must be called before a model is built on one."""
    for family in FAMILIES:
        module = f"pegainfer.kernels.{family}.{kind}"
        if util.find_spec(module) is not None:
            import_module(module)
    if kind is DeviceKind.cpu:
        from pegainfer.kernels.numpy_provider import register_numpy_providers

        register_numpy_providers()
