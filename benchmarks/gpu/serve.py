"""The serving table on a GPU: start-up, memory, latencies and throughput through the real server.

    python benchmarks/gpu/serve.py MODEL [--rows 1/256@1 1024/128@16 ...] [--out FILE]

MODEL is a checkpoint, or a config.json for random weights of its shapes (which take longer to make
than to read: for start-up times write a directory with `scripts/make-model` first). Every row draws
new prompts, so that no row finds another's prefixes in the cache. Rows are `input/output@concurrency`
(8 requests a client, 6 for more than 32 clients) or `input/output@RATErps` (15 seconds of them), the
counts behind the numbers that ours are compared with. The client is `pegainfer bench serve`. The
results, with commit, driver and flags, go to `benchmarks/snapshots/`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from machine import describe_machine, snapshot_path
from server import PORT, running_server

ROWS = ("1/256@1", "1024/128@1", "1024/128@16", "1024/128@64", "1024/128@16rps")
TTFT_LENGTHS = (1024, 4096, 16384)
URL = f"http://127.0.0.1:{PORT}"


def main() -> int:
    """Start the server, run the rows, write the snapshot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--ttft", nargs="*", type=int, default=list(TTFT_LENGTHS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--flag", nargs="*", default=[], help="further flags of the server, without --")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    flags = [
        *(("--load-format", "dummy") if options.config.is_file() else ()),
        *("--skip-tokenizer-init", "--device", options.device),
        *("--max-model-len", "20480", "--disable-uvicorn-access-log"),
        *(f"--{flag}" for flag in options.flag),
    ]
    result: dict[str, Any] = {"rows": {}, "ttft": {}}
    with running_server(options.config, flags) as server:
        result["start_s"] = round(server.start_s, 2)
        result["rss_idle_mb"] = server.memory_mb()
        print(f"ready after {result['start_s']} s, RSS {result['rss_idle_mb']} MB", flush=True)
        complete([1, 2, 3], 8)
        for row in options.rows:
            result["rows"][row] = run_row(row)
        for length in options.ttft:
            result["ttft"][str(length)] = ttft(length)
            print(f"TTFT {length}: {result['ttft'][str(length)]}", flush=True)
        result["rss_loaded_mb"] = server.memory_mb()
        print(f"RSS loaded {result['rss_loaded_mb']} MB", flush=True)
    print(server.log.read_text()[-3000:], flush=True)
    result |= {"config": options.config.stem, "flags": flags, **describe_machine()}
    target = options.out or snapshot_path(options.config.stem)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {target}")
    return 0


def run_row(row: str) -> dict[str, float]:
    """One row of the table through `pegainfer bench serve`."""
    sizes, _, load = row.partition("@")
    size_in, size_out = sizes.split("/")
    if load.endswith("rps"):
        rate = float(load.removesuffix("rps"))
        arguments, count = ["--request-rate", str(rate)], int(rate * 15)
    else:
        arguments, count = ["--max-concurrency", load], (6 if int(load) > 32 else 8) * int(load)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                *(sys.executable, "-m", "pegainfer", "bench", "serve", "--port", str(PORT)),
                *(
                    "--skip-tokenizer-init",
                    "--random-vocab-size",
                    "100000",
                    "--ignore-eos",
                    "--temperature",
                    "0",
                ),
                *("--random-input-len", size_in, "--random-output-len", size_out),
                *("--num-prompts", str(count), "--num-warmups", "4", "--save-result", "--disable-tqdm"),
                *("--result-dir", folder, "--result-filename", "row.json", *arguments),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        data = json.loads((Path(folder) / "row.json").read_text())
    wanted = [
        f"{kind}_{metric}_ms" for metric in ("ttft", "tpot", "itl") for kind in ("mean", "median", "p99")
    ]
    found = {name: round(data[name], 2) for name in wanted if data.get(name) is not None}
    found |= {"output_throughput": round(data["output_throughput"], 1), "failed": data["failed"]}
    print(f"{row}: {found}", flush=True)
    return found


def ttft(length: int) -> dict[str, float]:
    """Milliseconds to the first token: cold (median of 3), and with the prompt in the prefix cache (20)."""
    cold = []
    for _ in range(3):
        ids = [random.randrange(1000, 100000) for _ in range(length)]
        cold.append(first_token_ms(ids))
    warm = sorted(first_token_ms(ids) for _ in range(20))
    return {
        "cold": round(statistics.median(cold), 2),
        "warm_p50": round(statistics.median(warm), 2),
        "warm_p99": round(warm[-1], 2),
    }


def first_token_ms(ids: list[int]) -> float:
    """From the request to the first event."""
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0, "stream": True, "ignore_eos": True}
    request = urllib.request.Request(
        f"{URL}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    start = time.perf_counter()
    with urllib.request.urlopen(request) as response:
        response.readline()
        return (time.perf_counter() - start) * 1e3


def complete(ids: list[int], count: int) -> None:
    """A small completion, so that nothing happens for the first time in the first row."""
    body = {"prompt": ids, "max_tokens": count, "ignore_eos": True}
    request = urllib.request.Request(
        f"{URL}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request).read()


if __name__ == "__main__":
    sys.exit(main())
