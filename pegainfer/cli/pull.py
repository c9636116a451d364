"""`pegainfer pull`: fetch a model before it is needed."""

from __future__ import annotations

from pegainfer.cli.arguments import ArgumentParser, make
from pegainfer.config import LoadOptions, ModelOptions
from pegainfer.log import setup_logging

__all__ = ["run"]


def run(arguments: list[str]) -> int:
    """Make the model's files local and print where they are."""
    parser = ArgumentParser(
        "pull",
        "Fetch a model before it is needed: a hub id, or the built-in name `smollm2`. Prints where it is.",
        examples=(
            "pegainfer pull smollm2",
            "pegainfer pull Qwen/Qwen3-0.6B --revision main",
            "pegainfer pull Qwen/Qwen2.5-0.5B-Instruct-GGUF/qwen2.5-0.5b-instruct-q8_0.gguf",
        ),
    )
    parser.add_model()
    parser.add_options(ModelOptions, "Model", only=("model", "revision"))
    parser.add_options(LoadOptions, "Loading")
    namespace = parser.parse(arguments)
    setup_logging()

    from pegainfer.weights.loader import resolve_model

    print(resolve_model(make(ModelOptions, namespace), make(LoadOptions, namespace)))
    return 0
