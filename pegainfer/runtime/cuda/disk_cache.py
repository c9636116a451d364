"""Files that may vanish, be cut short or belong to someone else: whole with their digest, or as if absent."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from pathlib import Path

__all__ = ["read_checked", "write_checked"]

_DIGEST_BYTES = 32


def read_checked(path: Path) -> bytes | None:
    """What `write_checked` wrote; None when there is no such file or it is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, data = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return data if data and hashlib.sha256(data).digest() == digest else None


def write_checked(path: Path, data: bytes) -> None:
    """Write through a temporary file, so that a reader sees a whole file or none. A cache that cannot be
    written is no error.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(hashlib.sha256(data).digest() + data)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
