"""How often Python looks for garbage in cycles."""

from __future__ import annotations

import gc
from contextlib import suppress

from protocol.garbage import THRESHOLDS, seldom_collected


def test_garbage_is_looked_for_seldom_until_the_context_is_left_however_it_is() -> None:
    before, within = gc.get_threshold(), None
    with suppress(ZeroDivisionError), seldom_collected():
        within = gc.get_threshold()
        _ = 1 / 0
    assert within == THRESHOLDS != before
    assert gc.get_threshold() == before
