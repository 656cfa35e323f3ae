"""The words of a task are told to the owner of its app only, whatever the document in which they stand.

An answer is looked through as a whole, so that a new field or kind of answer need not think of it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from arbiter.owners import owner_of
from protocol.log_ends import MARKS, without_log_end
from protocol.messages import AppId

_MARKS = tuple(mark.encode() for mark in MARKS)


def tells_log(packed: bytes | msgspec.Raw) -> bool:
    """Whether a JSON document may hold what a task has said. It costs little."""
    return any(mark in bytes(packed) for mark in _MARKS)


def told_to(reader: str, document: Any, owner: str = "") -> Any:
    """Return a document as `reader` may see it, without what other owners' tasks have said.

    Parameters
    ----------
    reader
        An owner; empty for one of whom nothing is known, who sees no log at all.
    document
        What is to be written as JSON. A part of it belongs to the owner of the app that the part names.
    owner
        Whose the document is where it names no app; empty if it has no owner.
    """
    match document:
        case str():
            return document if reader and reader == owner else without_log_end(document)
        case dict():
            owner = _owner(document) or owner
            return {key: told_to(reader, value, owner) for key, value in document.items()}
        case list() | tuple():
            return [told_to(reader, each, owner) for each in document]
        case msgspec.Raw():
            return told_to(reader, msgspec.json.decode(document), owner) if tells_log(document) else document
        case None | bool() | int() | float():
            return document
        case _:
            return told_to(reader, msgspec.to_builtins(document), owner)


def _owner(document: dict[str, Any]) -> str:
    """Return the owner of the app that a part of a document names; empty if it names none."""
    owner, app = document.get("owner"), document.get("app")
    if isinstance(owner, str):
        return owner
    return owner_of(AppId(app)) if isinstance(app, str) else ""
