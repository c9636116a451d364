"""A bounded cache: what a server makes once for each size that it meets must not grow with their number."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["Recent"]

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class Recent(Generic[KeyT, ValueT]):
    """The `capacity` values that were asked for last."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._values: OrderedDict[KeyT, ValueT] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: KeyT, make: Callable[[], ValueT]) -> ValueT:
        """The value of `key`, made when it is not held. The one that was not asked for longest has to go."""
        value = self._values.get(key)
        if value is None:
            value = self._values[key] = make()
            if len(self._values) > self._capacity:
                self._values.popitem(last=False)
        else:
            self._values.move_to_end(key)
        return value
