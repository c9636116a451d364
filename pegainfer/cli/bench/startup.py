"""`pegainfer bench startup`: seconds from the command to a server that answers, and the memory it holds then.

Cold iterations start with the model and the installed packages dropped from the page cache, as after a
reboot; warm ones find them there.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from pegainfer.cli.arguments import ArgumentParser, as_words, engine_config, make
from pegainfer.cli.bench.processes import drop_from_page_cache, running_server
from pegainfer.config import option

__all__ = ["run"]


@dataclass(frozen=True, slots=True)
class StartupOptions:
    """How often, and where the result goes."""

    num_iters_cold: int = option(3, "Starts with an empty page cache.")
    num_iters_warmup: int = option(1, "Starts before the warm ones that are not counted.")
    num_iters_warm: int = option(3, "Starts with a warm page cache.")
    output_json: str | None = option(None, "File for the result.")


@dataclass(frozen=True, slots=True)
class _Start:
    ready_s: float
    first_token_s: float
    rss_bytes: int
    pss_bytes: int
    processes: int


def run(arguments: list[str]) -> int:
    """Start the server again and again; print medians."""
    parser = ArgumentParser(
        "bench startup",
        "Measure the time from command to ready, to the first token, and the memory of all processes.",
        examples=(
            "pegainfer bench startup smollm2",
            "pegainfer bench startup ./Qwen3-0.6B --num-iters-cold 1 --output-json startup.json",
        ),
    )
    parser.add_model()
    parser.add_engine_options()
    parser.add_options(StartupOptions, "Benchmark")
    namespace = parser.parse(arguments)
    options, config = make(StartupOptions, namespace), engine_config(namespace)
    words = as_words(namespace, exclude=StartupOptions)

    from pegainfer.weights.loader import resolve_model

    model = resolve_model(config.model, config.load)
    packages = Path(orjson.__file__).parents[1]
    result: dict[str, Any] = {"model": config.model.model}

    def forget() -> None:
        drop_from_page_cache([model, packages, Path(__file__).parents[2]])

    result["cold"] = _series("Cold", options.num_iters_cold, words, before=forget)
    _series("Warm-up", options.num_iters_warmup, words)
    result["warm"] = _series("Warm", options.num_iters_warm, words)
    if options.output_json:
        Path(options.output_json).write_bytes(orjson.dumps(result, option=orjson.OPT_INDENT_2))
    return 0


def _series(
    title: str, count: int, words: list[str], *, before: Callable[[], None] | None = None
) -> list[dict[str, Any]]:
    starts = []
    for _ in range(count):
        if before is not None:
            before()
        with running_server(words) as server:
            memory = server.memory()
            first = server.first_token_s()
            starts.append(_Start(server.ready_s, first, memory.rss, memory.pss, memory.processes))
    if starts:
        ready = statistics.median(start.ready_s for start in starts)
        first = statistics.median(start.first_token_s for start in starts)
        rss = statistics.median(start.rss_bytes for start in starts) / 1e6
        pss = statistics.median(start.pss_bytes for start in starts) / 1e6
        print(
            f"{title} start (median of {count}): ready in {ready:.2f} s, first token after {first:.2f} s, "
            f"memory when idle {rss:.0f} MB RSS ({pss:.0f} MB PSS) in {starts[0].processes} processes"
        )
    return [asdict(start) for start in starts]
