"""When Python looks for garbage in cycles: seldom, in a process that keeps much and makes few cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: Objects made before a look at the young ones; such looks before one at those that outlived one; and those before one
#: at all. A look at all that an arbiter of 10,000 apps keeps takes half as long as a round, and came once in each.
THRESHOLDS = (100_000, 20, 100)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Let this process look for garbage seldom, until the context is left."""
    before = gc.get_threshold()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
