"""Models from the Hugging Face hub: which files of a repository we need, and what its errors mean.

`huggingface_hub` does the talking and the caching; it is imported when a hub id is first asked for. Its own
variables (HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE) count.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

from pegainfer.config import LoadOptions
from pegainfer.errors import PegaInferError, WeightsError
from pegainfer.log import get_logger

__all__ = ["Wanted", "choose_files", "fetch"]

logger = get_logger(__name__)

_SUPPORT = (".json", ".jinja")
_INDEX = "model.safetensors.index.json"


class Wanted(StrEnum):
    """How much of a repository to fetch."""

    everything = "everything"
    tokenizer = "tokenizer"


def fetch(name: str, *, revision: str | None, load: LoadOptions, wanted: Wanted) -> Path:
    """The local directory (or GGUF file) of the hub model `org/name` or `org/name/file.gguf`.

    Asks the hub which commit is current and downloads what is missing, with progress bars; without a network,
    or with HF_HUB_OFFLINE, takes what is in the cache. Raises `WeightsError`.
    """
    from huggingface_hub import HfApi, constants, snapshot_download

    repo, file = _split(name)
    common: dict[str, Any] = {"repo_id": repo, "revision": revision, "token": load.hf_token}
    kept = load.download_dir and str(Path(load.download_dir).expanduser())
    try:
        if constants.HF_HUB_OFFLINE:
            found = _cached(repo, revision, kept)
        else:
            info = HfApi().model_info(**common)
            names = [entry.rfilename for entry in info.siblings or []]
            chosen = choose_files(names, repo=repo, gguf=file, wanted=wanted, load_format=load.load_format)
            found = snapshot_download(**common, cache_dir=kept, allow_patterns=chosen)
    except PegaInferError:
        raise
    except Exception as error:
        # Each release of the library raises the errors of another HTTP client for a network that is down.
        found = _after_failure(error, repo, revision, kept)
    path = Path(found)
    if file is not None and not (path / file).is_file():
        raise WeightsError(f"{repo} has no file {file} in the local cache {path}")
    return path if file is None else path / file


def choose_files(
    names: list[str], *, repo: str, gguf: str | None, wanted: Wanted, load_format: str = "auto"
) -> list[str]:
    """The files of a repository that serving needs: configuration and tokenizer, and the weights, as
    safetensors if there are any, else as the one GGUF file (`gguf` names it where there are several).
    """
    top = [name for name in names if "/" not in name or name.startswith("additional_chat_templates/")]
    support = [name for name in top if name.endswith(_SUPPORT) and name != _INDEX]
    if gguf is not None:
        if gguf not in names:
            raise WeightsError(f"{repo} has no file {gguf}; it has {_some(_with_suffix(names, '.gguf'))}")
        return [*support, gguf]
    if wanted is Wanted.tokenizer and "tokenizer.json" in top:
        return support
    tensors = [name for name in _with_suffix(top, ".safetensors") if not name.startswith("consolidated")]
    if tensors and load_format != "gguf":
        return [*support, *tensors, *(name for name in top if name == _INDEX)]
    files = _with_suffix(top, ".gguf")
    if len(files) == 1 and load_format != "safetensors":
        return [*support, *files]
    if len(files) > 1:
        raise WeightsError(f"{repo} has several GGUF files; name one as {repo}/FILE, of {_some(files)}")
    if wanted is Wanted.tokenizer:
        return support
    raise WeightsError(
        f"{repo} has no weights that --load-format {load_format} can open (.safetensors or .gguf files)"
    )


def _split(name: str) -> tuple[str, str | None]:
    owner, repo, *rest = name.split("/", 2)
    return f"{owner}/{repo}", rest[0] if rest else None


def _with_suffix(names: list[str], suffix: str) -> list[str]:
    return sorted(name for name in names if name.endswith(suffix))


def _some(names: list[str]) -> str:
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "") if names else "none"


def _cached(repo: str, revision: str | None, kept: str | None) -> str:
    """The snapshot in the cache; whether it is complete shows when it is opened."""
    from huggingface_hub import snapshot_download

    found: str = snapshot_download(
        repo, revision=revision, cache_dir=kept, local_files_only=True, allow_patterns=["config.json"]
    )
    return found


def _after_failure(error: Exception, repo: str, revision: str | None, kept: str | None) -> str:
    """What the cache has when the hub does not answer; a one-line error when the hub said no."""
    from huggingface_hub import constants, errors

    where = constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        problem = f"{repo} is gated: accept its terms on {where} and pass --hf-token or set HF_TOKEN"
    elif isinstance(error, errors.RepositoryNotFoundError):
        problem = f"{where} has no model {repo}, or it is private and needs --hf-token or HF_TOKEN"
    elif isinstance(error, errors.RevisionNotFoundError):
        problem = f"{repo} has no revision {revision!r} on {where}"
    elif isinstance(error, errors.HFValidationError):
        problem = f"{repo!r:.200} is not a valid hub id (org/name)"
    else:
        try:
            found = _cached(repo, revision, kept)
        except Exception:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            problem = f"{repo} is not in the local cache and cannot be fetched from {where} ({reason})"
            raise WeightsError(problem) from None
        logger.warning("%s does not answer; serving %s from the local cache", where, repo)
        return found
    raise WeightsError(problem)
