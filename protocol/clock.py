"""Clocks that corrections of the wall clock do not reach, also not over a restart.

A daemon's time begins where its records end, and then goes on with the host's own counter, which no correction and no
administrator changes. The wall clock is asked only where the counter began anew (another boot, another host), and is
believed only as far as the records, or other hosts' clocks, make it plausible: a time that has once been believed is in
every age and every finish-time from then on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from statistics import median

import structlog
from msgspec import Struct

Clock = Callable[[], float]

#: A daemon may have been away so long without confirmation, where its host's counter began anew.
AWAY_S_MAX = 86_400.0
#: The same where there is no other host to confirm it, such as a workstation after the holidays.
ALONE_AWAY_S_MAX = 31 * 86_400.0
#: By so much a host's clocks may drift apart while it runs, or sleeps in a way that its counter does not see.
DRIFT_S_MAX = 60.0
#: Other hosts have that long to confirm a wall clock that is not believed.
CONFIRM_S = 120.0

_log = structlog.get_logger("clock")


def instant(at: float) -> str:
    """Return a moment (UNIX seconds) as people and programs read it: ISO-8601, UTC, with milliseconds."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def boot_seconds() -> float:
    """Return the seconds since the host was booted, sleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Return the id that tells this boot of the host from others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def steady_clock(at_least: float = 0.0) -> Clock:
    """Return a clock of UNIX seconds that starts at the wall clock's time or `at_least` and then only goes on.

    Corrections of the wall clock do not reach it, so that a step forward and back freezes no daemon. Time during which
    the host sleeps counts.
    """
    offset = max(time.time(), at_least) - boot_seconds()
    return lambda: boot_seconds() + offset


class Anchor(Struct, frozen=True):
    """A clock's record for the next start: in this boot the time is the host's counter plus `offset_s`."""

    boot_id: str
    offset_s: float

    def at(self, counter_s: float, boot: str) -> float:
        """Return the time by the host's counter; minus infinity in another boot, of which this record knows nothing."""
        return counter_s + self.offset_s if self.boot_id and self.boot_id == boot else -inf


class ResumedClock:
    """UNIX seconds of a daemon that no other host advises: a `steady_clock` that goes on over restarts in one boot.

    In another boot the wall clock is believed, as far as the records allow it.

    Parameters
    ----------
    last_s, anchor, wall, counter, boot
        As of a `RecordedClock`.
    """

    def __init__(
        self,
        last_s: float,
        anchor: Anchor | None,
        *,
        wall: Clock = time.time,
        counter: Clock = boot_seconds,
        boot: str | None = None,
    ) -> None:
        boot = boot_id() if boot is None else boot
        resumed_s = -inf if anchor is None else anchor.at(counter(), boot)
        begin_s = max(last_s, wall() if resumed_s == -inf else resumed_s)
        self._counter = counter
        self.anchor = Anchor(boot, begin_s - counter())

    def __call__(self) -> float:
        """Return the time."""
        return self._counter() + self.anchor.offset_s


class RecordedClock:
    """UNIX seconds of a daemon with records, such as a journal.

    Parameters
    ----------
    last_s
        The newest time in the records; 0: there are none.
    anchor
        The record that the clock of the last start left; None: there is none.
    wall, counter, boot
        The host's clocks, for tests.
    """

    def __init__(
        self,
        last_s: float,
        anchor: Anchor | None,
        *,
        wall: Clock = time.time,
        counter: Clock = boot_seconds,
        boot: str | None = None,
    ) -> None:
        self._wall, self._counter = wall, counter
        self._boot = boot_id() if boot is None else boot
        self._walls: dict[str, float] = {}
        begin_s = self._begin(last_s, anchor)
        self._offset_s = begin_s - counter()
        self._doubted_until: float | None = None
        ahead_s = wall() - begin_s
        if last_s and ahead_s > DRIFT_S_MAX:
            self._doubted_until = counter() + CONFIRM_S
            _log.warning("clock.doubted", ahead_s=round(ahead_s), meaning=_DOUBTED)
        elif last_s and ahead_s < -DRIFT_S_MAX:
            _log.warning("clock.behind", behind_s=round(-ahead_s), meaning=_BEHIND)

    def _begin(self, last_s: float, anchor: Anchor | None) -> float:
        resumed_s = -inf if anchor is None else anchor.at(self._counter(), self._boot)
        if resumed_s > -inf:
            return max(last_s, resumed_s)
        wall_s = self._wall()
        return wall_s if not last_s or last_s <= wall_s <= last_s + AWAY_S_MAX else last_s

    def __call__(self) -> float:
        """Return the time."""
        return self._counter() + self._offset_s

    @property
    def anchor(self) -> Anchor:
        """The record to write down for the next start."""
        return Anchor(self._boot, self._offset_s)

    def hear(self, host: str, boot: str, wall_s: float) -> bool:
        """Take in the wall clock of a host, in this boot of it; return whether this clock has gone forward.

        It goes forward as far as most other hosts confirm the own wall clock, and never beyond that. The own host
        confirms nothing; where no other speaks in time, the wall clock is believed as far as one can be away.
        """
        if self._doubted_until is None:
            return False
        counter_s = self._counter()
        if wall_s > 0.0 and boot != self._boot:
            self._walls[host] = wall_s - counter_s
        over = counter_s > self._doubted_until
        if self._walls:
            gone = self._go_forward(min(self._wall(), median(self._walls.values()) + counter_s))
        else:
            gone = over and self._wall() - self() <= ALONE_AWAY_S_MAX and self._go_forward(self._wall())
        ahead_s = self._wall() - self()
        if over and ahead_s > DRIFT_S_MAX:
            _log.warning("clock.unconfirmed", ahead_s=round(ahead_s), meaning=_UNCONFIRMED)
        if over or ahead_s <= DRIFT_S_MAX:
            self._doubted_until = None
        return gone

    def _go_forward(self, to_s: float) -> bool:
        ahead_s = to_s - self()
        if ahead_s <= DRIFT_S_MAX:
            return False
        self._offset_s += ahead_s
        _log.warning("clock.forward", by_s=round(ahead_s), confirmed_by=sorted(self._walls) or "no other host")
        return True


_DOUBTED = (
    "the wall clock is far ahead of the newest record, or of the host's own counter; until other hosts' clocks confirm "
    "it time goes on from the record"
)
_BEHIND = "the wall clock is behind the newest record; time goes on from the record"
_UNCONFIRMED = (
    "no other host's clock has confirmed the wall clock, so time goes on from the record; set it right (chrony)"
)
