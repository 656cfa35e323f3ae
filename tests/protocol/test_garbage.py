"""How often Python looks for garbage in cycles."""

from __future__ import annotations

import gc

import pytest

from protocol.garbage import THRESHOLDS, seldom_collected


def test_garbage_is_looked_for_seldom_until_the_context_is_left_however_it_is() -> None:
    before = gc.get_threshold()
    with pytest.raises(ZeroDivisionError), seldom_collected():
        assert gc.get_threshold() == THRESHOLDS != before
        _ = 1 / 0
    assert gc.get_threshold() == before
