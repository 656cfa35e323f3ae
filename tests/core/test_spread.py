"""What is left of a search is told by the spread of its own jobs' times, and of its owner's apps before."""

from __future__ import annotations

import math
from itertools import combinations
from statistics import fmean

import pytest
from msgspec.structs import replace

from app_agent.core import estimates
from app_agent.core.host import AppHost
from app_agent.core.spread import DEGREES_MAX, GUESS, Spread, deviation, joined, normal_scores, of_some, spread_of
from protocol.codec import decode, encode
from protocol.core import Received
from protocol.messages import ARBITER, SECONDS_MAX, AppId, Holdings, OwnerId, Party
from tests.core.test_app_host import submit
from tests.support.app_harness import Bench, exited, status, terms

GPUS = "n1g0 n1g1 n1g2 n1g3"
TRIALS = tuple(("python", "train.py", str(number)) for number in range(4))


def search(*times_s: float) -> Bench:
    """Four trials of 10, 20 and 40 steps, of which the first ones have made five and were measured."""
    bench = Bench(trials=TRIALS, metric="accuracy", steps_total=70)
    bench.grant(GPUS)
    told = (
        status(f"ada-1.{number}-a0", f"n1g{number}", step=4, step_s=time_s, metrics={"accuracy": 0.1})
        for number, time_s in enumerate(times_s)
    )
    bench.holdings(GPUS, *told)
    bench.tick()
    return bench


def test_one_draw_is_expected_in_the_middle_and_the_greatest_of_ten_far_above() -> None:
    assert normal_scores(1) == (0.0,)
    assert normal_scores(0) == ()
    assert normal_scores(10)[0] == pytest.approx(1.5388, abs=0.01)  # Harter (1961), expected normal order statistics
    assert math.fsum(normal_scores(7)) == pytest.approx(0.0, abs=1e-12)


def test_the_spread_is_a_guess_until_it_is_measured() -> None:
    assert deviation(Spread(), Spread()) == GUESS
    wide, narrow = spread_of([1.0, 10.0] * 50), spread_of([1.0] * 50)
    assert deviation(wide, Spread()) == 1.0
    assert deviation(narrow, Spread()) < 0.11
    assert deviation(Spread(), narrow) < 0.11, "its owner's other apps stand for one that is not measured"
    assert deviation(wide, narrow) == 1.0, "its own jobs count more"
    assert spread_of([3.0]) == Spread(), "one job has no spread"


def test_an_owners_newest_apps_count_most() -> None:
    known = Spread()
    for _ in range(100):
        known = joined(known, spread_of([1.0] * 10))
    assert known.degrees == DEGREES_MAX
    for _ in range(100):
        known = joined(known, spread_of([1.0, 3.0] * 5))
    assert deviation(Spread(), known) == pytest.approx(math.log(3) / 2 * math.sqrt(10 / 9), rel=0.05)


def test_one_odd_search_does_not_speak_for_all_that_follow() -> None:
    odd = joined(Spread(), spread_of([1e-6, 1.0]))
    assert deviation(Spread(), odd) < 1.0
    assert deviation(spread_of([1e-6, 1.0] * 4), Spread()) == 1.0


def test_what_is_left_of_a_search_can_be_told_however_long_it_is() -> None:
    trials = tuple(("python", "train.py", str(number)) for number in range(512))
    bench = Bench(trials=trials, metric="accuracy", steps_total=10**9, step_serial_s=1e6)
    bench.holdings()
    bench.tick()
    assert (bench.report.left_s, bench.report.left_gpu_s) == (SECONDS_MAX, SECONDS_MAX)
    assert bench.report.ideal_s == SECONDS_MAX
    decode(encode(bench.report, sender=Party("app", "ada"), id="m1"))


