#!/usr/bin/env python3
"""Idle memory of the server's processes, and seconds from the command to ready, with a warm page cache.

python benchmarks/cpu/memory.py [MODEL] [--starts 5]
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from pathlib import Path

from pegainfer import __version__
from pegainfer.cli.bench.processes import running_server
from pegainfer.runtime.cpu.isa import cpu_name
from pegainfer.runtime.cpu.limits import default_num_threads

SETTLE_SECONDS = 2.0


def main() -> int:
    """Start the server some times, print medians, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "snapshots" / "cpu" / "memory.json"
    )
    options = parser.parse_args()
    starts = []
    for number in range(options.starts + 1):
        with running_server([options.model, "--device", "cpu"]) as server:
            time.sleep(SETTLE_SECONDS)
            memory = server.memory()
            if number:  # the first one warms the page cache
                starts.append((server.ready_s, memory.rss, memory.pss, memory.processes))
    result = {
        "date": datetime.date.today().isoformat(),
        "model": options.model,
        "processor": cpu_name(),
        "threads": default_num_threads(),
        "pegainfer": __version__,
        "starts": options.starts,
        "ready_s": statistics.median(start[0] for start in starts),
        "rss_mb": statistics.median(start[1] for start in starts) / 1e6,
        "pss_mb": statistics.median(start[2] for start in starts) / 1e6,
        "processes": starts[0][3],
    }
    print(json.dumps(result, indent=1))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
