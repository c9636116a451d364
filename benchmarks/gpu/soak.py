"""Minutes of mixed load on a real server, and what is left of it afterwards.

    python benchmarks/gpu/soak.py MODEL [--minutes 10] [--clients 48] [--device cuda] [--out FILE]

Clients send prompts of a few to some thousand tokens, greedy and sampled, with and without penalties and
log-probabilities, alone and several at a time; some leave in the middle of an answer. The KV cache is made
too small for all of them, so that requests are preempted. Among them a few probes come again and again,
whose answers are known from when the server had nothing else to do: they must be the same, or part from it
where the two likeliest tokens were closer than `NEAR` nats, which rounding may decide, and score the tokens
that they share alike. (Of random weights most tokens are that close; a trained model says more.) In the end
nothing may be left: no running request, no used block, no grown memory; and the probes, alone again, must
answer bit for bit as at first. Exit status 1 when something is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import describe_machine, snapshot_path
from server import Server, running_server

from pegainfer.cli.bench.http import HttpClient, HttpError

NEAR = 0.2
"""Nats: answers may part where the gap between the two likeliest tokens is smaller; the gate's own limit."""
STALL_S = 10.0
GROWTH_MB, GPU_GROWTH_MB = 60, 64  # after the first tenth of the time; half of that in the second half
PROBES = ((12, 40), (333, 64), (1500, 48), (3000, 24))  # tokens of the prompt, of the answer


@dataclass
class Tally:
    """What happened."""

    finished: int = 0
    left: int = 0
    tokens: int = 0
    probes_equal: int = 0
    probes_parted: int = 0
    longest_gap_s: float = 0.0
    problems: list[str] = field(default_factory=list)


class Answer:
    """A probe's tokens, and how far the likeliest was ahead of the next at each."""

    def __init__(self, body: Any) -> None:
        (choice,) = body["choices"]
        self.token_ids: list[int] = choice["token_ids"]
        self.scores: list[float] = choice["logprobs"]["token_logprobs"]
        self.gaps = []
        for top in choice["logprobs"]["top_logprobs"]:
            first, second = sorted(top.values(), reverse=True)[:2]
            self.gaps.append(first - second)

    def parts_from(self, other: Answer) -> int | None:
        """The first token that differs."""
        pairs = zip(self.token_ids, other.token_ids, strict=True)
        return next((index for index, (one, two) in enumerate(pairs) if one != two), None)

    def drift_from(self, other: Answer, at: int | None) -> float:
        """The largest difference of log-probabilities of the tokens before `at`."""
        pairs = zip(self.scores[:at], other.scores[:at], strict=True)
        return max((abs(one - two) for one, two in pairs), default=0.0)


