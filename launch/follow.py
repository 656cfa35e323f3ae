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


def follow_logs(
    client: Client,
    target: str,
    *,
    follow: bool,
    out: BinaryIO | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Write the output of `target` to `out` (stdout); with `follow`, until it is over, also if the arbiter is away.

    Raises
    ------
    Fault
        If there is no such task and, with `follow`, never will be; or if the app agent does not answer.
    """
    out = out or sys.stdout.buffer
    task, offset = "", 0
    while True:
        try:
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


def _standing(client: Client, target: str) -> tuple[bool, bool]:
    """Return whether the app that `target` is or belongs to is known, and whether it will write no more."""
    name = target.split(".", 1)[0]
    for record in client.apps():  # the app agent answers for its own apps without the arbiter
        if record.app == name:
            return True, record.over
    app = next(iter(client.query("apps", name)["apps"]), None)
    return app is not None, app is None or app["state"] in OVER
