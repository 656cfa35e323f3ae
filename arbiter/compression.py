"""Large values of the ledger as bytes: a round of a thousand apps says the same of most of them.

On a site of 1,000 nodes and 1,000 apps a record takes a sixteenth of its size by this, and the inputs of a round an
eighth (`benchmarks/results/site.md`).
"""

from __future__ import annotations

import zlib
from typing import Any, TypeVar

import msgspec

#: The fastest level. Level 6 saves another fifth of such records, and takes more than twice as long.
LEVEL = 1
#: Compressed bytes begin so. A map or an array of MessagePack, which versions before this one wrote, does not.
_COMPRESSED = b"\x78"

ValueT = TypeVar("ValueT")


def to_bytes(value: Any) -> bytes:
    """Return the value as bytes.

    Raises
    ------
    OverflowError
        For a number that the format cannot hold.
    """
    return zlib.compress(msgspec.msgpack.encode(value), LEVEL)


def from_bytes(data: bytes, kind: type[ValueT]) -> ValueT:
    """Return the value that these bytes hold.

    Raises
    ------
    msgspec.MsgspecError
        If they hold no such value.
    """
    try:
        plain = zlib.decompress(data) if data.startswith(_COMPRESSED) else data
    except zlib.error as error:
        raise msgspec.DecodeError(f"the bytes are damaged: {error}") from error
    return msgspec.msgpack.decode(plain, type=kind)
