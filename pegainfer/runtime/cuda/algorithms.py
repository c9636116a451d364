"""Which algorithm of cuBLASLt serves a product: measured once per GPU and library, kept on disk.

Row counts share algorithms in steps: a product of `m` rows takes the one that was fastest for the next size
in `SIZES`. What is not measured takes the library's first guess.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pegainfer import envs
from pegainfer.runtime.cuda.disk_cache import read_checked, write_checked
from pegainfer.runtime.dtypes import DType

__all__ = ["SIZES", "AlgorithmTable", "Product", "size_of"]

SIZES = (
    *(32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 1088, 1152, 1280, 1536, 1792),
    *(2048, 2304, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192),
)
ALGORITHM_BYTES = 64


@dataclass(frozen=True, slots=True)
class Product:
    """`out[m, n] (+)= x[m, k] @ weight[n, k].T` for any `m`."""

    n: int
    k: int
    dtype: DType
    out_dtype: DType
    accumulate: bool

    def key(self, size: int) -> str:
        """The name under which the algorithm for `size` rows is kept."""
        suffix = "+" if self.accumulate else ""
        return f"{size}x{self.n}x{self.k}:{self.dtype}-{self.out_dtype}{suffix}"


def size_of(rows: int) -> int | None:
    """The size whose algorithm serves `rows` rows; None beyond the largest."""
    return next((size for size in SIZES if rows <= size), None)


class AlgorithmTable:
    """Algorithms by product and size, as the library's opaque 64 bytes. `gpu` and `version` name the file."""

    def __init__(self, gpu: str, version: int) -> None:
        name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
        self._path: Path = envs.cache_dir() / "cublaslt" / f"{name}-{version}.json"
        self._known = self._read()
        self._is_measuring = False

    def find(self, product: Product, rows: int) -> bytes | None:
        """The algorithm that was measured for as many rows, if one was."""
        size = size_of(rows)
        return None if size is None else self._known.get(product.key(size)) or None

    def is_wanted(self, product: Product, rows: int) -> bool:
        """Whether the product should be measured with `rows` rows, here and now."""
        return self._is_measuring and rows in SIZES and product.key(rows) not in self._known

    def keep(self, product: Product, rows: int, algorithm: bytes) -> None:
        """The fastest algorithm for `rows` rows, which is one of `SIZES`."""
        self._known[product.key(rows)] = algorithm

    def measure(self, products: Collection[Product], run: Callable[[int], object], limit: int) -> int:
        """Have `run(rows)` call the products with `rows` rows, for each size up to `limit` of which one is
        missing, and write the file. How many sizes there were.
        """
        sizes = []
        for size in SIZES:
            keys = [product.key(size) for product in products]
            if size > limit or all(key in self._known for key in keys):
                continue
            with self._measuring():
                run(size)
            sizes.append(size)
            for key in keys:  # a product that is not called with so many rows is not asked for again
                self._known.setdefault(key, b"")
        if sizes:
            text = json.dumps({key: value.hex() for key, value in sorted(self._known.items())}, indent=1)
            write_checked(self._path, text.encode())
        return len(sizes)

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        self._is_measuring = True
        try:
            yield
        finally:
            self._is_measuring = False

    def _read(self) -> dict[str, bytes]:
        content = read_checked(self._path)
        if content is None:
            return {}
        found = {key: bytes.fromhex(value) for key, value in json.loads(content).items()}
        return {key: value for key, value in found.items() if len(value) in (0, ALGORITHM_BYTES)}
