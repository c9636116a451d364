"""README and the checks say the same: its commands run in `.ci/run`, its links lead somewhere."""

from __future__ import annotations

import json
import re
import urllib.request
from pathlib import Path

import pytest

from pegainfer.cli.bench.processes import running_server
from pegainfer.cli.main import VERBS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[str]:
    """The lines of README's code blocks that set something up."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    lines = [line for language, block in blocks if not language for line in block.splitlines()]
    return [line for line in lines if line.startswith("python3 -m venv")]


def test_the_quickstart_shows_what_the_server_answers(smollm2: Path) -> None:
    body = re.search(r"-d '(\{.*\})'", README)
    shown = re.search(r"^```json\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert body is not None
    assert shown is not None
    with running_server([str(smollm2), "--device", "cpu", "--served-model-name", "smollm2"]) as server:
        request = urllib.request.Request(
            f"http://127.0.0.1:{server.port}/v1/completions",
            body[1].encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
    expected = json.loads(shown[1])
    for value in (answer, expected):
        value["id"], value["created"] = value["id"][:5], 0
        # Instruction sets round differently, and after the answer the model has no strong opinion.
        value["choices"][0]["text"] = value["choices"][0]["text"][: len(" Paris.")]
    assert answer["choices"][0]["text"] == " Paris."
    assert answer == expected


def test_two_commands_do_all_the_set_up() -> None:
    serve, test = commands()
    assert serve.endswith("pegainfer serve smollm2")
    assert test.endswith("pytest")


def test_the_checks_run_the_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert commands()[1] in script


def test_contributing_has_the_same_command() -> None:
    assert commands()[1] in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()


def test_every_command_that_is_named_exists() -> None:
    named = set(re.findall(r"`pegainfer ((?:bench )?[a-z]+)", README))
    assert named
    assert named <= set(VERBS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
