"""One streamed request and what a client can see of it: when tokens arrived, and how it ended.

Times are seconds by `time.perf_counter`. A chunk counts as an arrival of tokens when it brings text or a
token; the role chunk of a chat and a final chunk that only says why the text ended do not.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import orjson

from pegainfer.cli.bench.http import HttpClient, HttpError

__all__ = ["RequestResult", "run_request"]


@dataclass(slots=True)
class RequestResult:
    """What happened to one request. `latency` runs to the last token; `itls` are gaps between arrivals."""

    success: bool = False
    error: str = ""
    prompt_len: int = 0
    output_len: int = 0
    start_time: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itls: list[float] = field(default_factory=list)
    text: str = ""

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first; 0 when there is only one."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else 0.0


async def run_request(
    client: HttpClient, path: str, *, body: dict[str, Any], prompt_len: int, headers: dict[str, str]
) -> RequestResult:
    """Send one streaming request and watch its events. Never raises for what the server does."""
    result = RequestResult(prompt_len=prompt_len, start_time=time.perf_counter())
    events = _Events(result)
    try:
        response = await client.request("POST", path, body=body, headers=headers, on_body=events.feed)
    except HttpError as error:
        result.error = str(error)
        return result
    if response.status != 200:
        result.error = f"HTTP {response.status}: {response.body[:500].decode(errors='replace')}"
    elif events.error:
        result.error = events.error
    elif events.num_arrivals == 0 and result.output_len == 0:
        result.error = "the stream ended without a token"
    else:
        result.success = True
        result.output_len = result.output_len or events.num_arrivals
    result.text = "".join(events.texts)
    return result


class _Events:
    """Server-sent events of one stream, fed in pieces of any size."""

    def __init__(self, result: RequestResult) -> None:
        self.error = ""
        self.texts: list[str] = []
        self.num_arrivals = 0
        self._result = result
        self._rest = b""
        self._last = 0.0

    def feed(self, piece: bytes) -> None:
        """Take the next bytes of the body."""
        now = time.perf_counter()
        *events, self._rest = (self._rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    self._data(line[5:].strip(), now)

    def _data(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            return
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            self.error = f"an event is not JSON: {data[:200]!r}"
            return
        if "error" in chunk:
            self.error = str(chunk["error"])
            return
        usage = chunk.get("usage")
        if usage:
            self._result.output_len = usage.get("completion_tokens") or 0
            self._result.prompt_len = usage.get("prompt_tokens") or self._result.prompt_len
        for choice in chunk.get("choices") or ():
            self._choice(choice, now)

    def _choice(self, choice: dict[str, Any], now: float) -> None:
        delta = choice.get("delta")
        if delta is None:
            text = choice.get("text") or ""
        else:
            text = (delta.get("reasoning") or delta.get("reasoning_content") or "") + (
                delta.get("content") or ""
            )
            if not text and "role" in delta:
                return
        if not text and choice.get("finish_reason"):
            return
        self.texts.append(text)
        self.num_arrivals += 1
        result = self._result
        if self.num_arrivals == 1:
            result.ttft = now - result.start_time
        else:
            result.itls.append(now - self._last)
        self._last = now
        result.latency = now - result.start_time
