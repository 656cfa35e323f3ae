"""Periods of the reader's calendar: from words such as ``7d`` and ``2026-11-01`` to the edges between them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date, datetime, time, timedelta

from launch import spec
from launch.faults import usage
from protocol.messages import EDGES_MAX

LENGTHS = ("hour", "day", "week", "month")


def edges(
    *, begin: str | None = None, end: str | None = None, since: str | None = None, every: str | None = None, now: float
) -> Sequence[float]:
    """Return the edges of the periods that are meant, rising, in UNIX seconds; none for all time.

    The first and the last period may be parts of an hour, a day, a week (from Monday on) or a month.

    Raises
    ------
    Fault
        Naming the flag that is wrong, or that is missing.
    """
    if every is not None and every not in LENGTHS:
        raise usage(f"--every is {every!r}", f"choose one of {', '.join(LENGTHS)}")
    if since is not None and (begin is not None or end is not None):
        raise usage("--since does not go with --from and --to", "give one of them")
    if since is None and begin is None:
        if end is not None or every is not None:
            raise usage("where the report begins is not said", "give --since 7d, or --from 2026-11-01")
        return ()
    start = now - spec.some_seconds(since, "--since") if since is not None else _moment(begin or "", "--from")
    stop = now if end is None else _moment(end, "--to")
    if stop <= start:
        raise usage("the report ends before it begins", "give a --to that is later than --from; --from is in the past")
    return _divided(start, stop, every)


def _moment(text: str, flag: str) -> float:
    """Return a day's beginning, or a moment of the local time, in UNIX seconds."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        raise usage(f"{flag} is {text!r}, which is no date", "write 2026-11-01 or 2026-11-01T18:00") from None


def _divided(start: float, stop: float, every: str | None) -> Sequence[float]:
    told = [start]
    if every is not None:
        following = _following(start, every)
        while following < stop:
            told.append(following)
            if len(told) >= EDGES_MAX:
                raise usage(f"a report has {EDGES_MAX - 1} periods at most", "give a longer --every, or a later --from")
            following = _following(following, every)
    return (*told, stop)


def _following(moment: float, every: str) -> float:
    """Return when the hour, day, week or month after a moment begins. A day may have 23 or 25 hours."""
    if every == "hour":
        return (moment // 3600.0 + 1) * 3600.0
    day = datetime.fromtimestamp(moment).date()  # noqa: DTZ006 - the reader's calendar
    match every:
        case "day":
            first = day + timedelta(days=1)
        case "week":
            first = day + timedelta(days=7 - day.weekday())
        case _:
            first = date(day.year + day.month // 12, day.month % 12 + 1, 1)
    return datetime.combine(first, time()).timestamp()
