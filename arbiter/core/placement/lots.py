"""Chance without dice: numbers that look random and follow from a seed and names alone.

A core draws lots so that a replay, or the same round in the simulator, draws the same ones. BLAKE2b is used for its
uniform output on every platform, whatever ``PYTHONHASHSEED``; nothing here is a secret.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import TypeVar

ItemT = TypeVar("ItemT")


def draw(seed: int, *names: str) -> float:
    """Return the number in [0, 1) that belongs to `seed` and `names`."""
    digest = blake2b("\0".join((str(seed), *names)).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def shuffled(seed: int, items: Iterable[ItemT], *, name: Callable[[ItemT], str], purpose: str) -> list[ItemT]:
    """Return `items` in the random order that belongs to `seed` and `purpose`, whatever order they came in."""
    return sorted(items, key=lambda item: (draw(seed, purpose, name(item)), name(item)))
