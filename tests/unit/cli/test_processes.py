"""Starting a server, weighing its process tree, ending all of it."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import pytest

from pegainfer.cli.arguments import ArgumentParser, as_words, engine_config
from pegainfer.cli.bench.processes import drop_from_page_cache, running_server, tree_memory
from pegainfer.cli.bench.startup import StartupOptions
from pegainfer.errors import ConfigError

SERVER = [sys.executable, str(Path(__file__).parent / "word_server.py")]


def living_members(group: int) -> list[str]:
    """Processes of a group that are not merely waiting to be reaped."""
    living = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                state, _, member_of = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
                if int(member_of) == group and state != "Z":
                    living.append(folder.name)
    return living


def test_a_server_is_started_weighed_and_ended() -> None:
    with running_server(["--child"], command=SERVER) as server:
        assert 0 < server.ready_s < 20
        assert server.first_token_s() > server.ready_s
        memory = server.memory()
        assert memory.processes == 2
        assert 10e6 < memory.pss < memory.rss < 500e6
        alone = tree_memory(os.getpid())
        assert alone.rss > memory.rss
        pid = server.pid
    deadline = time.monotonic() + 10
    while living_members(pid):
        assert time.monotonic() < deadline


def test_a_server_that_dies_says_why() -> None:
    started = time.monotonic()
    with (
        pytest.raises(ConfigError, match="left with code 3: no model here"),
        running_server(["--die"], command=SERVER),
    ):
        pass
    assert time.monotonic() - started < 20


def test_a_server_that_never_is_ready() -> None:
    with (
        pytest.raises(ConfigError, match=r"not ready within 0\.5 s"),
        running_server(["--mute"], command=SERVER, timeout=0.5),
    ):
        pass


def test_files_can_be_dropped_from_the_page_cache(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(10))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").write_bytes(bytes(20))
    assert drop_from_page_cache([tmp_path, tmp_path / "a", tmp_path / "none"]) == 40


def test_the_same_engine_flags_reach_the_server() -> None:
    def parser() -> ArgumentParser:
        parser = ArgumentParser("bench startup", "")
        parser.add_model()
        parser.add_engine_options()
        parser.add_options(StartupOptions, "Benchmark")
        return parser

    given = ["m", "--max-model-len", "auto", "--served-model-name", "a", "b", "--no-enable-prefix-caching"]
    given += ["--hf-overrides", '{"a": 1}', "--num-iters-cold", "1"]
    namespace = parser().parse(given)
    words = as_words(namespace, exclude=StartupOptions)
    assert engine_config(parser().parse(words)) == engine_config(namespace)
    assert not any("iters" in word for word in words)
