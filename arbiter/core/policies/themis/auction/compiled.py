"""Numba, where it is installed: the hot loops of `kernel` as machine code, kept on disk between starts.

Without it the same code runs as plain Python: it answers the same, and tens of times slower (`COMPILED` says which).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])

try:
    import numba
except ImportError:
    #: Whether the loops run as machine code; `doctor` and the auction's record show it.
    COMPILED = False
else:
    COMPILED = not numba.config.DISABLE_JIT


def compiled(function: FunctionT) -> FunctionT:
    """Compile `function` at its first call. The compiled code lets other threads run."""
    return _compile(function, inline="never")


def inlined(function: FunctionT) -> FunctionT:
    """Compile `function` as a part of each of its callers, as a call would cost too much in their innermost loops."""
    return _compile(function, inline="always")


def _compile(function: FunctionT, inline: str) -> FunctionT:
    if not COMPILED:
        # Hashes overflow on purpose, which numpy's scalars warn of and machine code does not.
        return np.errstate(over="ignore")(function)
    try:
        return cast(FunctionT, numba.njit(function, cache=True, nogil=True, error_model="numpy", inline=inline))
    except RuntimeError:  # no folder to keep the compiled code in: NUMBA_CACHE_DIR names one
        return cast(FunctionT, numba.njit(function, nogil=True, error_model="numpy", inline=inline))
