"""Numba, where it is installed: the hot loops of `kernel` as machine code, kept on disk between starts.

Without it the same code runs as plain Python: it answers the same, and tens of times slower (`COMPILED` says which).
The same goes for a process that uses plain Python while another one compiles: see `use_plain`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import numpy as np

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])

try:
    import numba
except ImportError:
    #: Whether the loops can run as machine code.
    COMPILED = False
else:
    COMPILED = not numba.config.DISABLE_JIT
    # The loops hold branches, which no vector instruction takes: to look for some is a third of the compilation.
    numba.config.LOOP_VECTORIZE = 0


class _Loop(NamedTuple):
    """One function in both forms, and the names of its module, by which everything calls it."""

    names: dict[str, Any]
    name: str
    plain: object
    compiled: object


class _Use:
    """The form of the loops that is in use, one for the process."""

    loops: ClassVar[list[_Loop]] = []
    compiled = COMPILED
    kept = True  #: the compiled code is kept on disk, where other processes find it


def use_plain() -> None:
    """Run the loops as plain Python from the next call on: at once, while compiled ones would first be compiled."""
    for loop in _Use.loops:
        loop.names[loop.name] = loop.plain
    _Use.compiled = False


def use_compiled() -> None:
    """Run the loops as machine code from the next call on, compiled or read from the disk at the first one."""
    for loop in _Use.loops:
        loop.names[loop.name] = loop.compiled
    _Use.compiled = COMPILED


class NotOnDiskError(Exception):
    """The machine code of a loop is not on disk: it would have to be compiled."""


@contextmanager
def from_disk() -> Iterator[None]:
    """Have machine code read from the disk alone; a loop that would be compiled raises `NotOnDiskError` instead."""
    from numba.core.event import Event, Listener, install_listener

    class Refusal(Listener):  # type: ignore[misc]  # numba declares it without types
        def on_start(self, event: Event) -> None:
            raise NotOnDiskError

        def on_end(self, event: Event) -> None:
            """End nothing: it never began."""

    with install_listener("numba:compile", Refusal()):
        yield


def compiled_in_use() -> bool:
    """Return whether the loops run as machine code; the auction's record shows it."""
    return _Use.compiled


def kept() -> bool:
    """Return whether compiled code is kept on disk, so that one process can compile for another."""
    return _Use.kept


def compiled(function: FunctionT) -> FunctionT:
    """Compile `function` at its first call. The compiled code lets other threads run."""
    return _compile(function, inline="never")


def inlined(function: FunctionT) -> FunctionT:
    """Compile `function` as a part of each of its callers, as a call would cost too much in their innermost loops."""
    return _compile(function, inline="always")


def _compile(function: FunctionT, inline: str) -> FunctionT:
    # Hashes overflow on purpose, which numpy's scalars warn of and machine code does not.
    plain = np.errstate(over="ignore")(function)
    if not COMPILED:
        return plain
    try:
        fast = numba.njit(function, cache=True, nogil=True, error_model="numpy", inline=inline)
    except RuntimeError:  # no folder to keep the compiled code in: NUMBA_CACHE_DIR names one
        fast = numba.njit(function, nogil=True, error_model="numpy", inline=inline)
        _Use.kept = False
    _Use.loops.append(_Loop(function.__globals__, function.__name__, plain, fast))
    return cast(FunctionT, fast)
