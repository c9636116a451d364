"""How long enqueued work takes when nothing of what it reads is in the L2 cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from pegainfer.errors import CapacityError
from pegainfer.runtime.cuda.driver import check, cuda

__all__ = ["ColdTimer"]

_FLUSH_BYTES = 160 << 20  # more than any L2 cache holds
_REPETITIONS = 4


class ColdTimer:
    """Times work on one stream. Without memory to flush the cache with, it times it warm."""

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._begin, self._end = (check(cuda.cuEventCreate(0)) for _ in range(2))
        try:
            self._scratch = int(check(cuda.cuMemAlloc(_FLUSH_BYTES)))
        except CapacityError:
            self._scratch = 0

    def time(self, run: Callable[[], object]) -> float:
        """Milliseconds: the median of a few runs after a first one that does not count."""
        run()
        return statistics.median(self._time_once(run) for _ in range(_REPETITIONS))

    def close(self) -> None:
        """Free memory and events."""
        if self._scratch:
            check(cuda.cuMemFree(self._scratch))
        for event in (self._begin, self._end):
            check(cuda.cuEventDestroy(event))

    def _time_once(self, run: Callable[[], object]) -> float:
        if self._scratch:
            check(cuda.cuMemsetD8Async(self._scratch, 0, _FLUSH_BYTES, self._stream))
        check(cuda.cuEventRecord(self._begin, self._stream))
        run()
        check(cuda.cuEventRecord(self._end, self._stream))
        check(cuda.cuEventSynchronize(self._end))
        return float(check(cuda.cuEventElapsedTime(self._begin, self._end)))
