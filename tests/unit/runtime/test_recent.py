"""The bounded cache of what is made for a size."""

from __future__ import annotations

from pegainfer.runtime.recent import Recent


def test_values_are_made_once_and_the_longest_unused_goes() -> None:
    made: list[int] = []
    recent: Recent[int, str] = Recent(3)

    def value_of(key: int) -> str:
        def make() -> str:
            made.append(key)
            return str(key)

        return recent.get(key, make)

    assert [value_of(key) for key in (1, 2, 3, 1, 4)] == ["1", "2", "3", "1", "4"]
    assert made == [1, 2, 3, 4]
    assert value_of(1) == "1"  # was asked for after 2, which had to go
    assert made == [1, 2, 3, 4]
    assert value_of(2) == "2"
    assert made == [1, 2, 3, 4, 2]


def test_it_never_holds_more_than_its_capacity() -> None:
    recent: Recent[int, int] = Recent(8)
    for key in range(1000):
        assert recent.get(key, lambda key=key: key + 1) == key + 1  # type: ignore[misc]
        assert len(recent) <= 8
