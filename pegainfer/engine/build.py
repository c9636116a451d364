"""From a configuration to a ready `EngineCore`: device, checkpoint, worker, and what ends an answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from pegainfer.config import EngineConfig
from pegainfer.engine.core import EngineCore
from pegainfer.engine.messages import Vocabulary
from pegainfer.errors import ConfigError
from pegainfer.log import get_logger
from pegainfer.runtime.device import Device

if TYPE_CHECKING:
    from pegainfer.runtime.cuda.device import CudaDevice

__all__ = ["build_engine_core", "make_device"]


def build_engine_core(config: EngineConfig, vocabulary: Callable[[], Vocabulary]) -> EngineCore:
    """The engine of `config`. `vocabulary` is called (and may wait) when the first thing needs it.

    Raises `PegaInferError` for whatever a user can set right.
    """
    if config.simulator.simulate:
        return _build_simulated(config, vocabulary())
    start = time.perf_counter()
    device_made = _make_device_ahead(config)
    try:
        # Imported here, so that a simulated engine needs neither kernels nor arrays.
        from pegainfer.tokenizer.tokenizer import stop_token_ids
        from pegainfer.weights.loader import open_checkpoint
        from pegainfer.worker.build import build_worker

        checkpoint = open_checkpoint(config.model, config.load)
        opened = time.perf_counter()
    finally:
        device = device_made()  # in any case: what is wrong with it is said first
    made = time.perf_counter()
    known = vocabulary()
    phases = {
        "open checkpoint": opened - start,
        "wait for device": made - opened,
        "wait for tokenizer": time.perf_counter() - made,
    }
    worker = build_worker(config, checkpoint, device=device, decodable_vocab_size=known.decodable_vocab_size)
    generation_config = checkpoint.generation_config
    stops = stop_token_ids(generation_config, checkpoint.config, None)
    checkpoint.close()
    return EngineCore(
        config,
        worker,
        eos_token_ids=stops if known.eos_token_id is None else (*stops, known.eos_token_id),
        generation_config=generation_config,
        phases=phases,
    )


def make_device(config: EngineConfig) -> Device:
    """The device that `--device` names; `auto` is a GPU where there is one that can be used.

    Raises `ConfigError` when there is none.
    """
    return (_make_gpu(config) if _may_be_gpu(config) else None) or _make_cpu(config)


def _make_device_ahead(config: EngineConfig) -> Callable[[], Device]:
    """Begin to make the device; the result waits for it, and is called once, by the thread that will use it.

    A GPU's context takes as long as everything else that precedes the weights, and not the interpreter lock.
    """
    if not _may_be_gpu(config):
        device = _make_cpu(config)
        return lambda: device
    thread = ThreadPoolExecutor(1, "device")
    making = thread.submit(_make_gpu, config)
    thread.shutdown(wait=False)

    def made() -> Device:
        gpu = making.result()
        if gpu is None:
            return _make_cpu(config)
        gpu.bind_thread()
        return gpu

    return made


def _may_be_gpu(config: EngineConfig) -> bool:
    return config.device == "cuda" or (config.device == "auto" and Path("/dev/nvidiactl").exists())


def _make_gpu(config: EngineConfig) -> CudaDevice | None:
    """The GPU; None when it cannot be used and need not."""
    try:
        from pegainfer.runtime.cuda.device import make_cuda_device

        return make_cuda_device()
    except ConfigError as error:
        if config.device == "cuda":
            raise
        get_logger(__name__).warning("the GPU is not used: %s", error)
        return None


def _make_cpu(config: EngineConfig) -> Device:
    from pegainfer.runtime.cpu import make_cpu_device

    return make_cpu_device(config.num_threads)


def _build_simulated(config: EngineConfig, vocabulary: Vocabulary) -> EngineCore:
    from pegainfer.worker.sim import build_simulated_worker

    worker = build_simulated_worker(config, vocab_size=vocabulary.decodable_vocab_size)
    eos = vocabulary.eos_token_id
    return EngineCore(config, worker, eos_token_ids=() if eos is None else (eos,))
