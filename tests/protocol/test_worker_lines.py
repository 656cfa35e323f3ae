"""The worker contract's lines: golden text for every message, and nothing but `WireError` for anything else."""

from __future__ import annotations

import json
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.codec import WireError
from protocol.worker import (
    COUNTED_MAX,
    LINE_BYTES_MAX,
    Counted,
    Finished,
    FromWorker,
    Hello,
    Late,
    Order,
    Progress,
    Ready,
    Refused,
    Resumed,
    Saved,
    Stacks,
    Suspended,
    decode_line,
    decode_order,
    encode_line,
)

#: Message and line. The worker writes these lines by hand, so the text itself is the contract.
GOLDEN: tuple[tuple[FromWorker | Order, bytes], ...] = (
    (
        Hello(
            1, "ann-1.0-a2", 4242, "suspended", 7, 3, 100, True, True, 5, 9, 6, True, 1, 2, 4096, {"loss": 0.5}, ("f1",)
        ),
        b'{"type":"hello","proto":1,"task":"ann-1.0-a2","pid":4242,"state":"suspended","step":7,"start_step":3,'
        b'"total_steps":100,"can_park":true,"can_checkpoint":true,"gen":5,"seq":9,"saved_step":6,"finished":true,'
        b'"rank":1,"world":2,"state_bytes":4096,"metrics":{"loss":0.5},"diverged":["f1"]}\n',
    ),
    (
        Progress(7, 0.125, 3, 100, True, False, 6, {"loss": 0.5}, 4096, 8192, 1024, 512, 256, 15, (), 2048),
        b'{"type":"progress","step":7,"step_s":0.125,"start_step":3,"total_steps":100,"can_park":true,'
        b'"can_checkpoint":false,"saved_step":6,"metrics":{"loss":0.5},'
        b'"state_bytes":4096,"arena_bytes":8192,"peak_bytes":1024,"trough_bytes":512,"samples":256,"seq":15,"reserved_bytes":2048}\n',
    ),
    (
        Suspended(9, 7, 1048576, 4096, 0.25),
        b'{"type":"suspended","seq":9,"step":7,"bytes":1048576,"residue_bytes":4096,"seconds":0.25}\n',
    ),
    (Resumed(10, 7, 0.25), b'{"type":"resumed","seq":10,"step":7,"seconds":0.25}\n'),
    (
        Saved(11, 8, "/ckpt/a2-s8", 0.5, True),
        b'{"type":"saved","seq":11,"step":8,"dir":"/ckpt/a2-s8","seconds":0.5,"leaving":true}\n',
    ),
    (Refused(12, "no save function"), b'{"type":"refused","seq":12,"reason":"no save function"}\n'),
    (Finished(99, {"accuracy": 0.875}), b'{"type":"finished","step":99,"metrics":{"accuracy":0.875}}\n'),
    (Stacks(13, "main: forward"), b'{"type":"stacks","seq":13,"text":"main: forward"}\n'),
    (Ready(16, 8), b'{"type":"ready","seq":16,"step":8}\n'),
    (Late(17, 12), b'{"type":"late","seq":17,"step":12}\n'),
    (
        Counted(19, (12.5, 12.5125), (1024, 2048), last=True),
        b'{"type":"counted","seq":19,"at_s":[12.5,12.5125],"bytes":[1024,2048],"last":true}\n',
    ),
    (Order("hold", 5, 18, 10), b'{"type":"order","do":"hold","gen":5,"seq":18,"at_step":10}\n'),
    (Order("leave", 5, 14), b'{"type":"order","do":"leave","gen":5,"seq":14}\n'),
)
NAMES = [type(message).__name__ for message, _ in GOLDEN]  # `Order` twice


def read(line: bytes) -> FromWorker | Order:
    return decode_order(line) if b'"order"' in line else decode_line(line)


def test_every_line_has_a_golden_sample() -> None:
    assert set(NAMES) == {kind.__name__ for kind in get_args(FromWorker)} | {"Order"}


@pytest.mark.parametrize(("message", "line"), GOLDEN, ids=NAMES)
def test_the_text_of_a_line_never_changes(message: FromWorker | Order, line: bytes) -> None:
    assert encode_line(message) == line


@pytest.mark.parametrize(("message", "line"), GOLDEN, ids=NAMES)
def test_a_line_is_read_back_as_it_was(message: FromWorker | Order, line: bytes) -> None:
    assert read(line) == message


@pytest.mark.parametrize(("message", "line"), GOLDEN, ids=NAMES)
def test_a_field_of_a_newer_peer_is_ignored(message: FromWorker | Order, line: bytes) -> None:
    assert read(json.dumps(json.loads(line) | {"shoe_size": 43}).encode()) == message


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"null",
        b"[]",
        b"{}",
        b'{"type":"gossip"}',
        b'{"type":"resumed","seq":-1,"step":7,"seconds":0.25}',
        b'{"type":"resumed","seq":1,"step":-2,"seconds":0.25}',
        b'{"type":"resumed","seq":1,"step":7,"seconds":NaN}',
        b'{"type":"resumed","seq":1,"step":7,"seconds":1e999}',
        b'{"type":"resumed","seq":1,"step":7}',
        b'{"type":"refused","seq":1,"reason":"\xff"}',
        b'{"type":"counted","seq":1,"at_s":[0.5],"bytes":[-1]}',
        b'{"type":"counted","seq":1,"at_s":[' + b",".join([b"1"] * (COUNTED_MAX + 1)) + b"]}",
        b'{"type":"order","do":"suspend","gen":1,"seq":1}',
        b"[" * 60_000,
        b'{"type":"refused","seq":1,"reason":"' + b"x" * LINE_BYTES_MAX + b'"}',
    ],
)
def test_what_is_no_line_is_refused(line: bytes) -> None:
    with pytest.raises(WireError):
        decode_line(line)


@pytest.mark.parametrize("line", [b"", b'{"type":"order","do":"dance","gen":1,"seq":1}', b"[" * 60_000])
def test_what_is_no_order_is_refused(line: bytes) -> None:
    with pytest.raises(WireError):
        decode_order(line)


@given(st.binary(max_size=200))
def test_random_bytes_are_a_wire_error_and_nothing_else(data: bytes) -> None:
    for decoder in (decode_line, decode_order):
        with pytest.raises(WireError):
            decoder(data)


@given(st.sampled_from(GOLDEN), st.data())
def test_flipped_bytes_are_a_line_or_a_wire_error(
    sample: tuple[FromWorker | Order, bytes], data: st.DataObject
) -> None:
    mangled = bytearray(sample[1])
    for _ in range(data.draw(st.integers(1, 3))):
        mangled[data.draw(st.integers(0, len(mangled) - 1))] = data.draw(st.integers(0, 255))
    for decoder in (decode_line, decode_order):
        try:
            message = decoder(bytes(mangled))
        except WireError:
            continue
        assert isinstance(message, msgspec.Struct)
