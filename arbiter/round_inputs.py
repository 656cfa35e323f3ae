"""A round's inputs as bytes, from which it is explained later; the GPUs of a kind stand there once.

Each of a thousand apps that name a kind sees the thousands of GPUs of that kind: written for each app they would be
tens of megabytes a round.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from arbiter import compression
from arbiter.core.effects import Decide
from arbiter.core.seam import AppView, GpuNames
from protocol.messages import GpuId

NO_KIND = -1


class _Packed(Struct, frozen=True, array_like=True):
    """The inputs without the GPUs of kinds; these; and the kind of each app of the view, and of each holder."""

    asked: Decide
    kinds: tuple[tuple[GpuId, ...], ...]
    of_apps: tuple[int, ...]
    of_holders: tuple[int, ...]


def pack(asked: Decide) -> bytes:
    """Return the inputs as bytes.

    Raises
    ------
    OverflowError
        For a number that the format cannot hold.
    """
    kinds: dict[int, tuple[int, GpuNames]] = {}  #: by the id of the object that apps have in common
    apps, of_apps = _bare_apps(asked.view.apps, kinds)
    holders, of_holders = _bare_apps(asked.view.holders, kinds)
    bare = replace(asked, view=replace(asked.view, apps=apps, holders=holders))
    return compression.to_bytes(_Packed(bare, tuple(names for _, names in kinds.values()), of_apps, of_holders))


def unpack(packed: bytes) -> Decide | None:
    """Return the inputs; None if another version has written them."""
    try:
        found = compression.from_bytes(packed, _Packed)
    except msgspec.MsgspecError:
        return None
    kinds, view = [GpuNames(names) for names in found.kinds], found.asked.view
    apps, holders = _whole_apps(view.apps, found.of_apps, kinds), _whole_apps(view.holders, found.of_holders, kinds)
    return replace(found.asked, view=replace(view, apps=apps, holders=holders))


def _bare_apps(
    apps: Sequence[AppView], kinds: dict[int, tuple[int, GpuNames]]
) -> tuple[tuple[AppView, ...], tuple[int, ...]]:
    """Return the apps without the GPUs of their kind, and the number of each app's kind; add kinds that are new."""
    numbers = []
    for app in apps:
        named = app.only if isinstance(app.only, GpuNames) else None
        numbers.append(NO_KIND if named is None else kinds.setdefault(id(named), (len(kinds), named))[0])
    pairs = zip(apps, numbers, strict=True)
    return tuple(app if number == NO_KIND else replace(app, only=()) for app, number in pairs), tuple(numbers)


def _whole_apps(apps: Sequence[AppView], numbers: Sequence[int], kinds: Sequence[GpuNames]) -> tuple[AppView, ...]:
    return tuple(
        app if number == NO_KIND else replace(app, only=kinds[number])
        for app, number in zip(apps, numbers, strict=True)
    )