def main() -> int:
    """Start the server, run the load, write the snapshot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--blocks", type=int, default=3000, help="KV blocks of the cache")
    parser.add_argument("--vocabulary", type=int, default=100_000, help="ids of prompts are below this")
    parser.add_argument("--flag", nargs="*", default=[], help="further flags of the server, without --")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    flags = [
        *("--skip-tokenizer-init", "--device", options.device, "--max-model-len", "8192"),
        *("--num-gpu-blocks-override", str(options.blocks), "--disable-uvicorn-access-log"),
        *(f"--{flag}" for flag in options.flag),
    ]
    with running_server(options.model, flags) as server:
        load = Load(server, options.vocabulary)
        result, problems = asyncio.run(load.soak(options.minutes * 60, options.clients))
    log = server.log.read_text()
    problems += [line for line in log.splitlines() if " ERROR " in line or "Traceback" in line][:5]
    result |= {"minutes": options.minutes, "clients": options.clients, "flags": flags}
    result["problems"] = problems
    target = options.out or snapshot_path(f"soak-{options.model.name}")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result | describe_machine(), indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 1 if problems else 0


class Load:
    """The clients, what they know and what they see. `vocabulary` bounds the ids of prompts."""

    def __init__(self, server: Server, vocabulary: int) -> None:
        self._server = server
        self._ids = range(vocabulary)
        self._prompts = [
            random.Random(1000 + index).choices(self._ids, k=length)
            for index, (length, _) in enumerate(PROBES)
        ]
        self._known: list[Answer] = []
        self._tally = Tally()

    async def soak(self, seconds: float, clients: int) -> tuple[dict[str, Any], list[str]]:
        """The whole course: probes alone, load, probes alone again."""
        client, server, tally = HttpClient(self._server.url), self._server, self._tally
        self._known = [await self._probe(client, index) for index in range(len(PROBES))]
        end = time.monotonic() + seconds
        workers = [asyncio.create_task(self._work(index, end)) for index in range(clients)]
        course = []  # of the memory of the server and of the GPU, by tenths of the time
        for tenth in range(1, 10):
            await asyncio.sleep(end - seconds * (1 - tenth / 10) - time.monotonic())
            course.append((server.memory_mb(), gpu_memory_mb()))
        await asyncio.gather(*workers)
        await asyncio.sleep(1.0)
        metrics = await read_metrics(client)
        course.append((server.memory_mb(), gpu_memory_mb()))
        growth = {
            part: [last - first for first, last in zip(course[start], course[-1], strict=True)]
            for part, start in (("after the first tenth", 0), ("in the second half", 4))
        }
        again = [await self._probe(client, index) for index in range(len(PROBES))]
        problems = tally.problems
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            if metrics[name]:
                problems.append(f"{name} is {metrics[name]} after the load")
        for share, (part, (host, gpu)) in zip((1, 2), growth.items(), strict=True):
            if host > GROWTH_MB / share:
                problems.append(f"the server grew by {host} MB {part}")
            if gpu > GPU_GROWTH_MB / share:
                problems.append(f"GPU memory grew by {gpu} MB {part}")
        if tally.longest_gap_s > STALL_S:
            problems.append(f"a stream stood still for {tally.longest_gap_s:.1f} s")
        for index, (first, last) in enumerate(zip(self._known, again, strict=True)):
            if (first.token_ids, first.scores) != (last.token_ids, last.scores):
                problems.append(f"probe {index} answers otherwise than at first")
        result = {name: value for name, value in vars(tally).items() if name != "problems"}
        result |= {"preemptions": metrics["num_preemptions_total"]}
        result |= {"memory_mb": [host for host, _ in course]}
        result["gpu_memory_mb"] = [gpu for _, gpu in course]
        result["longest_gap_s"] = round(tally.longest_gap_s, 2)
        return result, problems

    async def _work(self, index: int, end: float) -> None:
        """One client: requests of all kinds, one after the other, with pauses in which bursts gather."""
        client, rng = HttpClient(self._server.url), random.Random(index)
        while time.monotonic() < end:
            try:
                if rng.random() < 0.15:
                    await self._check_probe(client, rng.randrange(len(PROBES)))
                else:
                    await self._stream(client, rng)
            except (HttpError, KeyError, ValueError) as error:
                self._tally.problems.append(f"{type(error).__name__}: {error}"[:300])
                return
            if rng.random() < 0.1:
                # All wait for the same full ten seconds, and come back together.
                await asyncio.sleep(10.0 - time.monotonic() % 10.0)

    async def _probe(self, client: HttpClient, index: int) -> Answer:
        """A request whose answer is known; it never finds its own prefix in the cache."""
        body = {"prompt": self._prompts[index], "max_tokens": PROBES[index][1], "temperature": 0}
        body |= {"ignore_eos": True, "logprobs": 2, "cache_salt": f"probe {random.random()}"}
        body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
        response = await client.request("POST", "/v1/completions", body=body)
        if response.status != 200:
            raise HttpError(f"HTTP {response.status}: {response.body[:200]!r}")
        return Answer(response.json())

    async def _check_probe(self, client: HttpClient, index: int) -> None:
        """A probe under load."""
        known, tally = self._known[index], self._tally
        answer = await self._probe(client, index)
        at = answer.parts_from(known)
        drift = answer.drift_from(known, at)
        if drift > NEAR:
            tally.problems.append(f"probe {index} scores its tokens otherwise by {drift:.3f} nats")
        elif at is None:
            tally.probes_equal += 1
        elif min(known.gaps[at], answer.gaps[at]) < NEAR:
            tally.probes_parted += 1
        else:
            tally.problems.append(f"probe {index} parts at {at}, where the gap is {known.gaps[at]:.3f}")

    async def _stream(self, client: HttpClient, rng: random.Random) -> None:
        """A streamed request; one in six is left in the middle."""
        tally, body = self._tally, self._body(rng)
        leaves_after = rng.randint(1, 40) if rng.random() < 1 / 6 else None
        last, pieces = time.monotonic(), 0
        left = asyncio.Event()

        def on_body(piece: bytes) -> None:
            nonlocal last, pieces
            now = time.monotonic()
            if pieces:
                tally.longest_gap_s = max(tally.longest_gap_s, now - last)
            last = now
            pieces += 1
            if leaves_after is not None and pieces >= leaves_after:
                left.set()
            if b'"error"' in piece:
                tally.problems.append(piece[:300].decode(errors="replace"))

        request = asyncio.ensure_future(client.request("POST", "/v1/completions", body=body, on_body=on_body))
        leaving = asyncio.ensure_future(left.wait())
        await asyncio.wait({request, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not request.done():
            request.cancel()
            tally.left += 1
            return
        response = request.result()
        if response.status != 200:
            tally.problems.append(f"HTTP {response.status}: {response.body[:200]!r}")
        tally.finished += 1
        tally.tokens += body["max_tokens"] * body.get("n", 1)

    def _body(self, rng: random.Random) -> dict[str, Any]:
        """A request of some kind."""
        length = int(2 ** rng.uniform(2, 12.5))
        ids = rng.choices(self._ids, k=length)
        if rng.random() < 0.3:  # a common prefix
            ids[: length // 2] = [index * 7 % len(self._ids) for index in range(length // 2)]
        body: dict[str, Any] = {"prompt": ids, "max_tokens": rng.randint(1, 160), "stream": True}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        body["temperature"] = rng.choice([0, 0, 0.7, 1.2])
        if rng.random() < 0.3:
            body |= {"top_p": 0.9, "top_k": rng.choice([-1, 40]), "min_p": rng.choice([0, 0.05])}
        if rng.random() < 0.2:
            body |= {"presence_penalty": 1.0, "repetition_penalty": 1.1, "frequency_penalty": 0.2}
        if rng.random() < 0.2:
            body["logprobs"] = rng.choice([0, 5])
        if rng.random() < 0.1:
            body |= {"n": 3, "temperature": 1.0}
        return body


async def read_metrics(client: HttpClient) -> dict[str, float]:
    """The server's own numbers, by name without prefix and labels."""
    text = (await client.request("GET", "/metrics")).body.decode()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {
        line.split("{")[0].split(" ")[0].partition(":")[2]: float(line.rsplit(" ", 1)[1]) for line in lines
    }


def gpu_memory_mb() -> int:
    """Used memory of the first GPU; 0 without one."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0])
    except (OSError, subprocess.CalledProcessError):
        return 0


if __name__ == "__main__":
    sys.exit(main())
