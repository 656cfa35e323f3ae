"""A daemon's clock goes on from its records, and a wrong wall clock at its start does not become everybody's past."""

from __future__ import annotations

import pytest

from protocol.clock import ALONE_AWAY_S_MAX, AWAY_S_MAX, CONFIRM_S, Anchor, RecordedClock, ResumedClock

DAY = 86_400.0
TRUE_S = 1.8e9


class Host:
    """One host's clocks: the true time goes on, its wall clock shows that and an error."""

    def __init__(self, boot: str = "boot-1", *, up_s: float = 1000.0) -> None:
        self.boot, self.up_s, self.now_s, self.error_s = boot, up_s, TRUE_S, 0.0

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.up_s += seconds

    def reboot(self, away_s: float) -> None:
        self.now_s += away_s
        self.boot, self.up_s = self.boot + "'", 30.0

    def wall(self) -> float:
        return self.now_s + self.error_s

    def start(self, last_s: float, anchor: Anchor | None) -> RecordedClock:
        return RecordedClock(last_s, anchor, wall=self.wall, counter=lambda: self.up_s, boot=self.boot)


def off_by(clock: RecordedClock, host: Host) -> float:
    return round(clock() - host.now_s, 3)


def test_a_first_start_believes_the_wall_clock() -> None:
    host = Host()
    host.error_s = 400 * DAY
    assert off_by(host.start(0.0, None), host) == 400 * DAY


def test_a_restart_in_the_same_boot_goes_on_by_the_hosts_counter_whatever_the_wall_clock_shows() -> None:
    for error_s in (400 * DAY, -400 * DAY, 3600.0):
        host = Host()
        before = host.start(0.0, None)
        host.wait(500.0)
        host.error_s = error_s
        clock = host.start(before() - 100.0, before.anchor)
        assert off_by(clock, host) == 0.0
        host.error_s = 0.0
        host.wait(3600.0)
        assert off_by(host.start(clock(), clock.anchor), host) == 0.0


def test_after_a_reboot_the_wall_clock_is_believed_for_a_day() -> None:
    host = Host()
    last_s = host.start(0.0, None)()
    host.reboot(AWAY_S_MAX / 2)
    assert off_by(host.start(last_s, Anchor("boot-1", 0.0)), host) == 0.0


def test_after_a_reboot_a_wall_clock_behind_the_records_does_not_take_time_back() -> None:
    host = Host()
    host.error_s = -50 * DAY
    assert host.start(TRUE_S, None)() == TRUE_S


@pytest.mark.parametrize("voices", [1, 3])
def test_a_jump_that_other_hosts_do_not_confirm_is_not_believed(voices: int) -> None:
    host = Host()
    host.reboot(60.0)
    host.error_s = 400 * DAY
    clock = host.start(TRUE_S, None)
    assert off_by(clock, host) == -60.0
    for number in range(voices):
        assert not clock.hear(f"n{number}", f"b{number}", host.now_s)
    host.wait(CONFIRM_S + 1.0)
    clock.hear("n0", "b0", host.now_s)
    assert off_by(clock, host) == -60.0


def test_a_long_absence_that_other_hosts_confirm_is_believed() -> None:
    host = Host()
    host.reboot(30 * DAY)
    clock = host.start(TRUE_S, None)
    assert off_by(clock, host) == -30 * DAY
    assert clock.hear("n1", "b1", host.now_s)
    assert off_by(clock, host) == 0.0
    assert not clock.hear("n2", "b2", host.now_s + 400 * DAY), "once confirmed it moves no more"


def test_the_clock_goes_forward_no_further_than_most_hosts_confirm() -> None:
    host = Host()
    host.reboot(2 * DAY)
    host.error_s = 400 * DAY
    clock = host.start(TRUE_S, None)
    for number in range(3):
        clock.hear(f"n{number}", f"b{number}", host.now_s)
    clock.hear("liar", "b9", host.wall())
    assert off_by(clock, host) == 0.0


def test_the_own_host_confirms_nothing_and_alone_it_is_believed_for_a_month() -> None:
    for away_s, believed in ((ALONE_AWAY_S_MAX / 2, True), (ALONE_AWAY_S_MAX * 2, False)):
        host = Host()
        host.reboot(away_s)
        clock = host.start(TRUE_S, None)
        assert not clock.hear("n1", host.boot, host.wall())
        assert off_by(clock, host) == -away_s
        host.wait(CONFIRM_S + 1.0)
        assert clock.hear("n1", host.boot, host.wall()) is believed
        assert off_by(clock, host) == (0.0 if believed else -away_s)


def test_a_virtual_machine_that_slept_unseen_by_its_counter_catches_up_when_others_confirm_it() -> None:
    host = Host()
    before = host.start(0.0, None)
    host.now_s += 2 * DAY
    clock = host.start(before(), before.anchor)
    assert off_by(clock, host) == -2 * DAY
    assert clock.hear("n1", "b1", host.now_s)
    assert off_by(clock, host) == 0.0


def test_a_clock_that_no_host_advises_goes_on_over_a_restart_and_believes_the_wall_clock_in_another_boot() -> None:
    host = Host()

    def start(last_s: float, anchor: Anchor | None) -> ResumedClock:
        return ResumedClock(last_s, anchor, wall=host.wall, counter=lambda: host.up_s, boot=host.boot)

    before = start(0.0, None)
    for error_s in (400 * DAY, -400 * DAY):
        host.wait(500.0)
        host.error_s = error_s
        assert start(before() - 100.0, before.anchor)() == host.now_s
    assert start(0.0, None)() == host.wall(), "without a record there is the wall clock alone"
    host.error_s = 0.0
    host.reboot(40 * DAY)
    after = start(TRUE_S, before.anchor)
    host.wait(5.0)
    assert after() == host.now_s
    host.error_s = -80 * DAY
    assert start(after(), before.anchor)() == after(), "time does not go back"
