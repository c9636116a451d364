"""`pegainfer serve`: the OpenAI-compatible HTTP server."""

from __future__ import annotations

from pegainfer.cli.arguments import ArgumentParser, engine_config, server_options
from pegainfer.config import ServerOptions
from pegainfer.log import setup_logging

__all__ = ["run"]


def run(arguments: list[str]) -> int:
    """Serve until SIGTERM or Ctrl-C; the exit code is the server's."""
    parser = ArgumentParser(
        "serve",
        "Serve a model over an OpenAI-compatible HTTP API. The model is fetched when missing.",
        examples=(
            "pegainfer serve smollm2",
            "pegainfer serve ./Qwen3-0.6B --max-model-len 8k --port 9000",
            "pegainfer serve Qwen/Qwen3-0.6B --revision main --served-model-name qwen3",
            "pegainfer serve ./model.gguf --api-key secret --max-num-seqs 64",
            "pegainfer serve --config server.toml      # lines like: max-model-len = 8192",
        ),
    )
    parser.add_model()
    parser.add_engine_options()
    parser.add_options(ServerOptions, "Server")
    namespace = parser.parse(arguments)
    config, options = engine_config(namespace), server_options(namespace)
    setup_logging()

    from pegainfer.server.run import run_server

    return run_server(config, options)
