"""Fixtures of the command-line tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.cli.word_server import WordServer, running_word_server


@pytest.fixture
def word_server() -> Iterator[WordServer]:
    """A server on a free port of this machine."""
    with running_word_server() as server:
        yield server
