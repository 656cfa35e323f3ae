"""How much a test tries: a few drawn examples in every run, and all of them under `make full`."""

from __future__ import annotations

import os

from hypothesis import settings

#: Set by `make full`. Each run there draws other examples; elsewhere every run draws the same ones.
FULL = os.environ.get("GPU_ARBITER_FULL") == "1"
#: What `make check` tries of the examples of `make full`.
SHARE = 6
EXAMPLES_MIN = 10


def examples(full: int) -> int:
    """Return how many examples to draw in this run, of so many in a full one."""
    return full if FULL else min(full, max(EXAMPLES_MIN, full // SHARE))


def choose_examples() -> None:
    """Tell hypothesis, before any test is imported, whether its examples are new in each run.

    Without `FULL` they are not: a red run then speaks of the change, not of luck.
    """
    settings.register_profile("check", deadline=None, derandomize=True, database=None)
    settings.register_profile("full", deadline=None, print_blob=True)
    settings.load_profile("full" if FULL else "check")
