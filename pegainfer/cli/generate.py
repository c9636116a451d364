"""`pegainfer generate`: complete one prompt and write what follows as it comes."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from pegainfer.cli.arguments import ArgumentParser, make
from pegainfer.cli.sampling import SamplingOptions
from pegainfer.config import option
from pegainfer.errors import ConfigError

__all__ = ["run"]


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """What is completed."""

    prompt: str | None = option(None, "The prompt, as another way to write the second word.", metavar="TEXT")


def run(arguments: list[str]) -> int:
    """Complete the prompt of the command line, or all of standard input."""
    parser = ArgumentParser(
        "generate",
        "Complete one prompt. Without one on the command line it is read from standard input.",
        examples=(
            'pegainfer generate smollm2 "The capital of France is"',
            "pegainfer generate smollm2 --max-tokens 50 --temperature 0 < prompt.txt",
            'pegainfer generate ./Qwen3-0.6B "Once upon a time" --stop "." --seed 7',
        ),
    )
    parser.add_model()
    parser.add_word("prompt_word", "PROMPT", "the text to complete; standard input when there is none")
    parser.add_options(GenerateOptions, "Prompt")
    parser.add_options(SamplingOptions, "Sampling")
    parser.add_engine_options()
    namespace = parser.parse(arguments)
    prompt = getattr(namespace, "prompt_word", None)
    named = make(GenerateOptions, namespace).prompt
    if prompt is not None and named is not None:
        raise ConfigError("the prompt is given twice: as a word and with --prompt")
    prompt = named if prompt is None else prompt
    if prompt is None:
        prompt = _standard_input()
    if not prompt:
        raise ConfigError("the prompt is empty")

    from pegainfer.cli.local import local_model

    with local_model(namespace, make(SamplingOptions, namespace)) as model:
        for piece in model.complete(prompt):
            sys.stdout.write(piece)
            sys.stdout.flush()
    print()
    return 0


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise ConfigError('no prompt: write one after the model, e.g. pegainfer generate smollm2 "Once upon"')
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not text: {error}") from None
