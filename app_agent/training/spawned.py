"""The processes of `torch.multiprocessing.spawn` are the training processes of a task, as torchrun's are.

The script that calls it is a training process until then. As it starts others, it steps aside: they are ranks 0 to
nprocs - 1, and each learns that from the function it is given to run. When they are gone and the script trains after
all, it is the training process again. `start_processes` is followed too, by the start methods in `FOLLOWED`; a fork
server may have been started before and does not hold this package. Standard library only.

Processes of `multiprocessing` and `subprocess` in general are not followed: most of them load data.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from .interpreter import when_imported

SOCKET = "GPU_ARBITER_SOCKET"
FOLLOWED = frozenset({"spawn", "fork"})
#: PyTorch ends all others once one has left. Those that leave too are given so long to do so by themselves.
LEAVE_S = 30.0

_MODULE = "torch.multiprocessing.spawn"
_newest: Any = None  #: the processes that were started last, a ProcessContext


def watch(step_aside: Callable[[], str], train_as_rank: Callable[..., None], code: int) -> None:
    """Have `step_aside` called before such processes start, and `train_as_rank` in each of them.

    `step_aside` answers the node agent's socket for them; empty: this process goes on as before. `train_as_rank` takes
    the function that the script starts, the socket, the number of processes, the rank and the script's own arguments.
    `code` is the exit status of a process that was told to leave.
    """

    def hook(module: ModuleType) -> None:
        module.start_processes = _starting(module.start_processes, step_aside, train_as_rank)  # type: ignore[attr-defined]
        context = module.ProcessContext
        context.join = _joining(context.join, code)

    when_imported(_MODULE, hook)


def living() -> bool:
    """Return whether a process lives that was started here as a rank."""
    return _newest is not None and any(process.is_alive() for process in _newest.processes)


def _starting(
    start: Callable[..., Any], step_aside: Callable[[], str], train_as_rank: Callable[..., None]
) -> Callable[..., Any]:
    @functools.wraps(start)
    def start_ranks(
        fn: Callable[..., object],
        args: tuple[object, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
        **others: Any,
    ) -> Any:
        global _newest  # noqa: PLW0603 - processes of an earlier call that still live are helpers of these
        socket = step_aside() if start_method in FOLLOWED else ""
        if not socket:
            return start(fn, args, nprocs, join, daemon, start_method, **others)
        with _in_environment(socket):  # so that the new interpreters load this package, see `bootstrap`
            rank = functools.partial(train_as_rank, fn, socket, nprocs)
            context = start(rank, args, nprocs, False, daemon, start_method, **others)
        _newest = context
        if not join:
            return context
        while not context.join():
            pass
        return None

    return start_ranks


def _joining(join: Callable[..., Any], code: int) -> Callable[..., Any]:
    """Let all ranks leave before the first that has left makes PyTorch end the others."""

    @functools.wraps(join)
    def join_ranks(context: Any, timeout: float | None = None, *more: Any, **others: Any) -> Any:
        from multiprocessing.connection import wait  # here: most training processes start no others

        ready = wait(list(context.sentinels), timeout)
        ended = [process for process in context.processes if process.sentinel in ready]
        for process in ended:
            process.join()
        if any(process.exitcode == code for process in ended):
            deadline = time.monotonic() + LEAVE_S
            for process in context.processes:
                process.join(max(0.0, deadline - time.monotonic()))
        return join(context, None if timeout is None else 0.0, *more, **others)

    return join_ranks


@contextlib.contextmanager
def _in_environment(socket: str) -> Iterator[None]:
    os.environ[SOCKET] = socket
    try:
        yield
    finally:
        del os.environ[SOCKET]
