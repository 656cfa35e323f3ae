"""Print a task's output as it grows, across attempts."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import BinaryIO

from app_agent import streams
from launch.client import Client
from launch.surface import note


def follow_logs(
    client: Client,
    target: str,
    *,
    follow: bool,
    tail: int | None = None,
    out: BinaryIO | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> bool:
    """Write the output of `target` to `out` (stdout); with `follow`, until it is over, also if the arbiter is away.

    With `tail` that many last lines of what there is come first, in place of all; attempts that follow are whole.
    Returns whether there was any.

    Raises
    ------
    Fault
        If there is no such task and, with `follow`, never will be; or if the app agent does not answer.
    """
    out, task, last = out or sys.stdout.buffer, "", b"\n"
    conversation = streams.output(target, follow=follow, tail=tail)
    for piece in streams.talk(conversation, lambda question: question(client), pause=pause):
        if task and piece.task != task:
            note(f"--- {piece.task} ---")
        task = piece.task
        if piece.dropped:
            out.write(b"" if last.endswith(b"\n") else b"\n")
            note(f"--- {piece.dropped} bytes of output are no longer kept ---")
        out.write(piece.data)
        out.flush()
        last = piece.data or last
    return bool(task)
