"""`pegainfer bench throughput`: many requests at once through the offline API."""

from __future__ import annotations

import random
import secrets
import time
from dataclasses import dataclass

from pegainfer.cli.arguments import ArgumentParser, make
from pegainfer.cli.bench.offline import offline_engine, random_id_prompts, write_json
from pegainfer.config import option
from pegainfer.errors import ConfigError
from pegainfer.log import setup_logging

__all__ = ["run"]


@dataclass(frozen=True, slots=True)
class ThroughputOptions:
    """What is generated."""

    dataset_name: str = option("random", "Source of the prompts.", choices=("random",))
    input_len: int = option(512, "Tokens per prompt.")
    output_len: int = option(128, "Tokens to generate per prompt.")
    prefix_len: int = option(0, "Tokens in front that all prompts share.")
    num_prompts: int = option(1000, "Requests.")
    n: int = option(1, "Outputs per request.")
    disable_detokenize: bool = option(False, "Do not make text of the outputs.")
    prompt_seed: int | None = option(None, "Seed of the prompts; a new one for every run by default.")
    output_json: str | None = option(None, "File for the result.")


def run(arguments: list[str]) -> int:
    """Measure and print."""
    parser = ArgumentParser(
        "bench throughput",
        "Measure offline tokens per second: all requests are known from the start.",
        examples=(
            "pegainfer bench throughput smollm2 --num-prompts 64 --input-len 128 --output-len 64",
            "pegainfer bench throughput ./Qwen3-0.6B --load-format dummy --output-json result.json",
        ),
    )
    parser.add_model()
    parser.add_options(ThroughputOptions, "Benchmark")
    parser.add_engine_options()
    namespace = parser.parse(arguments)
    options = make(ThroughputOptions, namespace)
    for name in ("input_len", "output_len", "num_prompts", "n"):
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
    with offline_engine(namespace) as llm:
        rng = random.Random(options.prompt_seed if options.prompt_seed is not None else secrets.randbits(32))
        prompts = random_id_prompts(
            llm, options.num_prompts, rng=rng, length=options.input_len, prefix=options.prefix_len
        )
        started = time.perf_counter()
        outputs = llm.generate(prompts, params)
        elapsed = time.perf_counter() - started
    num_prompt_tokens = sum(len(prompt["prompt_token_ids"]) for prompt in prompts)
    num_output_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    total = num_prompt_tokens + num_output_tokens
    print(
        f"Throughput: {len(prompts) / elapsed:.2f} requests/s, {total / elapsed:.2f} total tokens/s, "
        f"{num_output_tokens / elapsed:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {num_prompt_tokens}")
    print(f"Total num output tokens:  {num_output_tokens}")
    result = {
        "elapsed_time": elapsed,
        "num_requests": len(prompts),
        "total_num_tokens": total,
        "requests_per_second": len(prompts) / elapsed,
        "tokens_per_second": total / elapsed,
        "output_tokens_per_second": num_output_tokens / elapsed,
    }
    write_json(options.output_json, result)
    return 0
