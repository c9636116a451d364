"""Philox4x32-10: random bits as a pure function of a key and a counter (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC'11). A draw therefore never depends on what else is sampled in the step.
"""

from __future__ import annotations

__all__ = ["philox4x32", "uniform"]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: int, counter: int) -> float:
    """A number in [0, 1) with 53 random bits; `seed` and `counter` are taken modulo 2**64."""
    words = philox4x32((counter & _MASK, counter >> 32 & _MASK, 0, 0), (seed & _MASK, seed >> 32 & _MASK))
    return float((words[0] << 32 | words[1]) >> 11) * 2.0**-53
