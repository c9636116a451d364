"""`pegainfer bench serve`: load a running OpenAI-compatible server and report what its clients see.

Flags, printed block and result file are those of `vllm bench serve`. Every run makes fresh prompts unless
`--seed` is given, so that no run is served from the prefix cache that an earlier one filled.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import math
import random
import secrets
import time
from pathlib import Path
from typing import Any

import uvloop

from pegainfer import envs
from pegainfer.cli.arguments import ArgumentParser, make
from pegainfer.cli.bench.dataset import (
    Prompt,
    ServerTokenizer,
    custom_prompts,
    random_prompts,
    sharegpt_prompts,
)
from pegainfer.cli.bench.http import HttpClient, HttpError
from pegainfer.cli.bench.load import Requests, drive
from pegainfer.cli.bench.options import (
    Benchmark,
    LoadShapeOptions,
    PromptOptions,
    ReportOptions,
    TargetOptions,
    check,
    numbers,
    pairs,
)
from pegainfer.cli.bench.report import Summary, print_summary, summarize
from pegainfer.cli.bench.stream import RequestResult
from pegainfer.errors import ConfigError

__all__ = ["run"]


def run(arguments: list[str]) -> int:
    """Run the benchmark; 1 when a request failed."""
    parser = ArgumentParser(
        "bench serve",
        "Load a running OpenAI-compatible server and report throughput and latencies.",
        examples=(
            "pegainfer bench serve --num-prompts 64 --random-input-len 512 --random-output-len 128",
            "pegainfer bench serve --request-rate 4 --ignore-eos --goodput ttft:500 tpot:50",
            "pegainfer bench serve --backend openai-chat --max-concurrency 8 --save-result",
            "pegainfer bench serve --base-url https://host/prefix --header X-Team=a --dataset-name sharegpt "
            "--dataset-path f.json",
        ),
    )
    parser.add_options(TargetOptions, "Server")
    parser.add_options(PromptOptions, "Prompts")
    parser.add_options(LoadShapeOptions, "Load")
    parser.add_options(ReportOptions, "Report")
    namespace = parser.parse(arguments)
    benchmark = Benchmark(
        make(TargetOptions, namespace),
        make(PromptOptions, namespace),
        make(LoadShapeOptions, namespace),
        make(ReportOptions, namespace),
    )
    check(benchmark)
    try:
        return uvloop.run(_run(benchmark))
    except HttpError as error:
        raise ConfigError(str(error)) from None


async def _run(benchmark: Benchmark) -> int:
    target, prompts, shape, report = benchmark.target, benchmark.prompts, benchmark.shape, benchmark.report
    percentiles, metrics = numbers(report.metric_percentiles), report.percentile_metrics.split(",")
    headers = dict(pairs("--header", target.header, "="))
    if key := envs.openai_api_key():
        headers.setdefault("Authorization", f"Bearer {key}")
    client = HttpClient(
        target.base_url or f"http://{target.host}:{target.port}", headers=headers, insecure=target.insecure
    )
    await _wait_until_ready(client, target.ready_check_timeout_sec)
    model_id, name = await _model(client, target)
    seed = prompts.seed if prompts.seed is not None else secrets.randbits(32)
    rng = random.Random(seed)
    print(f"Preparing {prompts.num_prompts} prompts for {name} (seed {seed})")
    wanted = await _prompts(client, name, benchmark, rng)
    requests = Requests(client, name, target, prompts)
    for prompt in wanted[: shape.num_warmups]:
        result = await requests.send(prompt, "warmup")
        if not result.success:
            raise ConfigError(f"a warm-up request failed: {result.error}")
    wanted = wanted[shape.num_warmups :]
    print(f"Traffic request rate: {shape.request_rate}, maximum request concurrency: {shape.max_concurrency}")
    started = time.perf_counter()
    results = await drive(requests, wanted, shape=shape, rng=rng, progress=not report.disable_tqdm)
    duration = time.perf_counter() - started
    await client.close()
    goodput = {metric: float(limit) for metric, limit in pairs("--goodput", report.goodput, ":")}
    summary = summarize(results, duration, goodput=goodput)
    print_summary(
        summary,
        request_rate=shape.request_rate,
        max_concurrency=shape.max_concurrency,
        metrics=metrics,
        percentiles=percentiles,
    )
    errors = [result.error for result in results if not result.success]
    if errors:
        print(f"{len(errors)} requests failed; the first with: {errors[0]}")
    if report.save_result or report.append_result:
        print(f"Result: {_save(benchmark, summary, results, model_id=model_id, seed=seed)}")
    return 1 if errors else 0


async def _prompts(client: HttpClient, model: str, benchmark: Benchmark, rng: random.Random) -> list[Prompt]:
    options = benchmark.prompts
    count = options.num_prompts + benchmark.shape.num_warmups
    tokenizer = ServerTokenizer(client, model)
    if options.dataset_name == "random":
        return await random_prompts(
            tokenizer,
            count,
            rng=rng,
            input_len=options.input_len or options.random_input_len,
            output_len=options.output_len or options.random_output_len,
            range_ratio=options.random_range_ratio,
            prefix_len=options.random_prefix_len,
            as_ids=options.skip_tokenizer_init,
            vocab_size=options.random_vocab_size,
        )
    assert options.dataset_path is not None
    path = Path(options.dataset_path)
    if options.dataset_name == "custom":
        return custom_prompts(path, count, output_len=options.output_len or options.random_output_len)
    return await sharegpt_prompts(path, count, tokenizer=tokenizer, rng=rng, output_len=options.output_len)


async def _model(client: HttpClient, target: TargetOptions) -> tuple[str, str]:
    """The model's id for the result file and its name in requests."""
    if target.model is not None:
        return target.model, target.served_model_name or target.model
    response = await client.request("GET", "/v1/models")
    models = response.json().get("data") if response.status == 200 else None
    if not models:
        raise ConfigError(f"the server lists no model (HTTP {response.status} from /v1/models); give --model")
    name = models[0]["id"]
    return models[0].get("root") or name, target.served_model_name or name


