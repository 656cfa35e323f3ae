"""A section in a process of its own, which can crash, hang or leave processes behind without harm to the others.

Two processes are forked: a keeper, and the section under it. Processes whose parents have ended become the keeper's
(a *subreaper*, prctl(2)), so at the end of the section it ends all that is left of it: trainings, daemons of MPS, jobs
of the demonstration in sessions of their own. Those that end by themselves it reaps at once: an ended process that is
still listed would count as one that holds its GPU.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

#: From the end of a section's time until it is killed: a site ends its jobs meanwhile.
GRACE_S = 40.0
KILLED_S = 10.0
REAP_S = 0.2
#: The exit code of a section that had to be killed when its time was over.
OVER_TIME = 124
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36

_fork = multiprocessing.get_context("fork")


class Ended(BaseException):
    """The section's time is over. No `except Exception` within a section takes it for one of its own."""


def run_apart(work: Callable[[], None], limit_s: float, grace_s: float = GRACE_S) -> int:
    """Run `work` in a process of its own, for `limit_s` seconds at most; return its exit code.

    When the time is over `Ended` is raised within `work`, and after `grace_s` it is killed: `OVER_TIME`. A signal
    that ended it is 128 and its number. No process that `work` has started is left.
    """
    keeper = _fork.Process(target=_keep, args=(work, limit_s, grace_s, os.getpid()))
    keeper.start()
    try:
        keeper.join()
    finally:
        if keeper.is_alive():
            keeper.terminate()
            keeper.join()
    return _code(keeper.exitcode)


def _keep(work: Callable[[], None], limit_s: float, grace_s: float, parent: int) -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _end_with(parent)
    section = _fork.Process(target=_section, args=(work, os.getpid()))
    section.start()
    try:
        _join(section, limit_s)
    finally:
        code = _wind_up(section, grace_s)
    os._exit(code)  # whatever cannot even be killed is not waited for


def _join(section: BaseProcess, limit_s: float) -> None:
    """Wait for the section, and meanwhile let go of processes of its that end without a parent of their own."""
    deadline = time.monotonic() + limit_s
    while section.is_alive() and (left_s := deadline - time.monotonic()) > 0:
        with suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid == section.pid:
                    break
                os.waitpid(ended.si_pid, os.WNOHANG)
        section.join(min(REAP_S, left_s))


def _wind_up(section: BaseProcess, grace_s: float) -> int:
    """End the section and all that is left of it; return its exit code."""
    _once()
    if section.is_alive():
        section.terminate()
        section.join(grace_s)
    killed = section.is_alive()
    if killed:
        section.kill()
        section.join(KILLED_S)
    _end_rest()
    return OVER_TIME if killed else _code(section.exitcode)


def _section(work: Callable[[], None], keeper: int) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    _end_with(keeper)
    work()


def leave(number: int, _frame: object) -> NoReturn:
    """End this process, as the handler of a signal: what is under way is wound up."""
    _once()
    raise SystemExit(128 + number)


def _end(*_: object) -> NoReturn:
    _once()
    raise Ended


def _once() -> None:
    """Hear no second signal: what is being ended must come to its end."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _end_with(parent: int) -> None:
    """Have this process told to end when its parent has ended."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has ended already
        os.kill(os.getpid(), signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _code(exitcode: int | None) -> int:
    assert exitcode is not None
    return 128 - exitcode if exitcode < 0 else exitcode


def _end_rest() -> None:
    """End every process below this one, also those that come while the others end."""
    deadline = time.monotonic() + KILLED_S
    while (left := list(_below(os.getpid()))) and time.monotonic() < deadline:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def _below(root: int) -> Iterator[int]:
    """Yield all descendants of a process."""
    children = defaultdict(list)
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError, ValueError):  # it ends while we look
                # After the name, which may hold anything: state, then the parent.
                children[int((folder / "stat").read_text().rpartition(")")[2].split()[1])].append(int(folder.name))
    waiting = [root]
    while waiting:
        found = children[waiting.pop()]
        yield from found
        waiting += found
