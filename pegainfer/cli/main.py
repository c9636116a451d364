"""The `pegainfer` command: picks the verb, imports its module alone, and turns errors into exit codes.

0: done. 1: the command ran and found something wrong. 2: a `PegaInferError`, one line on stderr. 130: Ctrl-C.
Anything else that escapes is a bug and keeps its traceback.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Sequence

from pegainfer import envs
from pegainfer.errors import ConfigError, PegaInferError
from pegainfer.version import __version__

__all__ = ["VERBS", "main"]

VERBS = {
    "serve": "Serve a model over an OpenAI-compatible HTTP API.",
    "generate": "Complete one prompt, from the command line or standard input.",
    "chat": "Talk with a model in the terminal.",
    "pull": "Fetch a model before it is needed.",
    "bench serve": "Load a running server and report throughput and latencies.",
    "bench throughput": "Measure offline tokens per second.",
    "bench latency": "Measure the latency of one batch.",
    "bench startup": "Measure the time from command to ready, and memory.",
    "kernels": "Show which kernel runs each operation of a model.",
    "doctor": "Check this machine and this installation.",
}

_EXAMPLES = """examples:
  pegainfer serve smollm2                          a small real model, pulled when missing
  pegainfer serve ./Qwen3-0.6B --port 9000         any Hugging Face directory, GGUF file or hub id
  pegainfer generate smollm2 "The capital of France is"
  pegainfer bench serve --port 8000 --num-prompts 100 --max-concurrency 8

`pegainfer COMMAND --help` lists the flags of a command, `--help=WORD` those that mention WORD.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (`sys.argv` by default) and return its exit code."""
    try:
        return _dispatch(list(sys.argv[1:] if arguments is None else arguments))
    except PegaInferError as error:
        if envs.log_level() == "DEBUG":
            traceback.print_exc()
        print(f"pegainfer: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output is gone, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _dispatch(arguments: list[str]) -> int:
    first = arguments[0] if arguments else "--help"
    if first in ("-h", "--help", "help"):
        print(_help(""))
        return 0
    if first in ("-V", "--version"):
        print(__version__)
        return 0
    verb, rest = first, arguments[1:]
    if any(name.startswith(f"{first} ") for name in VERBS):
        if not rest or rest[0] in ("-h", "--help"):
            print(_help(first))
            return 0
        verb, rest = f"{first} {rest[0]}", rest[1:]
    if verb not in VERBS:
        raise ConfigError(f"there is no command {verb!r}; the commands are: {', '.join(VERBS)}")
    module = importlib.import_module(f"pegainfer.cli.{verb.replace(' ', '.')}")
    code: int = module.run(rest)
    return code


def _help(group: str) -> str:
    lines = [f"  {name:<18}{text}" for name, text in VERBS.items() if name.startswith(group)]
    usage = f"usage: pegainfer {group + ' ' if group else ''}COMMAND [MODEL] [flags]"
    return "\n".join([usage, "", "commands:", *lines, "", _EXAMPLES.rstrip()])


if __name__ == "__main__":
    sys.exit(main())
