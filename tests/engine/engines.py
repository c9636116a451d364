"""Engines over the simulated worker, in this process and in one of their own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from pegainfer.config import EngineConfig
from pegainfer.engine.client import EngineClient, Generation, RequestObserver
from pegainfer.engine.core import EngineCore
from pegainfer.engine.inputs import RequestLimits, make_requests
from pegainfer.engine.launch import launch_engine
from pegainfer.engine.messages import AddRequest, RequestUpdate
from pegainfer.sampling_params import SamplingParams
from pegainfer.worker.base import WorkerInfo
from pegainfer.worker.sim import SimulatedWorker

VOCAB_SIZE = 1000
EOS = 2

_serial = itertools.count()


def run(main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Run an asynchronous test, at most a minute."""

    async def limited() -> Any:
        return await asyncio.wait_for(main(), 60)

    return asyncio.run(limited())


def make_info(
    *, steps_in_flight: int = 1, num_blocks: int = 256, max_model_len: int = 512, step_tokens: int = 64
) -> WorkerInfo:
    """What a simulated device claims to be."""
    return WorkerInfo(
        architecture="Simulated",
        device_name="none",
        dtype="none",
        weight_format="none",
        weight_bytes=0,
        num_parameters=0,
        vocab_size=VOCAB_SIZE,
        decodable_vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        max_num_batched_tokens=step_tokens,
        max_num_mixed_tokens=step_tokens,
        block_size=16,
        num_blocks=num_blocks,
        kv_cache_bytes=0,
        max_steps_in_flight=steps_in_flight,
    )


def make_core(
    *, steps_in_flight: int = 1, num_blocks: int = 256, max_model_len: int = 512, **options: Any
) -> EngineCore:
    """An engine in this process whose steps take no time."""
    info = make_info(steps_in_flight=steps_in_flight, num_blocks=num_blocks, max_model_len=max_model_len)
    return EngineCore(EngineConfig.from_flat(**options), SimulatedWorker(info), eos_token_ids=(EOS,))


def add_request(prompt: list[int], request_id: str | None = None, **params: Any) -> AddRequest:
    """One engine request."""
    return AddRequest(request_id or f"r{next(_serial)}", prompt, SamplingParams(**params))


def run_core(core: EngineCore, *, max_steps: int = 10_000) -> dict[str, list[RequestUpdate]]:
    """Step until nothing is left: all updates by request."""
    updates: dict[str, list[RequestUpdate]] = {}
    for _ in range(max_steps):
        if not core.has_work:
            return updates
        for update in core.step():
            updates.setdefault(update.request_id, []).append(update)
    raise AssertionError(f"the engine still works after {max_steps} steps")


def tokens_of(updates: list[RequestUpdate]) -> list[int]:
    """All tokens of one request."""
    return [token_id for update in updates for token_id in update.token_ids]


@asynccontextmanager
async def engine(*, observer: RequestObserver | None = None, **options: Any) -> AsyncIterator[EngineClient]:
    """A simulated engine in a process of its own."""
    options = {"sim_ttft_ms": 0.0, "sim_tpot_ms": 1.0, **options}
    config = EngineConfig.from_flat(simulate=True, skip_tokenizer_init=True, **options)
    launched = await launch_engine(config, observer=observer)
    try:
        yield launched.client
    finally:
        await launched.client.close()


def start(client: EngineClient, prompt: list[int], **params: Any) -> Generation:
    """Start one request on a client."""
    limits = RequestLimits(client.info.vocab_size, client.info.max_model_len, client.info.kv_capacity)
    params.setdefault("ignore_eos", True)
    return client.generate(make_requests("test", prompt, SamplingParams(**params), limits=limits))


async def drain(generation: Generation) -> list[RequestUpdate]:
    """Every update until the end."""
    return [update async for batch in generation for update in batch]
