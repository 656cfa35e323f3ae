"""Periods of the reader's calendar, in whose time zone clocks change twice a year."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime
from itertools import pairwise

import pytest

from launch.faults import Fault
from launch.periods import edges
from protocol import exit_codes


@pytest.fixture(autouse=True)
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def local(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


NOW = local("2026-11-25T12:00")


def test_without_a_beginning_it_is_all_time() -> None:
    assert edges(now=NOW) == ()


def test_since_counts_back_from_now() -> None:
    assert edges(since="7d", now=NOW) == (NOW - 7 * 86400, NOW)


def test_dates_are_the_beginnings_of_local_days_and_moments_are_taken_as_they_are() -> None:
    told = edges(begin="2026-11-01", end="2026-11-02T06:30", now=NOW)
    assert told == (local("2026-11-01T00:00"), local("2026-11-02T06:30"))


def test_days_may_have_an_hour_more() -> None:
    told = edges(begin="2026-10-24", end="2026-10-27", every="day", now=NOW)
    assert [end - start for start, end in pairwise(told)] == [86400.0, 90000.0, 86400.0]


@pytest.mark.parametrize(
    ("every", "inner"),
    [
        ("hour", ["2026-12-30T23:00"]),
        ("day", ["2026-12-31T00:00"]),
        ("week", []),
        ("month", []),
    ],
)
def test_the_first_and_the_last_period_may_be_parts(every: str, inner: list[str]) -> None:
    end = "2026-12-31T00:00" if every == "hour" else "2026-12-31T05:00"
    told = edges(begin="2026-12-30T22:15", end=end, every=every, now=NOW)
    assert list(told)[1:-1] == [local(each) for each in inner]


def test_weeks_begin_on_monday_and_months_on_their_first_day() -> None:
    assert list(edges(begin="2026-11-11", end="2026-11-20", every="week", now=NOW))[1:-1] == [local("2026-11-16T00:00")]
    months = list(edges(begin="2025-11-11", end="2026-02-02", every="month", now=NOW))[1:-1]
    assert months == [local(f"{month}-01T00:00") for month in ("2025-12", "2026-01", "2026-02")]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ({"since": "7d", "begin": "2026-11-01"}, "--since"),
        ({"every": "day"}, "begins"),
        ({"end": "2026-11-01"}, "begins"),
        ({"begin": "yesterday"}, "--from"),
        ({"begin": "2026-11-02", "end": "2026-11-01"}, "ends before"),
        ({"since": "1d", "every": "minute"}, "--every"),
        ({"since": "0"}, "--since"),
        ({"since": "60d", "every": "hour"}, "366 periods"),
    ],
)
def test_what_makes_no_periods_is_refused_by_its_name(words: dict[str, str], names: str) -> None:
    with pytest.raises(Fault, match=names) as refused:
        edges(**words, now=NOW)
    assert refused.value.code == exit_codes.USAGE
    assert refused.value.next_step
