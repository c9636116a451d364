"""From a configuration to a ready `EngineCore`: device, checkpoint, worker, and what ends an answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from pegainfer.config import EngineConfig
from pegainfer.engine.core import EngineCore
from pegainfer.engine.messages import Vocabulary
from pegainfer.errors import ConfigError
from pegainfer.log import get_logger
from pegainfer.runtime.device import Device

__all__ = ["build_engine_core", "make_device"]


def build_engine_core(config: EngineConfig, vocabulary: Callable[[], Vocabulary]) -> EngineCore:
    """The engine of `config`. `vocabulary` is called (and may wait) when the first thing needs it.

    Raises `PegaInferError` for whatever a user can set right.
    """
    if config.simulator.simulate:
        return _build_simulated(config, vocabulary())
    # Imported here, so that a simulated engine needs neither kernels nor arrays.
    from pegainfer.tokenizer.tokenizer import stop_token_ids
    from pegainfer.weights.loader import open_checkpoint
    from pegainfer.worker.build import build_worker

    start = time.perf_counter()
    device = make_device(config)
    checkpoint = open_checkpoint(config.model, config.load)
    phases = {"open checkpoint": time.perf_counter() - start}
    known = vocabulary()
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
    if config.device == "cuda":
        from pegainfer.runtime.cuda.device import make_cuda_device

        return make_cuda_device()
    if config.device == "auto" and Path("/dev/nvidiactl").exists():
        try:
            from pegainfer.runtime.cuda.device import make_cuda_device

            return make_cuda_device()
        except ConfigError as error:
            get_logger(__name__).warning("the GPU is not used: %s", error)
    from pegainfer.runtime.cpu import make_cpu_device

    return make_cpu_device(config.num_threads)


def _build_simulated(config: EngineConfig, vocabulary: Vocabulary) -> EngineCore:
    from pegainfer.worker.sim import build_simulated_worker

    worker = build_simulated_worker(config, vocab_size=vocabulary.decodable_vocab_size)
    eos = vocabulary.eos_token_id
    return EngineCore(config, worker, eos_token_ids=() if eos is None else (eos,))
