"""Single keys from a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: The bytes that a terminal sends for the arrow keys.
ARROWS = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[C": "right", b"\x1b[D": "left"}
ARROW_BYTES = 3
#: Whole arrows, however many wait.
READ_BYTES = 21 * ARROW_BYTES


@contextmanager
def pressed() -> Iterator[Callable[[], str]]:
    """Yield a function that waits for a key of the terminal on stdin, and returns its name: a letter, or an arrow's.

    Keys that come together, as those of an arrow that is held down, are told one by one. A stdin that ends counts as
    ``q``.
    """
    import termios
    import tty

    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)
    unread = b""

    def next_key() -> str:
        nonlocal unread
        unread = unread or os.read(stdin, READ_BYTES)
        size = ARROW_BYTES if unread[:ARROW_BYTES] in ARROWS else 1
        sent, unread = unread[:size], unread[size:]
        return ARROWS.get(sent) or sent.decode("ascii", "replace") or "q"

    try:
        yield next_key
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)
