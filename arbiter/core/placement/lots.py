"""Chance without dice: numbers that look random and follow from a seed and names alone.

A core draws lots so that a replay, or the same round in the simulator, draws the same ones. BLAKE2b is used for its
uniform output on every platform, whatever ``PYTHONHASHSEED``; nothing here is a secret.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from typing import TypeVar

ItemT = TypeVar("ItemT")


def draw(seed: int, *names: str) -> float:
    """Return the number in [0, 1) that belongs to `seed` and `names`."""
    digest = blake2b("\0".join((str(seed), *names)).encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


def ranked(
    seed: int, items: Iterable[ItemT], *, key: Callable[[ItemT], float], name: Callable[[ItemT], str], purpose: str
) -> Iterator[ItemT]:
    """Yield `items` by rising `key`, equal ones in the random order that belongs to `seed` and `purpose`.

    Lots are drawn only for equal ones, and only once one of them is asked for.
    """
    ordered = sorted(items, key=key)
    at = 0
    while at < len(ordered):
        end = at + 1
        while end < len(ordered) and key(ordered[end]) == key(ordered[at]):
            end += 1
        yield from ordered[at:end] if end == at + 1 else shuffled(seed, ordered[at:end], name=name, purpose=purpose)
        at = end


def shuffled(seed: int, items: Iterable[ItemT], *, name: Callable[[ItemT], str], purpose: str) -> list[ItemT]:
    """Return `items` in the random order that belongs to `seed` and `purpose`, whatever order they came in."""
    return sorted(items, key=lambda item: (draw(seed, purpose, name(item)), name(item)))
