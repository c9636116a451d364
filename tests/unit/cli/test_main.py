"""The command as people run it: a process, its exit code, and what it says."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from pegainfer.cli.main import VERBS
from pegainfer.version import __version__


def pegainfer(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pegainfer", *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_is_quick() -> None:
    pegainfer("--help")
    times = []
    for _ in range(5):
        started = time.perf_counter()
        done = pegainfer("--help")
        times.append(time.perf_counter() - started)
    assert done.returncode == 0
    assert all(name in done.stdout for name in VERBS)
    assert min(times) < 0.25


@pytest.mark.parametrize("verb", VERBS)
def test_every_command_teaches(verb: str) -> None:
    done = pegainfer(*verb.split(), "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: pegainfer {verb}")
    assert f"examples:\n  pegainfer {verb}" in done.stdout
    assert done.stderr == ""


def test_version_and_group_help() -> None:
    assert pegainfer("--version").stdout == f"{__version__}\n"
    done = pegainfer("bench")
    assert "bench startup" in done.stdout
    assert "doctor" not in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sevre"], "there is no command 'sevre'"),
        (["bench", "everything"], "there is no command 'bench everything'"),
        (["serve", "--port", "x"], "--port: invalid int value: 'x' (see pegainfer serve --help)"),
        (["serve", "m", "-tp", "2"], "-tp 2 is not supported: this version runs on one device"),
        (["bench", "serve", "--port", "9"], "cannot connect to 127.0.0.1:9"),
    ],
)
def test_errors_are_one_line_and_exit_2(words: list[str], message: str) -> None:
    done = pegainfer(*words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"pegainfer: error: {message}")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_debug_shows_the_traceback() -> None:
    done = pegainfer("serve", "--port", "x", PEGAINFER_LOG_LEVEL="DEBUG")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert "pegainfer: error: --port" in done.stderr


def test_ctrl_c_is_130() -> None:
    program = "import sys; from pegainfer.cli import main; main.VERBS['wait'] = ''\n"
    program += (
        "import types, time; module = types.ModuleType('w'); module.run = lambda words: time.sleep(60)\n"
    )
    program += "sys.modules['pegainfer.cli.wait'] = module; print('ready', flush=True)\n"
    program += "sys.exit(main.main(['wait']))\n"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.2)
        process.send_signal(2)
        assert process.wait(20) == 130
        assert b"Traceback" not in process.stderr.read()


def test_a_closed_pipe_is_quiet() -> None:
    command = f"{sys.executable} -m pegainfer serve --help | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("usage")
    assert done.stderr == ""