async def _wait_until_ready(client: HttpClient, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while timeout > 0:
        try:
            if (await client.request("GET", "/health")).status == 200:
                return
            reason = "it is not ready"
        except HttpError as error:
            reason = str(error)
        if time.monotonic() > deadline:
            raise ConfigError(f"the server was not ready within {timeout:g} s: {reason}")
        await asyncio.sleep(0.1)


def _save(
    benchmark: Benchmark, summary: Summary, results: list[RequestResult], *, model_id: str, seed: int
) -> Path:
    target, shape, report = benchmark.target, benchmark.shape, benchmark.report
    now = datetime.datetime.now()
    rate: float | str = "inf" if math.isinf(shape.request_rate) else shape.request_rate
    values: dict[str, Any] = {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": target.backend,
        "backend": target.backend,
        "label": report.label,
        "model_id": model_id,
        "tokenizer_id": target.tokenizer or model_id,
        "num_prompts": benchmark.prompts.num_prompts,
        "seed": seed,
        "request_rate": rate,
        "burstiness": shape.burstiness,
        "max_concurrency": shape.max_concurrency,
        **dict(pairs("--metadata", report.metadata, "=")),
        **summary.as_json(numbers(report.metric_percentiles)),
    }
    if report.save_detailed:
        values |= {
            "input_lens": [result.prompt_len for result in results],
            "output_lens": [result.output_len for result in results],
            "ttfts": [result.ttft for result in results],
            "itls": [result.itls for result in results],
            "start_times": [result.start_time for result in results],
            "generated_texts": [result.text for result in results],
            "errors": [result.error for result in results],
        }
    concurrency = f"-concurrency{shape.max_concurrency}" if shape.max_concurrency else ""
    label, base = report.label or target.backend, Path(model_id).name
    name = report.result_filename or f"{label}-{rate}qps{concurrency}-{base}-{values['date']}.json"
    path = Path(report.result_dir or ".") / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if report.append_result else "w", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write the result: {error}") from None
    return path
