"""The wire form: golden bytes for every message, and nothing but `WireError` for anything else.

After a deliberate change of a message, write the golden bytes anew with
``python -m tests.protocol.test_codec`` and say in the commit why old peers understand them.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec
from protocol.codec import FRAME_BYTES_MAX, VERSION, Envelope, WireError, _examined, decode, encode
from protocol.messages import AnyMessage, AppId, Party, ProbeReply, RoundId
from tests.protocol.samples import APP, SAMPLES
from tests.support.effort import examples

GOLDEN = Path(__file__).parent / "golden" / "messages.json"
NAMES = [type(message).__name__ for _, message in SAMPLES]


def frame(sender: Party, message: AnyMessage) -> bytes:
    return encode(message, sender=sender, id="golden-1")


def golden() -> dict[str, str]:
    content: dict[str, str] = json.loads(GOLDEN.read_text())
    return content


def test_every_message_has_one_sample() -> None:
    assert sorted(NAMES) == sorted(kind.__name__ for kind in get_args(AnyMessage))


@pytest.mark.parametrize(("sender", "message"), SAMPLES, ids=NAMES)
def test_the_bytes_of_a_message_never_change(sender: Party, message: AnyMessage) -> None:
    assert frame(sender, message).hex() == golden()[type(message).__name__]


@pytest.mark.parametrize(("sender", "message"), SAMPLES, ids=NAMES)
def test_golden_bytes_are_read_back_as_they_were(sender: Party, message: AnyMessage) -> None:
    data = bytes.fromhex(golden()[type(message).__name__])
    assert decode(data) == Envelope(VERSION, "golden-1", sender, message)


@pytest.mark.parametrize(("sender", "message"), SAMPLES, ids=NAMES)
def test_the_samples_leave_no_field_at_its_default(sender: Party, message: AnyMessage) -> None:
    for part in (message, getattr(message, "requirements", None)):
        for field in msgspec.structs.fields(part) if part is not None else ():
            assert getattr(part, field.name) != field.default, field.name


@pytest.mark.parametrize(("sender", "message"), SAMPLES, ids=NAMES)
def test_a_field_of_a_newer_peer_is_ignored(sender: Party, message: AnyMessage) -> None:
    raw = msgpack.unpackb(frame(sender, message))
    raw["shoe_size"] = raw["body"]["shoe_size"] = 43
    assert decode(msgpack.packb(raw)).body == message


@pytest.mark.parametrize(("sender", "message"), SAMPLES, ids=NAMES)
def test_a_field_that_an_older_peer_does_not_know_is_read_as_its_default(sender: Party, message: AnyMessage) -> None:
    optional = {field.name: field.default for field in msgspec.structs.fields(message) if not field.required}
    raw = msgpack.unpackb(frame(sender, message))
    raw["body"] = {name: value for name, value in raw["body"].items() if name not in optional}
    read = decode(msgpack.packb(raw)).body
    assert {name: getattr(read, name) for name in optional} == {
        name: {} if default is msgspec.NODEFAULT else default for name, default in optional.items()
    }


@pytest.mark.parametrize("rows", ["rows", "explicit"])
def test_a_row_that_a_newer_peer_made_longer_is_read(rows: str) -> None:
    sender, bid = next(sample for sample in SAMPLES if type(sample[1]).__name__ == "Bid")
    raw = msgpack.unpackb(frame(sender, bid))
    raw["body"][rows][0].append("shoe size")
    assert decode(msgpack.packb(raw)).body == bid


def tampered(**changes: Any) -> bytes:
    """Return the frame of a probe reply with `changes` to its envelope."""
    raw = msgpack.unpackb(frame(APP, ProbeReply(AppId("ann-1"), RoundId(5), 1.5)))
    packed: bytes = msgpack.packb(raw | changes)
    return packed


BODY = {"type": "ProbeReply", "app": "ann-1", "round": 5, "rho": 1.5}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (tampered(v=VERSION + 1), "upgrade the older"),
        (tampered(v="1"), "version '1'"),
        (tampered(v=None), "version None"),
        (tampered(body=BODY | {"type": "Gossip"}), "Gossip"),
        (tampered(body=BODY | {"rho": "low"}), "rho"),
        (tampered(body=BODY | {"rho": -1.0}), "rho"),
        (tampered(body=BODY | {"rho": math.nan}), "rho"),
        (tampered(body=BODY | {"rho": math.inf}), "rho"),
        (tampered(body=BODY | {"round": 5.5}), "round"),
        (tampered(body={"type": "ProbeReply", "app": "ann-1"}), "round"),
        (tampered(sender={"role": "app", "id": "Ann.*"}), "sender.id"),
        (tampered(sender={"role": "king", "id": "ann"}), "sender.role"),
        (tampered(id=""), "id"),
        (msgpack.packb([1, 2, 3]), "version None"),
        (msgpack.packb({1: 2}), "not a message"),
        (tampered()[:-1], "not a message"),
        (tampered() + b"\x00", "not a message"),
        (b"", "not a message"),
        (b"\x91" * 100_000, "not a message"),
        (b"x" * (FRAME_BYTES_MAX + 1), "larger than the limit"),
    ],
)
def test_what_is_no_message_is_refused_in_words(data: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        decode(data)


@pytest.mark.parametrize(
    ("explicit", "words"),
    [
        ([[[], 1.0]], "length"),
        ([[[["n1", 0]], 1.0]], ">= 1"),
        ([[[["n1", -2]], 1.0]], ">= 1"),
        ([[[["n1", 1.5]], 1.0]], "int"),
        ([[[["n1", 1], ["n2", 1], ["n1", 2]], 1.0]], "names a node twice"),
        ([[[["n1", 1]], math.nan]], ">= 0"),
        ([[[["n1", 1]], -1.0]], ">= 0"),
        ([[{"n1": 1}, 1.0]], "array"),
        ([[[["n1", 1]], 1.0]] * 257, "length"),
        ([[[[f"n{node}", 1] for node in range(1025)], 1.0]], "length"),
    ],
)
def test_an_explicit_row_that_means_nothing_is_refused(explicit: list[Any], words: str) -> None:
    sender, bid = next(sample for sample in SAMPLES if type(sample[1]).__name__ == "Bid")
    raw = msgpack.unpackb(frame(sender, bid))
    raw["body"]["explicit"] = explicit
    with pytest.raises(WireError, match=words):
        decode(msgpack.packb(raw))


@pytest.mark.parametrize("depth", ["metrics", "nested"])
def test_a_number_that_is_not_finite_is_refused_wherever_it_stands(depth: str) -> None:
    sender, report = next(sample for sample in SAMPLES if type(sample[1]).__name__ == "AppReport")
    raw = msgpack.unpackb(frame(sender, report))
    if depth == "metrics":
        raw["body"]["metrics"]["loss"] = math.nan
    else:
        raw["body"]["jobs"][0]["grace_s"] = math.inf
    with pytest.raises(WireError):
        decode(msgpack.packb(raw))


@pytest.mark.parametrize("kind", ["AppReport", "NodeReport"])
@pytest.mark.parametrize("told", ["\x1b[2J0.9.0", "0.9.0\n", "0.9 0", "0" * 65])
def test_a_release_that_a_terminal_would_obey_is_refused(kind: str, told: str) -> None:
    sender, report = next(sample for sample in SAMPLES if type(sample[1]).__name__ == kind)
    raw = msgpack.unpackb(frame(sender, report))
    for good in ("", "1.0.0rc1.post2+g0ab-1"):
        raw["body"]["release"] = good
        decode(msgpack.packb(raw))
    raw["body"]["release"] = told
    with pytest.raises(WireError, match="release"):
        decode(msgpack.packb(raw))


@given(st.binary(max_size=300))
def test_random_bytes_are_a_wire_error_and_nothing_else(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=examples(300))
@given(st.sampled_from(SAMPLES), st.data())
def test_a_mangled_message_is_a_message_or_a_wire_error(sample: tuple[Party, AnyMessage], data: st.DataObject) -> None:
    raw = msgpack.unpackb(frame(*sample))
    place = data.draw(st.sampled_from([raw, raw["body"], raw["sender"]]))
    place[data.draw(st.sampled_from(sorted(place)))] = data.draw(VALUES)
    try:
        envelope = decode(msgpack.packb(raw))
    except WireError:
        return
    assert type(envelope.body) in get_args(AnyMessage)


@given(st.sampled_from(SAMPLES), st.data())
def test_flipped_bytes_are_a_message_or_a_wire_error(sample: tuple[Party, AnyMessage], data: st.DataObject) -> None:
    mangled = bytearray(frame(*sample))
    for _ in range(data.draw(st.integers(1, 4))):
        mangled[data.draw(st.integers(0, len(mangled) - 1))] = data.draw(st.integers(0, 255))
    with suppress(WireError):
        examined = _examined(bytes(mangled))
        assert decode(bytes(mangled)) == examined, "both ways of reading agree on what is a message"


@pytest.mark.parametrize(("sender", "message"), SAMPLES, ids=NAMES)
def test_a_message_of_this_version_is_read_at_once_and_one_that_is_wrong_is_examined(
    sender: Party, message: AnyMessage, monkeypatch: pytest.MonkeyPatch
) -> None:
    examined: list[bytes] = []
    monkeypatch.setattr(codec, "_examined", examined.append)
    data = frame(sender, message)
    assert decode(data).body == message
    assert examined == []
    decode(data[:-1])
    assert examined == [data[:-1]]


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    lines = {type(message).__name__: frame(sender, message).hex() for sender, message in SAMPLES}
    GOLDEN.write_text(json.dumps(lines, indent=1) + "\n")
