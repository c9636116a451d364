"""README and the checks say the same: its commands run in `.ci/run`, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pegainfer.cli.main import VERBS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[str]:
    """The lines of README's code blocks that set something up."""
    blocks = re.findall(r"^```\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith("python3 -m venv")]


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
