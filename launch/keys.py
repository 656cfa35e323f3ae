"""Single keys from a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: The bytes that a terminal sends for the arrow keys.
ARROWS = {b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[C": "right", b"\x1b[D": "left"}


@contextmanager
def pressed() -> Iterator[Callable[[], str]]:
    """Yield a function that waits for a key of the terminal on stdin, and returns its name: a letter, or an arrow's.

    A stdin that ends counts as ``q``.
    """
    import termios
    import tty

    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)
    try:
        yield lambda: _name(os.read(stdin, 8))
    finally:
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


def _name(sent: bytes) -> str:
    return ARROWS.get(sent) or sent[:1].decode("ascii", "replace") or "q"
