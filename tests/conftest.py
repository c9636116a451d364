"""Fixtures for every test: the built-in model's file, and a small tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from pegainfer.tokenizer.tokenizer import Tokenizer
from pegainfer.weights.builtin import pull
from tests.toy_tokenizer import make_toy


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where there is no GPU, deselect what needs one; the closing line of the run counts it."""
    if Path("/dev/nvidiactl").exists():
        return
    unable = [item for item in items if item.get_closest_marker("gpu")]
    if unable:
        config.hook.pytest_deselected(items=unable)
        items[:] = [item for item in items if item not in unable]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of the built-in model, fetched into the user's cache once."""
    return pull("smollm2", quiet=True)


@pytest.fixture(scope="session")
def toy() -> Tokenizer:
    """A byte-level tokenizer whose ids below 256 are bytes, with ChatML control tokens and template."""
    return make_toy()
