"""Bytes to message and back: MessagePack inside a versioned envelope.

`decode` raises `WireError` and nothing else, for any bytes; a sender's nonsense is the sender's fault.
Unknown fields of a newer peer are ignored; an unknown version, tag or shape is refused.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

import msgpack
import msgspec
from msgspec import Meta, Struct

from protocol import previous_version
from protocol.messages import AnyMessage, Party

VERSION = 1
#: Largest frame accepted; a 4096-row bid is 60 kB, a plan for 16 GPUs 20 kB. Bounds the memory a peer can fill.
FRAME_BYTES_MAX = 4 * 2**20
#: A 64-bit or 32-bit float whose exponent is all ones, or bytes that look like one.
_PERHAPS_NOT_FINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]|\xca[\x7f\xff][\x80-\xff]")


class WireError(Exception):
    """A peer sent something that is not a message of this protocol."""


class Envelope(Struct, frozen=True):
    """The frame that travels: version, a unique message id for deduplication, the sender and the message."""

    v: int
    id: Annotated[str, Meta(min_length=1, max_length=128)]
    sender: Party
    body: AnyMessage


_ENCODER = msgspec.msgpack.Encoder()
#: Three times as fast as `_examined`, which reads what this one does not.
_DECODER = msgspec.msgpack.Decoder(Envelope)


def encode(message: AnyMessage, *, sender: Party, id: str) -> bytes:  # noqa: A002 - the wire's own word
    """Return the frame of `message`."""
    return _ENCODER.encode(Envelope(VERSION, id, sender, message))


def decode(data: bytes) -> Envelope:
    """Return the envelope in `data`.

    Raises
    ------
    WireError
        For anything that is not a frame `encode` of this or a compatible version would write, and never another.
    """
    if len(data) > FRAME_BYTES_MAX:
        raise WireError(f"a frame of {len(data)} bytes is larger than the limit of {FRAME_BYTES_MAX}")
    if not _PERHAPS_NOT_FINITE.search(data):
        try:
            envelope = _DECODER.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            pass  # of the version before, or wrong: what is wrong is found below
        else:
            if envelope.v == VERSION:
                return envelope
    return _examined(data)


def _examined(data: bytes) -> Envelope:
    """Return the envelope in `data`, which is first read without types; raises WireError with what is wrong with it."""
    try:
        raw = msgpack.unpackb(data, raw=False, strict_map_key=True)
        version = raw.get("v") if isinstance(raw, dict) else None
        if version != VERSION:
            raise WireError(f"version {version!r} is not {VERSION}; upgrade the older of the two daemons")
        body = raw.get("body")
        if isinstance(body, dict) and body.get("type") == "AppReport" and "requirements" not in body:
            raw["body"] = previous_version.converted(body)
        envelope = msgspec.convert(raw, Envelope, builtin_types=(bytes,))
    except (ValueError, msgpack.UnpackException, msgspec.ValidationError, RecursionError, TypeError) as error:
        raise WireError(f"not a message of this protocol: {error}") from error
    _refuse_non_finite(raw)
    return envelope


def _refuse_non_finite(raw: Any) -> None:
    """Refuse NaN and infinities, which msgspec lets through its bounds."""
    stack = [raw]
    while stack:
        item = stack.pop()
        if isinstance(item, float) and not math.isfinite(item):
            raise WireError("a number is not finite")
        if isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
