"""Functions that tests have called on a node."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


class OddError(Exception):
    """Cannot be unpickled: its constructor takes two arguments, and its base keeps one."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two} are odd")


def add(one: int, two: int = 0) -> int:
    return one + two


def process() -> tuple[str, str, str]:
    return sys.executable, str(Path.cwd()), os.environ["CUDA_VISIBLE_DEVICES"]


def refuse(number: int) -> None:
    raise ValueError(f"{number} is too small")


def refuse_oddly() -> None:
    raise OddError(1, 3)


def unpicklable() -> object:
    return lambda: 1


def killed() -> None:
    print("the last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def ended() -> None:
    sys.exit(7)


def wait_for(path: str) -> str:
    """Return the text of a file, once there is some: a file that is being written is empty at first."""
    while not (Path(path).exists() and (text := Path(path).read_text())):
        time.sleep(0.02)
    return text


def note_and_wait_for(own: str, path: str) -> str:
    """The same, with a file that says that it has begun."""
    Path(own).touch()
    return wait_for(path)


def dies_once(path: str) -> str:
    """Die, and return at the second call."""
    if Path(path).exists():
        return "the second"
    Path(path).touch()
    killed()
    return "the first"


def refuses_then_dies(path: str) -> None:
    """Raise, and die at the second call."""
    if Path(path).exists():
        killed()
    Path(path).touch()
    refuse(1)
