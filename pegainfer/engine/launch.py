"""Starting an engine in a process of its own, while this process loads the tokenizer."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass

from pegainfer.config import EngineConfig
from pegainfer.engine.client import EngineClient, RequestObserver
from pegainfer.engine.messages import StartEngine, Vocabulary
from pegainfer.tokenizer.tokenizer import Tokenizer
from pegainfer.weights.loader import load_tokenizer, resolve_model

__all__ = ["LaunchedEngine", "launch_engine", "located", "tokenizer_of", "vocabulary_of"]


@dataclass(frozen=True, slots=True)
class LaunchedEngine:
    """An engine that welcomes requests, and the tokenizer of its model (None with `skip_tokenizer_init`)."""

    client: EngineClient
    tokenizer: Tokenizer | None
    config: EngineConfig


async def launch_engine(config: EngineConfig, *, observer: RequestObserver | None = None) -> LaunchedEngine:
    """Start the engine of `config` and wait until it is ready. Raises `PegaInferError`; nothing runs then."""
    client = EngineClient(observer=observer)
    try:
        config = await asyncio.to_thread(located, config)
        client.send(StartEngine(config))
        tokenizer = await asyncio.to_thread(tokenizer_of, config)
        client.send(vocabulary_of(tokenizer))
        await client.ready()
    except BaseException:
        await client.close()
        raise
    return LaunchedEngine(client, tokenizer, config)


def located(config: EngineConfig) -> EngineConfig:
    """`config` with the model on this machine, fetched if need be, under the name that was asked for."""
    model = config.model
    if config.simulator.simulate and (model.skip_tokenizer_init or model.tokenizer):
        return config
    path = resolve_model(model, config.load)
    model = dataclasses.replace(model, model=str(path), served_model_name=config.served_names)
    return dataclasses.replace(config, model=model)


def tokenizer_of(config: EngineConfig) -> Tokenizer | None:
    """The tokenizer that `config` asks for."""
    return None if config.model.skip_tokenizer_init else load_tokenizer(config.model, config.load)


def vocabulary_of(tokenizer: Tokenizer | None) -> Vocabulary:
    """What the engine must know of a tokenizer."""
    if tokenizer is None:
        return Vocabulary()
    return Vocabulary(tokenizer.decodable_vocab_size, tokenizer.eos_token_id)
