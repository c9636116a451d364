"""`pegainfer bench latency`: how long one batch takes from prompts to the last token."""

from __future__ import annotations

import random
import secrets
import statistics
import time
from dataclasses import dataclass

from tqdm import tqdm

from pegainfer.cli.arguments import ArgumentParser, make
from pegainfer.cli.bench.offline import offline_engine, random_id_prompts, write_json
from pegainfer.cli.bench.report import percentile
from pegainfer.config import option
from pegainfer.errors import ConfigError
from pegainfer.log import setup_logging

__all__ = ["run"]

_PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True)
class LatencyOptions:
    """The batch, and how often it is run."""

    input_len: int = option(32, "Tokens per prompt.")
    output_len: int = option(128, "Tokens to generate per prompt.")
    batch_size: int = option(8, "Prompts per batch.")
    n: int = option(1, "Outputs per prompt.")
    num_iters_warmup: int = option(10, "Batches that are not counted.")
    num_iters: int = option(30, "Batches that are counted.")
    disable_detokenize: bool = option(False, "Do not make text of the outputs.")
    prompt_seed: int | None = option(None, "Seed of the prompts; a new one for every run by default.")
    output_json: str | None = option(None, "File for the result.")


def run(arguments: list[str]) -> int:
    """Measure and print. Every batch has prompts of its own, so nothing comes from the prefix cache."""
    parser = ArgumentParser(
        "bench latency",
        "Measure the latency of one batch, from prompts to the last token.",
        examples=(
            "pegainfer bench latency smollm2 --batch-size 1 --num-iters 5",
            "pegainfer bench latency ./Qwen3-0.6B --input-len 512 --output-len 16 --output-json result.json",
        ),
    )
    parser.add_model()
    parser.add_options(LatencyOptions, "Benchmark")
    parser.add_engine_options()
    namespace = parser.parse(arguments)
    options = make(LatencyOptions, namespace)
    for name in ("input_len", "output_len", "batch_size", "n", "num_iters"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    setup_logging()

    from pegainfer.sampling_params import SamplingParams

    params = SamplingParams(
        n=options.n,
        temperature=1.0,
        top_p=1.0,
        max_tokens=options.output_len,
        ignore_eos=True,
        detokenize=not options.disable_detokenize,
    )
    seconds = []
    with offline_engine(namespace) as llm:
        rng = random.Random(options.prompt_seed if options.prompt_seed is not None else secrets.randbits(32))
        for number in tqdm(range(options.num_iters_warmup + options.num_iters), desc="Batches"):
            prompts = random_id_prompts(llm, options.batch_size, rng=rng, length=options.input_len)
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            if number >= options.num_iters_warmup:
                seconds.append(time.perf_counter() - started)
    print(f"Avg latency: {statistics.fmean(seconds)} seconds")
    percentiles = {str(p): percentile(seconds, p) for p in _PERCENTILES}
    for p, value in percentiles.items():
        print(f"{p}% percentile latency: {value} seconds")
    result = {"avg_latency": statistics.fmean(seconds), "latencies": seconds, "percentiles": percentiles}
    write_json(options.output_json, result)
    return 0
