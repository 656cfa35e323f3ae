"""Print a task's output as it grows, across attempts."""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Callable
from typing import BinaryIO

from launch.client import Client
from launch.faults import Fault
from launch.surface import note
from launch.views import OVER
from protocol import exit_codes

#: A reader's patience between two questions when nothing new was written.
PAUSE_S = 0.5
#: An offset at which no output is: the answer tells the size.
BEYOND = 2**53
#: Bytes of the end of an output that are searched first for its last lines.
REACH_BYTES = 65_536


def follow_logs(
    client: Client,
    target: str,
    *,
    follow: bool,
    tail: int | None = None,
    out: BinaryIO | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Write the output of `target` to `out` (stdout); with `follow`, until it is over, also if the arbiter is away.

    With `tail` that many last lines of what there is come first, in place of all; attempts that follow are whole.

    Raises
    ------
    Fault
        If there is no such task and, with `follow`, never will be; or if the app agent does not answer.
    """
    out = out or sys.stdout.buffer
    task, offset = "", 0
    while True:
        try:
            if tail is not None:
                task, offset = _last_lines(client, target, tail)
                tail = None
            chunk = client.query("log", target, offset)
        except Fault as fault:
            known, over = _standing(client, target)
            if not follow or not known or (over and fault.code != exit_codes.NOT_FOUND):
                raise
            if over:  # it never started, or its output is no longer kept
                return
            pause(PAUSE_S)  # it waits for its first GPU, or the arbiter is away
            continue
        if chunk["task"] != task:
            if task:
                note(f"--- {chunk['task']} ---")
            if offset:  # asked at the offset of another attempt's output
                task, offset = str(chunk["task"]), 0
                continue
            task = str(chunk["task"])
        data = base64.b64decode(chunk["data"])
        out.write(data)
        out.flush()
        offset += len(data)
        if offset < chunk["size"]:
            continue
        if not follow or (chunk["ended"] and _standing(client, target)[1]):
            return
        pause(PAUSE_S)


def _last_lines(client: Client, target: str, lines: int) -> tuple[str, int]:
    """Return the task whose output `target` means, and the byte at which its last `lines` lines begin."""
    end = client.query("log", target, BEYOND)
    task, size = str(end["task"]), int(end["size"])
    reach = REACH_BYTES
    while True:
        start = max(0, size - reach)
        at = _begin_of(_output(client, task, start, size), lines)
        if at is not None or start == 0:
            return task, start + (at or 0)
        reach *= 4


def _output(client: Client, task: str, start: int, end: int) -> bytes:
    """Return the bytes from `start` to `end` of a task's output, or fewer if there are no more."""
    data = b""
    while start + len(data) < end:
        more = base64.b64decode(client.query("log", task, start + len(data))["data"])
        if not more:
            break
        data += more
    return data[: end - start]


def _begin_of(data: bytes, lines: int) -> int | None:
    """Return where the last `lines` lines of `data` begin; None if they may begin before it."""
    if lines == 0:
        return len(data)
    at = len(data) - data.endswith(b"\n")
    for _ in range(lines):
        at = data.rfind(b"\n", 0, at)
        if at < 0:
            return None
    return at + 1


def _standing(client: Client, target: str) -> tuple[bool, bool]:
    """Return whether the app that `target` is or belongs to is known, and whether it will write no more."""
    name = target.split(".", 1)[0]
    for record in client.apps():  # the app agent answers for its own apps without the arbiter
        if record.app == name:
            return True, record.over
    app = next(iter(client.query("apps", name)["apps"]), None)
    return app is not None, app is None or app["state"] in OVER
