"""Turns prompts into requests and sends them when they are due."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

from tqdm import tqdm

from pegainfer.cli.bench.dataset import Prompt
from pegainfer.cli.bench.http import HttpClient
from pegainfer.cli.bench.options import LoadShapeOptions, PromptOptions, TargetOptions
from pegainfer.cli.bench.stream import RequestResult, run_request

__all__ = ["Requests", "drive"]


class Requests:
    """Makes and sends the requests of one run."""

    def __init__(self, client: HttpClient, model: str, target: TargetOptions, prompts: PromptOptions) -> None:
        self._client = client
        self._chat = target.backend == "openai-chat"
        default = "/v1/chat/completions" if self._chat else "/v1/completions"
        self._path = target.endpoint or default
        self._run_id = secrets.token_hex(4)
        sampling = {name: getattr(prompts, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        self._fields: dict[str, Any] = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in sampling.items() if value is not None},
        }
        if prompts.logprobs is not None:
            self._fields |= (
                {"logprobs": True, "top_logprobs": prompts.logprobs}
                if self._chat
                else {"logprobs": prompts.logprobs}
            )
        if prompts.ignore_eos:
            self._fields["ignore_eos"] = True
        self._extra = prompts.extra_body

    async def send(self, prompt: Prompt, number: object) -> RequestResult:
        """Send one request and wait for its end."""
        if self._chat:
            asked = {
                "messages": [{"role": "user", "content": prompt.content}],
                "max_completion_tokens": prompt.output_len,
            }
        else:
            asked = {"prompt": prompt.content, "max_tokens": prompt.output_len}
        return await run_request(
            self._client,
            self._path,
            body={**self._fields, **asked, **self._extra},
            prompt_len=prompt.num_tokens,
            headers={"x-request-id": f"bench-{self._run_id}-{number}"},
        )


async def drive(
    requests: Requests, prompts: list[Prompt], *, shape: LoadShapeOptions, rng: random.Random, progress: bool
) -> list[RequestResult]:
    """Send every prompt when it is due, at most `shape.max_concurrency` at a time."""
    gate = asyncio.Semaphore(shape.max_concurrency) if shape.max_concurrency else contextlib.nullcontext()
    with tqdm(total=len(prompts), disable=not progress) as bar:

        async def one(prompt: Prompt, number: int) -> RequestResult:
            async with gate:
                result = await requests.send(prompt, number)
            bar.update()
            return result

        async with asyncio.TaskGroup() as group:
            tasks = []
            async for number in _arrivals(len(prompts), shape, rng):
                tasks.append(group.create_task(one(prompts[number], number)))
    return [task.result() for task in tasks]


async def _arrivals(count: int, shape: LoadShapeOptions, rng: random.Random) -> AsyncIterator[int]:
    """Yield each request's number when it is due; gaps are drawn from a gamma distribution and scaled so that
    the whole run has the rate that was asked for.
    """
    if math.isinf(shape.request_rate):
        for number in range(count):
            yield number
        return
    gaps = [rng.gammavariate(shape.burstiness, 1.0) for _ in range(count)]
    scale = count / shape.request_rate / sum(gaps)
    due = time.perf_counter()
    for number, gap in enumerate(gaps):
        due += gap * scale
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        yield number
