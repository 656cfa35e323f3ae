"""Show a picture again whenever it has changed: over the last one on a terminal, below it on a pipe."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import NamedTuple, TextIO

#: Seconds between two looks.
PAUSE_S = 1.0
#: Moves a terminal's cursor to the top left, and clears all below.
_HOME = "\x1b[H\x1b[J"


class Picture(NamedTuple):
    """A text for people, and what of it is worth a second copy where the first one stays."""

    text: str
    news: object


def show_changes(
    look: Callable[[], Picture], *, out: TextIO | None = None, pause: Callable[[float], None] = time.sleep
) -> None:
    """Show what `look` returns, and again at each change, for ever.

    A terminal shows every change of the text, cut to its size. Elsewhere only a change of the news is worth a copy.
    """
    out = out or sys.stdout
    drawn = out.isatty() and os.environ.get("TERM") != "dumb"
    shown: object = None
    while True:
        picture = look()
        text = cut_to_terminal(picture.text) if drawn else picture.text
        now = text if drawn else picture.news
        if now != shown:
            out.write(f"{_HOME}{text}" if drawn else text)
            out.write("\n")
            out.flush()
            shown = now
        pause(PAUSE_S)


def cut_to_terminal(text: str) -> str:
    """Return the part of a text that fits on the terminal; its last line tells how much is left out."""
    width, height = shutil.get_terminal_size()
    lines = [line[:width] for line in text.splitlines()]
    if len(lines) < height:
        return "\n".join(lines)
    kept = lines[: max(1, height - 2)]
    return "\n".join([*kept, f"and {len(lines) - len(kept)} more lines"[:width]])