def test_jobs_as_long_as_each_other_leave_what_eq_2_says() -> None:
    # The first phase is measured; then come two trials of 20 steps, and one of 40.
    report = search(2.0, 2.0, 2.0, 2.0).report
    assert report.left_s == pytest.approx(5 * 2.0 + 20 * 2.0 + 40 * 2.0)
    assert report.left_gpu_s == pytest.approx(20 * 2.0 + 40 * 2.0 + 40 * 2.0)


def test_phases_to_come_take_as_long_as_the_trials_that_are_left_not_known_which() -> None:
    """Of the six pairs of 1, 1, 4 and 4 s, five have one of 4 s; and so has every second single trial."""
    report = search(1.0, 1.0, 4.0, 4.0).report
    assert report.left_s == pytest.approx(5 * 4.0 + 20 * (5 * 4.0 + 1.0) / 6 + 40 * 2.5)
    assert report.left_gpu_s == pytest.approx(5 * 10.0 + 20 * 2 * 2.5 + 40 * 2.5)


@pytest.mark.parametrize("count", range(1, 6))
def test_the_longest_of_some_is_the_mean_over_all_ways_to_choose_them(count: int) -> None:
    times_s = [3.0, 1.0, 16.0, 2.0, 8.0]
    longest_s = fmean(max(some) for some in combinations(times_s, count))
    likely_s = of_some(times_s, count)
    assert likely_s[0] == pytest.approx(longest_s)
    assert math.fsum(likely_s) == pytest.approx(count * 6.0)


def test_where_fewer_trials_are_left_than_have_room_each_counts_once() -> None:
    assert of_some([2.0, 4.0], 3) == [4.0, 2.0]
    assert of_some([], 3) == []


def test_trials_that_were_dropped_say_nothing_of_phases_to_come() -> None:
    bench = search(1.0, 1.0, 4.0, 4.0)
    state = bench.agent.state
    state.search = replace(state.search, survivors=(2, 3), phase=1)
    left_s, _ = estimates.left_s(bench.agent.app)
    assert left_s == pytest.approx((20 + 5) * 4.0 + 40 * 4.0)


def test_a_trial_that_is_not_measured_may_be_slower_than_those_that_are() -> None:
    two, four = search(2.0, 2.0), search(2.0, 2.0, 2.0, 2.0)
    assert two.report.left_s is not None
    assert four.report.left_s is not None
    assert two.report.left_s > four.report.left_s + 10 * 2.0 * (math.exp(0.2) - 1)


def test_bids_take_the_median_jobs_time_as_eq_2_does() -> None:
    works_s = estimates.works_s(search(1.0, 1.0, 4.0, 4.0).agent.app)
    assert works_s[1:] == ((50.0, 50.0), (100.0,))


def test_an_owners_next_app_begins_with_the_spread_of_those_that_are_over() -> None:
    host = AppHost(OwnerId("ada"), tenant="team-a", beat_s=2.0)
    app = submit(host, trials=TRIALS, metric="accuracy", steps_total=70)
    held = tuple(terms(gpu) for gpu in GPUS.split())
    for phase, step in (("running", 5), ("exited", 69)):
        tasks = tuple(
            (exited if phase == "exited" else status)(
                f"{app}.{number}-a0",
                f"n1g{number}",
                *(["finished"] if phase == "exited" else []),
                step=step,
                step_s=time_s,
                metrics={"accuracy": 0.1 * number},
            )
            for number, time_s in enumerate((1.0, 1.0, 10.0, 10.0))
        )
        host.handle(Received(ARBITER, Holdings(app, 1, 1 + step, held, tasks)), 1.0 + step)
        for later in range(5):
            host.handle(Received(ARBITER, Holdings(app, 1, 2 + step + later, held, tasks)), 2.0 + step + later)
    assert host.state.records[app].state == "finished"
    measured = host.state.spread
    assert measured.degrees > 0
    following = submit(host, now=200.0, trials=TRIALS, metric="accuracy", steps_total=70)
    assert host.state.apps[AppId(following)].spread_before == measured
    assert host.state.apps[AppId(app)].spread_before == Spread()
    assert AppHost.restore(host.snapshot()).state.spread == measured
