"""Recorded forwards by step size: sizes that come again are recorded, and replayed from then on.

Unless it was recorded in advance, the first step of a size is launched as it is: it loads whatever is loaded
at first use, which cannot be recorded, and many sizes never come again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from pegainfer.runtime.device import Device, Graph

__all__ = ["GraphCache", "GraphKey", "coarse_size", "padded_size"]

ResultT = TypeVar("ResultT")

GraphKey = tuple[int, int, int]
"""`(num_tokens, num_requests, num_logits)`."""


_SMALL_SIZES = (1, 2, 4, 8, 12, 16)


def padded_size(count: int) -> int:
    """The size that `count` rows are padded to: 1, 2, 4, 8, 12, 16, then multiples of 8 to 256, of 16 beyond.

    Gaps are small, so that padding costs little, and sizes few, so that most steps find a graph.
    """
    for size in _SMALL_SIZES:
        if count <= size:
            return size
    granularity = 8 if count <= 256 else 16
    return -(-count // granularity) * granularity


def coarse_size(count: int) -> int:
    """The next power of two: for steps that come in too many shapes to have a graph for each."""
    return 1 << (count - 1).bit_length()


class GraphCache(Generic[ResultT]):
    """The `capacity` most recently used graphs, each with what its forward returned (tensors at fixed
    addresses). On a GPU a graph of a model with 36 layers takes about a megabyte of host memory.
    """

    def __init__(self, device: Device, *, capacity: int = 96) -> None:
        self._stream = device.stream
        self._capacity = capacity
        self._entries: OrderedDict[GraphKey, tuple[Graph, ResultT]] = OrderedDict()
        self._seen: set[GraphKey] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def run(self, key: GraphKey, forward: Callable[[], ResultT]) -> ResultT:
        """Enqueue the graph of `key`, recorded when `forward` is wanted for the second time."""
        entry = self._entries.get(key)
        if entry is None and key not in self._seen:
            self._seen.add(key)
            return forward()
        if entry is None:
            entry = self._entries[key] = self._capture(forward)
            if len(self._entries) > self._capacity:
                self._entries.popitem(last=False)
        else:
            self._entries.move_to_end(key)
        graph, result = entry
        graph.replay()
        return result

    def record(self, key: GraphKey, forward: Callable[[], ResultT]) -> None:
        """Have the graph of `key` before it is wanted. `forward` is launched once and recorded."""
        forward()
        self._entries[key] = self._capture(forward)

    def _capture(self, forward: Callable[[], ResultT]) -> tuple[Graph, ResultT]:
        self._stream.begin_capture()
        try:
            result = forward()
        except BaseException:
            self._stream.end_capture()
            raise
        return self._stream.end_capture(), result
