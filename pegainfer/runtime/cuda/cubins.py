"""Where a device gets its cubins from: the cache, or compilers that work side by side.

Needs no GPU. Knows nothing of who loads what: whoever does may say so in advance (`expecting`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

from pegainfer.runtime.cuda.module import KernelSource, cached_cubin, load_cubin

__all__ = ["Compilers", "CubinLoader"]


class Compilers:
    """Threads that compile for `arch` into the cache, `jobs` at once; by default one a processor. The
    compiler runs without the interpreter lock.
    """

    def __init__(self, arch: str, *, jobs: int | None = None) -> None:
        self._arch = arch
        self._workers = ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0)), "compile")

    def start(self, sources: Iterable[KernelSource]) -> dict[KernelSource, Future[bytes]]:
        """A future of each cubin; it raises `KernelError` when the source does not compile."""
        # The longest sources first: they are what the others would wait for.
        order = sorted(dict.fromkeys(sources), key=lambda source: -len(source.read()))
        return {source: self._workers.submit(load_cubin, source, self._arch) for source in order}

    def close(self) -> None:
        """Drop what no thread has begun."""
        self._workers.shutdown(wait=False, cancel_futures=True)


class CubinLoader:
    """The cubins of one architecture, loaded one by one.

    Within `expecting`, the first one that the cache lacks has all that are expected and lacking compiled in
    the background; each load then waits for its own. A warm cache costs no more than its files.
    """

    def __init__(self, arch: str) -> None:
        self._arch = arch
        self._begin: Callable[[], dict[KernelSource, Future[bytes]]] | None = None
        self._started: dict[KernelSource, Future[bytes]] = {}

    def load(self, source: KernelSource) -> bytes:
        """The cubin of `source`; raises `KernelError` when it does not compile."""
        cubin = None if source in self._started else cached_cubin(source, self._arch)
        if cubin is None and self._begin is not None:
            begin, self._begin = self._begin, None
            self._started = begin()
        future = self._started.pop(source, None)
        if future is not None:
            return future.result()
        return cubin if cubin is not None else load_cubin(source, self._arch)

    @contextmanager
    def expecting(
        self,
        plan: Callable[[], Iterable[KernelSource]],
        *,
        on_start: Callable[[int], Callable[[], object]],
    ) -> Iterator[None]:
        """Until the block ends, what `plan` names will be loaded. It is asked at most once, and only when
        something has to be compiled. `on_start` is told how many compilations begin and returns what is
        called after each, by any thread.
        """
        compilers = Compilers(self._arch)

        def begin() -> dict[KernelSource, Future[bytes]]:
            missing = [source for source in plan() if cached_cubin(source, self._arch) is None]
            on_done = on_start(len(missing))
            futures = compilers.start(missing)
            for future in futures.values():
                future.add_done_callback(lambda future: on_done())
            return futures

        self._begin = begin
        try:
            yield
        finally:
            self._begin = None
            self._started = {}
            compilers.close()
