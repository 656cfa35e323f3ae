"""Runs in which no app is told why it got what it got: what is measured is the decision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from arbiter.core import seam


@contextmanager
def untold() -> Iterator[None]:
    """Tell only the apps whose holding changes, in rounds of any size."""
    before, seam.REASONS_MAX = seam.REASONS_MAX, 0
    try:
        yield
    finally:
        seam.REASONS_MAX = before
