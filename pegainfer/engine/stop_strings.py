"""Where a text ends: stop strings, found however the text is cut into pieces."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Watches a growing text for the first stop string that becomes complete.

    Text is withheld only while it may be the beginning of a stop string. Where two become complete at the
    same character the longer one counts, so that the result never depends on the pieces.
    """

    __slots__ = ("_held", "_include", "_stops")

    def __init__(self, stops: Sequence[str], *, include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Append a piece: the text that is now certain, and the stop string that ended it (or None)."""
        buffer = self._held + text
        found = self._find(buffer)
        if found is not None:
            stop, start = found
            self._held = ""
            return buffer[: start + len(stop)] if self._include else buffer[:start], stop
        keep = self._num_held(buffer)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep], None

    def flush(self) -> str:
        """What was withheld; the text ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _find(self, buffer: str) -> tuple[str, int] | None:
        """The stop string whose end comes first, and where it starts."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = buffer.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[2], best[1])

    def _num_held(self, buffer: str) -> int:
        """Length of the longest end of `buffer` with which a stop string begins."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:length]):
                    longest = length
                    break
        return longest
