"""The policies without an auction: rounds worked out by hand, and any round against a count without placement."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from arbiter.core.placement.assignment import admit_what_fits
from arbiter.core.policies.common.ordered import Ranked
from arbiter.core.policies.maxmin.policy import outlook_of
from arbiter.core.policies.queues.las import Settings
from arbiter.core.registry import POLICIES
from arbiter.core.seam import Allocation, AppView, GpuView, Outcome, View
from protocol.messages import LEVELS, AppId, GpuId, NodeId, Requirements, TenantId, locality
from tests.core.test_policies import settled
from tests.support.auctions import app_of, gpus_of, view_of
from tests.support.effort import examples
from tests.support.wishes import replace

ORDERED = sorted(name for name, entry in POLICIES.items() if not entry.kind.traits.probes)
#: Those that walk the apps in an order of their own, and place all but holes in the end (`ranking`).
RANKED = [name for name in ORDERED if issubclass(POLICIES[name].kind, Ranked)]
LASTING, REVOCABLE, LEASE = (
    [name for name in ORDERED if POLICIES[name].kind.traits.tenure == tenure]
    for tenure in ("lasting", "revocable", "lease")
)

ordered = pytest.mark.parametrize("name", ORDERED)


def names(gpus: Sequence[GpuView]) -> tuple[GpuId, ...]:
    return tuple(gpu.gpu for gpu in gpus)


def job(
    name: str, gang: int = 1, *, left_s: float | None = None, held: Sequence[GpuView] = (), **more: object
) -> AppView:
    """An app of one rigid job that may lie anywhere; it has held `held` since time 0."""
    app = app_of(name, gang=gang, demand_max=gang, renewable=names(held))
    app = replace(
        app, spans=True, left_s=left_s, left_gpu_s=None if left_s is None else left_s * gang, leases=len(held)
    )
    return replace(app, **more)


def round_of(gpus: Sequence[GpuView], *apps: AppView, now: float = 0.0) -> View:
    """A round at `now` in which everything is in play; the apps arrived in this order."""
    holder = {gpu: app.app for app in apps for gpu in app.renewable}
    arrived = [replace(app, arrived_at=float(place)) for place, app in enumerate(apps)]
    view = view_of([replace(gpu, holder=holder.get(gpu.gpu)) for gpu in gpus], arrived)
    return replace(view, now=now, cluster_gpus=len(gpus))


def decided(name: str, view: View, **knobs: object) -> tuple[Allocation, dict[str, Outcome]]:
    allocation = POLICIES[name].made(**knobs).allocate(view, {})  # type: ignore[arg-type]
    return allocation, settled(view, allocation)


def counts(name: str, view: View) -> dict[str, int]:
    """How many of the GPUs in play each app has after the round."""
    return {app: len(outcome.gpus) for app, outcome in decided(name, view)[1].items()}


# --- who keeps GPUs how long ----------------------------------------------------------------------------------------


@ordered
def test_nobody_bids(name: str) -> None:
    assert POLICIES[name].made().bidders(round_of(gpus_of(1), job("a"))) == ()


# --- fifo and backfill ----------------------------------------------------------------------------------------------


def test_fifo_stops_at_the_first_that_does_not_fit_and_backfill_goes_on() -> None:
    view = round_of(gpus_of(2, 2), job("a", 3), job("b", 2), job("c", 1), job("d", 1))
    assert counts("fifo", view) == {"a": 3, "b": 0, "c": 0, "d": 0}
    assert counts("backfill", view) == {"a": 3, "b": 0, "c": 1, "d": 0}


def test_backfill_says_why_one_waits_and_another_does_not() -> None:
    view = round_of(gpus_of(2, 2), job("a", 3), job("b", 2), job("c", 1), job("d", 1))
    _, outcomes = decided("backfill", view)
    assert outcomes["b"].reason == "number 2 in order of arrival: it needs a gang of 2, and 1 GPU is left"
    assert outcomes["c"].reason == "number 3 in order of arrival: gets 1 GPU"
    assert outcomes["d"].reason == (
        "number 4 in order of arrival: nothing is left of the GPUs in play, which went to a (3), c (1)"
    )


def test_backfill_counts_holes_for_gangs_that_lie_on_one_machine() -> None:
    gang = app_of("a", gang=3, demand_max=3)
    _, outcomes = decided("backfill", round_of(gpus_of(2, 2), gang, job("b", 3)))
    assert (len(outcomes["a"].gpus), len(outcomes["b"].gpus)) == (0, 3)
    assert outcomes["a"].reason.endswith("it needs a gang of 3 on one node, and the largest hole is 2")


@pytest.mark.parametrize("name", LASTING)
def test_an_elastic_app_gets_all_the_whole_gangs_that_it_can_use(name: str) -> None:
    view = round_of(gpus_of(4, 3), app_of("a", gang=2, demand_max=7), job("b"))
    assert counts(name, view) == {"a": 6, "b": 1}


# --- srtf and srsf --------------------------------------------------------------------------------------------------


def test_srtf_serves_the_shortest_and_srsf_the_smallest() -> None:
    view = round_of(
        gpus_of(4), job("wide", 4, left_s=10.0), job("thin", 1, left_s=30.0), job("thinner", 1, left_s=31.0)
    )
    assert counts("srtf", view) == {"wide": 4, "thin": 0, "thinner": 0}
    assert counts("srsf", view) == {"wide": 0, "thin": 1, "thinner": 1}


@pytest.mark.parametrize("name", ["srtf", "srsf"])
def test_equal_ones_are_served_as_they_arrived_and_who_does_not_know_last(name: str) -> None:
    apps = [job("x"), job("c", left_s=5.0), job("b", left_s=5.0), job("a", left_s=5.0)]
    assert counts(name, round_of(gpus_of(2), *apps)) == {"x": 0, "c": 1, "b": 1, "a": 0}
    assert counts(name, round_of(gpus_of(4), *apps)) == {"x": 1, "c": 1, "b": 1, "a": 1}


def test_a_shorter_newcomer_takes_the_gpus_of_a_longer_holder_and_only_those() -> None:
    gpus = gpus_of(2, 1)
    long, short = job("long", 2, left_s=90.0, held=gpus[:2]), job("short", left_s=10.0, held=gpus[2:])
    view = round_of(gpus, long, short, job("new", left_s=50.0))
    allocation, outcomes = decided("srtf", view)
    assert allocation.unnamed == "holder"
    assert allocation.assign == {gpus[0].gpu: "new"}
    assert allocation.freed == (gpus[1].gpu,)
    assert outcomes["short"].gpus == (gpus[2].gpu,)
    assert outcomes["long"].reason == (
        "number 3 by run time left (90 s): it needs a gang of 2, and 1 GPU is left; "
        "of the GPUs it held, 1 went to new (1) and 1 stays free"
    )


def test_what_has_run_since_it_was_reported_is_taken_off() -> None:
    gpus = gpus_of(1)
    holder = job("holder", left_s=100.0, held=gpus)
    rival = job("rival", left_s=40.0)
    assert counts("srtf", round_of(gpus, holder, rival, now=59.0)) == {"holder": 0, "rival": 1}
    assert counts("srtf", round_of(gpus, holder, rival, now=61.0)) == {"holder": 1, "rival": 0}
    assert counts("srsf", round_of(gpus, holder, rival, now=59.0)) == {"holder": 0, "rival": 1}
    assert counts("srsf", round_of(gpus, holder, rival, now=61.0)) == {"holder": 1, "rival": 0}


def test_nobody_waits_for_one_that_does_not_fit() -> None:
    view = round_of(gpus_of(3), job("a", 2, left_s=1.0), job("b", 2, left_s=2.0), job("c", 1, left_s=3.0))
    assert counts("srtf", view) == {"a": 2, "b": 0, "c": 1}


# --- las ------------------------------------------------------------------------------------------------------------


def test_las_serves_the_first_queue_then_the_second_each_as_they_arrived() -> None:
    apps = [
        job("old", served_gpu_s=50.0),
        job("older", served_gpu_s=99.0),
        job("new"),
        job("newest", served_gpu_s=49.0),
    ]
    for free, served in ((1, {"new"}), (2, {"new", "newest"}), (3, {"new", "newest", "old"})):
        view = round_of(gpus_of(free), *apps)
        _, outcomes = decided("las", view, threshold_gpu_s=50.0)
        assert {app for app, outcome in outcomes.items() if outcome.gpus} == served
    assert outcomes["older"].reason.startswith(
        "number 4 by queue, then arrival (second queue, 99 GPU-s so far): nothing"
    )


def test_las_looks_again_when_the_next_running_app_is_demoted() -> None:
    gpus = gpus_of(4)
    two = job("two", 2, held=gpus[:2])  # 2 * 10 GPU-s of 100: 40 s to go
    one = job("one", served_gpu_s=75.0)  # 25 s to go, once it runs
    done = job("done", held=gpus[2:3], served_gpu_s=90.0)  # 100 of 100: in the second queue
    view = round_of(gpus, two, one, done, now=10.0)
    assert decided("las", view, threshold_gpu_s=100.0)[0].look_again_s == pytest.approx(25.0)
    view = round_of(gpus, two, done, now=10.0)
    assert decided("las", view, threshold_gpu_s=100.0)[0].look_again_s == pytest.approx(40.0)
    assert decided("las", round_of(gpus, done, now=10.0), threshold_gpu_s=100.0)[0].look_again_s is None


@pytest.mark.parametrize("part", range(1, 12))
def test_at_the_time_that_las_named_the_app_is_demoted_whatever_the_sums_round(part: int) -> None:
    gpus = gpus_of(3)
    start = 1.7e9 + part / 13
    holder = replace(job("holder", 3, held=gpus, served_gpu_s=0.1), granted_sum=3 * start)
    view = round_of(gpus, holder, job("rival", 3), now=start + 1.0)
    allocation, _ = decided("las", view, threshold_gpu_s=90.0)
    assert allocation.assign == {}
    assert allocation.look_again_s is not None
    later = replace(view, now=view.now + allocation.look_again_s)
    assert set(decided("las", later, threshold_gpu_s=90.0)[0].assign.values()) == {"rival"}


# --- drf ------------------------------------------------------------------------------------------------------------


def test_drf_serves_the_tenant_with_the_least_share_then_its_least_app() -> None:
    many = [app_of(f"m{index}", demand_max=9) for index in range(3)]
    lone = replace(app_of("lone", demand_max=9), tenant=TenantId("u"))
    # turns: m0, lone, m1, lone, m2, lone, m0
    assert counts("drf", round_of(gpus_of(7), *many, lone)) == {"m0": 2, "m1": 1, "m2": 1, "lone": 3}


def test_drf_counts_apps_that_have_all_they_want_and_are_not_shown() -> None:
    one, other = job("one", tenant="large"), job("other", tenant="small")
    view = round_of(gpus_of(1), one, other)
    assert counts("drf", view) == {"one": 1, "other": 0}
    assert counts("drf", replace(view, unseen={TenantId("large"): 2, TenantId("small"): 1})) == {"one": 0, "other": 1}


def test_drf_counts_what_apps_keep_and_gives_whole_gangs() -> None:
    elsewhere = gpus_of(4, first=9)
    rich = app_of("rich", demand_max=9, kept=elsewhere)
    poor = replace(app_of("poor", gang=2, demand_max=9), tenant=TenantId("u"))
    assert counts("drf", round_of(gpus_of(5), rich, poor)) == {"rich": 1, "poor": 4}


# --- optimus --------------------------------------------------------------------------------------------------------


def test_optimus_gives_the_next_gang_to_whom_it_saves_most_time() -> None:
    # savings of the 2nd, 3rd, 4th GPU: long 60, 20, 10; short 12, 4; wide, of 120 GPU-s in gangs of 2: 30 for 2
    long, short = app_of("long", demand_max=9), app_of("short", demand_max=9)
    wide = replace(app_of("wide", gang=2, demand_max=8), left_gpu_s=120.0)
    apps = [replace(short, left_gpu_s=24.0), replace(long, left_gpu_s=120.0), wide]
    for free, got in ((4, (1, 1, 2)), (5, (1, 2, 2)), (6, (1, 3, 2)), (8, (1, 3, 4)), (9, (2, 3, 4))):
        assert tuple(counts("optimus", round_of(gpus_of(free), *apps)).values()) == got


def test_optimus_lets_who_does_not_know_have_a_first_gang_before_anybody_has_a_second() -> None:
    apps = [replace(app_of("a", demand_max=9), left_gpu_s=1e9), app_of("b", demand_max=9)]
    assert counts("optimus", round_of(gpus_of(6), *apps)) == {"a": 5, "b": 1}


# --- slaq -----------------------------------------------------------------------------------------------------------


def test_slaq_gives_the_next_gang_to_whose_loss_it_lowers_most() -> None:
    # with 1, 2, 3, 4 of 4 GPUs the loss falls by 0.4, 2/3, 6/7, 1 of what it falls with all
    fast, slow = app_of("fast", demand_max=4), app_of("slow", demand_max=4)
    apps = [replace(slow, loss_drop=0.4), replace(fast, loss_drop=1.0)]
    # turns: fast 0.4, fast 0.267, fast 0.190, slow 0.16, fast 0.143, slow 0.107
    for free, got in ((1, (0, 1)), (3, (0, 3)), (4, (1, 3)), (5, (1, 4)), (6, (2, 4))):
        assert tuple(counts("slaq", round_of(gpus_of(free), *apps)).values()) == got


def test_slaq_compares_the_decrease_per_gpu() -> None:
    wide = replace(app_of("wide", gang=4, demand_max=4), loss_drop=1.0)
    thin = replace(app_of("thin", demand_max=1), loss_drop=0.3)
    assert counts("slaq", round_of(gpus_of(4), wide, thin)) == {"wide": 0, "thin": 1}


# --- gandiva-placement ----------------------------------------------------------------------------------------------


def test_gandiva_serves_by_turns_and_least_served_first() -> None:
    apps = [replace(app_of(f"a{index}", demand_max=3), served_gpu_s=9.0 - index) for index in range(3)]
    assert counts("gandiva-placement", round_of(gpus_of(4), *apps)) == {"a0": 1, "a1": 1, "a2": 2}


def test_gandiva_moves_an_app_that_could_lie_closer_together_and_no_other() -> None:
    gpus = gpus_of(2, 2, 2)
    apart = job("apart", 2, held=(gpus[0], gpus[2]), movable=True, move_s=10.0, left_s=101.0)
    together = job("together", 2, held=gpus[4:], movable=True)
    allocation, outcomes = decided("gandiva-placement", round_of(gpus, apart, together))
    assert outcomes["together"].gpus == names(gpus[4:])
    assert len({gpu.node for gpu in gpus if gpu.gpu in outcomes["apart"].gpus}) == 1
    assert outcomes["apart"].reason.endswith(
        "keeps the 1 GPU it holds and gets 1 GPU, to lie closer together; of the GPUs it held, 1 stays free"
    )
    assert set(allocation.assign) == set(outcomes["apart"].gpus) | set(outcomes["together"].gpus)


@pytest.mark.parametrize(
    ("changes", "moves"),
    [
        ({"left_s": 601.0}, True),
        ({"left_s": 600.0}, False),
        ({"left_s": 101.0, "move_s": 10.0}, True),
        ({"left_s": 601.0, "movable": False}, False),
        ({"served_gpu_s": 1201.0}, True),
        ({"served_gpu_s": 1200.0}, False),
    ],
)
@pytest.mark.parametrize("name", ["gandiva-placement", "astraea"])
def test_who_moves_loses_no_step_and_makes_up_for_it_soon(name: str, changes: dict[str, object], moves: bool) -> None:
    """Two GPUs on two machines; two are free on a third. A move costs a minute where nobody has measured it."""
    gpus = gpus_of(1, 1, 2)
    apart = job("apart", 2, held=gpus[:2], **{"movable": True, **changes})  # type: ignore[arg-type]
    outcome = decided(name, round_of(gpus, apart))[1]["apart"]
    assert outcome.gpus == names(gpus[2:] if moves else gpus[:2])
    assert ("to lie closer together" in outcome.reason) is moves


APART: dict[str, object] = {"movable": True, "left_s": 1e5}
MOVERS = pytest.mark.parametrize("name", ["gandiva-placement", "astraea"])


@MOVERS
def test_jobs_that_each_lie_together_are_let_be(name: str) -> None:
    gpus = gpus_of(2, 2, 4)
    jobs = (names(gpus[:2]), names(gpus[2:4]))
    pair = replace(job("pair", 2, held=gpus[:4], **APART), demand_max=4)  # type: ignore[arg-type]
    for app in (replace(pair, jobs=jobs), replace(pair, gang=1), replace(pair, spans=False)):
        assert decided(name, round_of(gpus, app))[1]["pair"].gpus == names(gpus[:4])
    crossed = replace(pair, jobs=(names(gpus[:3:2]), names(gpus[1:4:2])))
    assert decided(name, round_of(gpus, crossed))[1]["pair"].gpus == names(gpus[4:])


@MOVERS
def test_newcomers_have_what_is_free_before_those_that_move(name: str) -> None:
    gpus = gpus_of(1, 1, 2)
    apart = job("apart", 2, held=gpus[:2], **APART)  # type: ignore[arg-type]
    outcomes = decided(name, round_of(gpus, apart, job("new", 2)))[1]
    assert (outcomes["apart"].gpus, outcomes["new"].gpus) == (names(gpus[:2]), names(gpus[2:]))


@MOVERS
def test_nobody_moves_to_gpus_that_another_is_leaving(name: str) -> None:
    gpus = gpus_of(1, 1, 2, 2)
    first = job("first", 2, held=gpus[:3:2], **APART)  # type: ignore[arg-type]
    second = job("second", 2, held=gpus[1:4:2], **APART)  # type: ignore[arg-type]
    outcomes = decided(name, round_of(gpus, first, second))[1]
    assert (outcomes["first"].gpus, outcomes["second"].gpus) == (names(gpus[4:]), names(gpus[1:4:2]))


@MOVERS
def test_an_app_that_grows_moves_when_it_has_all_it_gets(name: str) -> None:
    gpus = gpus_of(1, 1, 2, 4)
    grows = replace(job("grows", 2, held=gpus[:2], **APART), demand_max=4)  # type: ignore[arg-type]
    outcome = decided(name, round_of(gpus, grows))[1]["grows"]
    assert set(names(gpus[:2])) < set(outcome.gpus)
    grown = replace(grows, renewable=outcome.gpus, leases=4)
    assert decided(name, round_of(gpus, grown))[1]["grows"].gpus == names(gpus[4:])


def test_gandiva_lets_an_app_be_that_cannot_lie_closer() -> None:
    gpus = gpus_of(1, 1, 1)
    apart = job("apart", 2, held=gpus[::2])
    assert decided("gandiva-placement", round_of(gpus, apart, job("b")))[1]["apart"].gpus == names(gpus[::2])


def test_gandiva_packs_a_newcomer_into_the_tightest_hole() -> None:
    gpus = gpus_of(4, 2, 3)
    _, outcomes = decided("gandiva-placement", round_of(gpus, job("a", 2)))
    assert outcomes["a"].gpus == names(gpus[4:6])


# --- which GPUs -----------------------------------------------------------------------------------------------------


@ordered
def test_a_gang_that_spans_gets_the_gpus_that_are_left_wherever_they_are(name: str) -> None:
    _, outcomes = decided(name, round_of(gpus_of(1, 1, 2), job("a", 4)))
    assert len(outcomes["a"].gpus) == 4


@ordered
def test_one_machine_that_holds_all_goes_before_several(name: str) -> None:
    gpus = gpus_of(1, 4, 3)
    _, outcomes = decided(name, round_of(gpus, job("a", 3)))
    assert outcomes["a"].gpus == names(gpus[5:])


@ordered
def test_a_gang_on_several_machines_lies_in_one_rack_that_holds_it(name: str) -> None:
    gpus = gpus_of(4, 3, 2, 2, racks=2)  # racks of 4 + 2 and 3 + 2
    _, outcomes = decided(name, round_of(gpus, job("a", 5)))
    assert outcomes["a"].gpus == names([gpu for gpu in gpus if gpu.rack == "r1"])


def test_one_machine_goes_before_several_even_if_somebody_must_leave_it_first() -> None:
    gpus = gpus_of(1, 3, 1)
    view = round_of(gpus, job("long", 3, left_s=9.0, held=gpus[1:4]), job("new", 3, left_s=1.0))
    _, outcomes = decided("srtf", view)
    assert outcomes["new"].gpus == names(gpus[1:4])


def test_an_incumbent_that_still_fits_keeps_its_machine_and_the_newcomer_gets_what_is_left() -> None:
    gpus = gpus_of(1, 2, 1)
    view = round_of(gpus, job("long", 2, left_s=9.0, held=gpus[1:3]), job("new", 2, left_s=1.0))
    allocation, _ = decided("srtf", view)
    assert allocation.assign == dict.fromkeys(names((gpus[0], gpus[3])), "new")
    assert allocation.freed == ()


@pytest.mark.parametrize("name", RANKED)  # others place one gang after the other
def test_a_newcomer_that_spans_leaves_the_hole_to_one_that_needs_it(name: str) -> None:
    view = round_of(gpus_of(2, 1, 1), job("spans", 2), app_of("hole", gang=2, demand_max=2))
    assert counts(name, view) == {"spans": 2, "hole": 2}


@ordered
def test_levels_bound_all_that_an_app_has(name: str) -> None:
    gpus = gpus_of(2, 2, 2, racks=2)
    rack = replace(job("rack", 3), level_max="rack")
    machine = replace(app_of("machine", gang=2, demand_max=4), level_max="machine")
    _, outcomes = decided(name, round_of(gpus, rack))
    assert locality(gpu for gpu in gpus if gpu.gpu in outcomes["rack"].gpus) == "rack"
    assert counts(name, round_of(gpus, machine)) == {"machine": 2}


@ordered
def test_a_parked_app_gets_the_very_gpus_that_it_can_use_or_none(name: str) -> None:
    gpus = gpus_of(4)
    parked = replace(job("parked", 2), only=names(gpus[2:]))
    assert decided(name, round_of(gpus, parked))[1]["parked"].gpus == names(gpus[2:])
    _, outcomes = decided(name, round_of(gpus[:2], parked))
    assert outcomes["parked"].reason.endswith(
        "none of the 2 GPUs left is one it can use (its parked jobs cannot move there)"
    )


@pytest.mark.parametrize("name", ["fifo", "fitgpp", "lrtp", "rand"])
@pytest.mark.parametrize("aside", [True, False])
def test_a_parked_app_whose_gpu_is_set_aside_for_one_before_it_lets_others_have_the_rest(
    name: str, aside: bool
) -> None:
    """World 1817013757: they waited behind it for ever, with GPUs idle on which it could not go on.

    Otherwise it waits for GPUs that others have, and no app behind it goes before it.
    """
    gpus = gpus_of(2, 2)
    before = replace(app_of("before", gang=2, demand_max=2), only=names(gpus[:2]), by_kind=True)
    parked = replace(app_of("parked", gang=2, demand_max=2), only=names(gpus[1:3]))
    view = round_of(gpus[1:], *[before] * aside, parked, job("next", 1), job("last", 1))
    allocation, outcomes = decided(name, view)
    assert outcomes["parked"].gpus == ()
    assert outcomes["next"].gpus == (names(gpus[3:]) if aside else ()), "what it waits for is set aside, too"
    assert outcomes["last"].gpus == ()
    assert allocation.freed == ()


def one_machine(name: str, gang: int, left_s: float, held: Sequence[GpuView] = ()) -> AppView:
    return replace(job(name, gang, left_s=left_s, held=held), spans=False)


def test_who_needs_a_hole_takes_it_from_the_last_in_the_order() -> None:
    gpus = gpus_of(2, 2, 2)
    apps = [one_machine(name, 2, left, gpus[at : at + 2]) for name, left, at in (("a", 8, 0), ("b", 9, 2), ("c", 7, 4))]
    allocation, outcomes = decided("srtf", round_of(gpus, *apps, one_machine("new", 2, 1.0)))
    assert allocation.assign == dict.fromkeys(names(gpus[2:4]), "new")
    assert outcomes["b"].reason.endswith("of the GPUs it held, 2 went to new (2)")


@pytest.mark.parametrize("spans", [False, True])
def test_who_needs_a_hole_takes_it_from_one_that_cannot_go_on_anyway(spans: bool) -> None:
    gpus = gpus_of(2, 2)
    broken = replace(one_machine("broken", 5, 1.0, gpus[:2]), spans=spans)
    whole = one_machine("whole", 2, 3.0, gpus[2:])
    allocation, _ = decided("srtf", round_of(gpus, broken, one_machine("new", 2, 2.0), whole))
    assert allocation.assign == dict.fromkeys(names(gpus[:2]), "new")


def test_who_lost_its_place_moves_where_there_is_room() -> None:
    gpus = gpus_of(4, 2)
    small = one_machine("small", 1, 5.0, gpus[:1])
    view = round_of(gpus, small, one_machine("large", 4, 1.0))
    _, outcomes = decided("srtf", view)
    assert outcomes["large"].gpus == names(gpus[:4])
    assert outcomes["small"].gpus in (names(gpus[4:5]), names(gpus[5:]))
    spanning = round_of(gpus, replace(small, spans=True), one_machine("large", 4, 1.0))
    assert counts("srtf", spanning) == {"small": 1, "large": 4}


def test_an_app_that_shrinks_keeps_the_machine_where_it_has_most() -> None:
    gpus = gpus_of(1, 3)
    shrunk = replace(app_of("a", demand_max=2, renewable=names(gpus)), leases=4)
    allocation, outcomes = decided("las", round_of(gpus, shrunk))
    assert outcomes["a"].gpus == names(gpus[1:3])
    assert allocation.freed == names((gpus[0], gpus[3]))


def test_an_app_that_shrinks_keeps_jobs_whole() -> None:
    gpus = gpus_of(2, 2, 2)
    pairs = (gpus[0], gpus[2]), (gpus[1], gpus[4]), (gpus[3], gpus[5])
    shrunk = replace(app_of("a", gang=2, demand_max=4, renewable=names(gpus)), leases=6, spans=True)
    shrunk = replace(shrunk, jobs=tuple(map(names, pairs)))
    allocation, _ = decided("las", round_of(gpus, shrunk))
    assert allocation.freed == names(pairs[2])
    # The third job has another GPU whose lease does not end now; it would stop without this one.
    (other,) = gpus_of(1, first=5)
    bound = replace(shrunk, demand_max=3, gang=1, kept=(other,), renewable=names(gpus[2:]))
    bound = replace(bound, jobs=(names(gpus[2:4]), names(gpus[4:5]), (other.gpu, gpus[5].gpu)))
    allocation, _ = decided("las", round_of(gpus[2:], bound))
    assert allocation.freed == names(gpus[3:5])


def test_an_app_that_shrinks_gives_up_the_rest_of_a_job_that_has_lost_a_gpu() -> None:
    gpus = gpus_of(1, 1, 1, 1, 1)
    lost, first, second = GpuId("lost"), names(gpus[1:3]), names(gpus[3:])
    shrunk = replace(app_of("a", demand_max=4, renewable=names(gpus)), leases=5, spans=True)
    shrunk = replace(shrunk, jobs=((lost, gpus[0].gpu), first, second))
    allocation, _ = decided("las", round_of(gpus, shrunk))
    assert allocation.freed == names(gpus[:1])


@pytest.mark.parametrize(
    ("sizes", "first", "second"),
    [
        pytest.param((2, 2), (0, 1), (2, 3), id="equal ones by number"),
        pytest.param((1, 1, 3), (0,), (2,), id="the one on the node where the app has most"),
    ],
)
def test_an_app_that_shrinks_keeps_the_job_that_lies_best(
    sizes: tuple[int, ...], first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    gpus = gpus_of(*sizes)
    others = (names([gpu]) for gpu in gpus[4:])
    jobs = (names([gpus[place] for place in first]), names([gpus[place] for place in second]), *others)
    held = [gpu for gpu in gpus if any(gpu.gpu in each for each in jobs)]
    shrunk = replace(
        app_of("a", demand_max=len(second), renewable=names(held)), leases=len(held), spans=True, jobs=jobs
    )
    outcomes = decided("las", round_of(gpus, shrunk))[1]
    assert outcomes["a"].gpus == jobs[0 if sizes == (2, 2) else 1]


def test_an_app_that_shrinks_keeps_a_job_that_lies_together_before_one_on_its_fullest_node() -> None:
    gpus = gpus_of(3, 1, 2)
    jobs = (names((gpus[0], gpus[3])), names(gpus[1:2]), names(gpus[2:3]), names(gpus[4:]))
    shrunk = replace(app_of("a", demand_max=4, renewable=names(gpus)), leases=6, spans=True, jobs=jobs)
    allocation, _ = decided("las", round_of(gpus, shrunk))
    assert allocation.freed == jobs[0]


def test_an_app_whose_job_is_leaving_keeps_gpus_that_lie_close_together() -> None:
    gpus = gpus_of(1, 1, 1, racks=2)  # the first and the third are of one rack
    shrunk = replace(app_of("a", gang=2, demand_max=2, renewable=names(gpus)), leases=3, spans=True, jobs=((),))
    allocation, _ = decided("las", round_of(gpus, shrunk))
    assert allocation.freed == names(gpus[1:2])


def test_gpus_of_an_app_that_takes_no_part_are_freed() -> None:
    gpus = gpus_of(3)
    view = round_of(gpus, job("a"))
    view = replace(view, gpus=tuple(replace(gpu, holder=AppId("silent")) for gpu in view.gpus))
    allocation, _ = decided("srtf", view)
    assert len(allocation.assign) == 1
    assert sorted([*allocation.assign, *allocation.freed]) == sorted(names(gpus))


# --- reasons --------------------------------------------------------------------------------------------------------


@ordered
def test_in_large_rounds_only_those_whose_holding_changes_are_told_one_by_one(name: str) -> None:
    gpus = gpus_of(3)
    apps = [job("a", held=gpus[:1], left_s=1.0), job("b", left_s=2.0), job("c", 2, left_s=3.0), job("d", 2, left_s=4.0)]
    view = round_of(gpus, *(replace(app, loss_drop=1.0 / place) for place, app in enumerate(apps, start=1)))
    policy = POLICIES[name].made()
    full = policy.allocate(view, {})
    allocation = policy.allocate(replace(view, tells=False), {})
    changed = {outcome.app for outcome in full.outcomes if set(outcome.gpus) - {"g00-00"}}
    assert {outcome.app for outcome in allocation.outcomes} == changed | ({"a"} if "a" in changed else set())
    assert [outcome.app for outcome in full.outcomes] == ["a", "b", "c", "d"]
    assert (allocation.assign, allocation.freed) == (full.assign, full.freed)
    assert "waits" in allocation.rest
    assert full.rest == ""


@pytest.mark.parametrize("threshold", [0.0, -1.0, math.nan, math.inf])
def test_a_threshold_out_of_range_is_named(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"threshold_gpu_s is .*; it must be a finite number above 0"):
        Settings(threshold_gpu_s=threshold)


@pytest.mark.parametrize(
    ("app", "mend"),
    [
        (job("a", 7), "a needs a gang of 7 GPUs, the cluster has 6; ask for at most 6 with --gpus"),
        (replace(job("a", 7), level_max="rack"), "a needs a gang of 7 GPUs in one rack, the largest rack has 4"),
        (app_of("a", gang=3, level_max="slot"), "a needs a gang of 3 GPUs on one slot, the largest slot has 2"),
    ],
)
def test_a_gang_is_refused_by_the_place_that_must_hold_it(app: AppView, mend: str) -> None:
    cluster = gpus_of(2, 2, 2, racks=2)
    admission = admit_what_fits(cluster, app)
    assert not admission.admitted
    assert mend in admission.reason
    fits = replace(app, gang=int(admission.reason.split("at most ")[1].split()[0]))
    assert admit_what_fits(cluster, fits).admitted


# --- any round ------------------------------------------------------------------------------------------------------


@st.composite
def rounds(draw: st.DrawFn, *, counted: bool) -> View:
    """Any round; if `counted`, of apps that lie anywhere and hold whole gangs, where counting GPUs says it all."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    cluster = list(gpus_of(*sizes, slots=draw(st.integers(1, 2)), racks=draw(st.integers(1, 2))))
    pool = draw(st.permutations(cluster))
    apps = []
    for index in range(draw(st.integers(1, 6))):
        gang = draw(st.integers(1, 3))
        demand = gang * draw(st.integers(1, 3))
        have = min(gang * draw(st.integers(0, demand // gang)), len(pool)) // gang * gang
        if not counted:
            have = min(draw(st.integers(0, 3)), len(pool))
            demand = draw(st.integers(0, 7))
        held, pool = pool[:have], pool[have:]
        in_play = 0 if not counted and draw(st.booleans()) else have
        app = AppView(
            app=AppId(f"o-{index}"),
            tenant=TenantId(draw(st.sampled_from("tu"))),
            gang=gang,
            demand_max=demand,
            level_max="cluster" if counted else draw(st.sampled_from(LEVELS)),
            arrived_at=float(index),
            kept=tuple(held[in_play:]),
            renewable=names(held[:in_play]),
            only=None if counted else draw(st.none() | st.none() | st.just(names(cluster[::2]))),
            requirements=Requirements(spans=counted or draw(st.booleans())),
            left_s=draw(st.none() | st.sampled_from([1.0, 2.0, 3.0])),
            movable=draw(st.booleans()),
            move_s=draw(st.sampled_from([0.0, 0.05])),
            left_gpu_s=draw(st.none() | st.sampled_from([1.0, 2.0, 3.0])),
            loss_drop=draw(st.sampled_from([0.0, 0.5, 1.0])),
            served_gpu_s=draw(st.sampled_from([0.0, 3000.0, 4000.0])),
            leases=have,
        )
        apps.append(app)
    kept = {gpu.gpu for app in apps for gpu in app.kept}
    holder = {gpu: app.app for app in apps for gpu in app.renewable}
    gpus = [replace(gpu, holder=holder.get(gpu.gpu)) for gpu in cluster if gpu.gpu not in kept]
    return replace(view_of(gpus, apps), now=draw(st.sampled_from([0.0, 0.5])), cluster_gpus=len(cluster))


@ordered
@given(view=rounds(counted=False))
@settings(max_examples=examples(300), deadline=None)
def test_no_gpu_goes_to_two_no_gang_is_broken_and_nobody_gets_more_than_it_wants(name: str, view: View) -> None:
    decided(name, view)


def walked(view: View, order: Sequence[AppView], *, strict: bool = False, keeps: bool = False) -> dict[str, int]:
    """Who has how many GPUs, by counting alone: each app in turn as many whole gangs as are left."""
    got = {app.app: len(app.renewable) if keeps else 0 for app in view.apps}
    left = len(view.gpus) - sum(got.values())
    for app in order:
        more = min(left, app.demand_max - got[app.app]) // app.gang * app.gang
        got[app.app] += more
        left -= more
        if strict and not got[app.app]:
            break
    return {str(app): count for app, count in got.items()}


def dealt(view: View, need: Callable[[AppView, Counter[AppId]], object], *, keeps: bool = False) -> dict[str, int]:
    """Who has how many GPUs, by counting alone: one gang at a time to the app of the least need that it still fits."""
    got: Counter[AppId] = Counter({app.app: len(app.renewable) if keeps else 0 for app in view.apps})
    while True:
        left = len(view.gpus) - got.total()
        able = [app for app in view.apps if got[app.app] + app.gang <= app.demand_max and app.gang <= left]
        if not able:
            return {str(app): count for app, count in got.items()}
        least = min(able, key=lambda app: (need(app, got), app.arrived_at))  # type: ignore[arg-type,return-value]
        got[least.app] += least.gang


def unknown_last(value: float | None) -> float:
    return math.inf if value is None else value


def tenant_share(view: View, app: AppView, got: Counter[AppId]) -> int:
    return sum(got[other.app] for other in view.apps if other.tenant == app.tenant)


def saved(view: View, app: AppView, has: int) -> float:
    left = view.left_gpu_s(app) or 0.0
    return math.inf if not has else (left / has - left / (has + app.gang)) / app.gang


def lowered(app: AppView, has: int) -> float:
    before, after = (min(1.0, n / app.demand_max) for n in (has, has + app.gang))
    return app.loss_drop * (2 * after / (1 + after) - 2 * before / (1 + before)) / app.gang


def within_whole_quotas(view: View) -> dict[str, int]:
    """As `walked`, each tenant blocked by its first that gets nothing; without terms a quota is the cluster."""
    got = {app.app: len(app.renewable) for app in view.apps}
    left = len(view.gpus) - sum(got.values())
    blocked = set()
    for app in view.apps:
        if app.tenant not in blocked:
            more = min(left, app.demand_max - got[app.app]) // app.gang * app.gang
            got[app.app] += more
            left -= more
            blocked |= set() if got[app.app] else {app.tenant}
    return {str(app): count for app, count in got.items()}


def lent_last(view: View) -> dict[str, int]:
    """Without terms a quota is the cluster: what it holds of each app, gang by gang, goes before the rest of all.

    An app that found no room leaves its part of the quota to the next of its tenant.
    """
    used: Counter[TenantId] = Counter()  # by what was placed
    asked: Counter[TenantId] = Counter()  # by what the quota holds, placed or not
    got: dict[str, int] = {}
    beyond: set[str] = set()
    left = len(view.gpus)
    for app in view.apps:
        held = min(app.demand_max, view.cluster_gpus - used[app.tenant]) // app.gang * app.gang
        asks = min(app.demand_max, max(0, view.cluster_gpus - asked[app.tenant])) // app.gang * app.gang
        beyond |= set() if asks else {str(app.app)}
        got[app.app] = min(left, held) // app.gang * app.gang
        left -= got[app.app]
        used[app.tenant] += got[app.app]
        asked[app.tenant] += asks
    for app in sorted(view.apps, key=lambda app: app.app in beyond):
        more = min(left, app.demand_max - got[app.app]) // app.gang * app.gang
        got[app.app] += more
        left -= more
    return got


def shortest_of_the_first_tenant(view: View) -> list[AppView]:
    first = min(app.tenant for app in view.apps)
    return sorted(view.apps, key=lambda app: (app.tenant != first, unknown_last(view.left_s(app))))


def by_need(view: View) -> dict[str, int]:
    """One gang at a time to the tenant that has none, then by need for each GPU, with one more gang."""
    outlook = outlook_of(view)

    def place(app: AppView, got: Mapping[str, int]) -> tuple[bool, float, bool]:
        at = view.apps.index(app)
        due, left = outlook.due_s[at], outlook.works.left_s[at]
        holds = got[app.app] + app.gang <= len(app.renewable)
        if holds:
            due -= 3.0 * (app.move_s or 60.0)
        silent = app.left_gpu_s is None
        most = 1.0 if silent else 8.0
        haste = most if due <= left / most else left / due
        need = outlook.works.left_gpu_s[at] / left * haste**1.5
        return silent and due > left, -need / (got[app.app] + app.gang), not holds

    return dealt(view, lambda app, got: (tenant_share(view, app, got) > 0, place(app, got)))


REFERENCE: dict[str, Callable[[View], dict[str, int]]] = {
    "fifo": lambda view: walked(view, view.apps, strict=True, keeps=True),
    "backfill": lambda view: walked(view, view.apps, keeps=True),
    "srtf": lambda view: walked(view, sorted(view.apps, key=lambda app: unknown_last(view.left_s(app)))),
    "srsf": lambda view: walked(view, sorted(view.apps, key=lambda app: unknown_last(view.left_gpu_s(app)))),
    "las": lambda view: walked(view, sorted(view.apps, key=lambda app: view.served_gpu_s(app) >= 3600.0)),
    "drf": lambda view: dealt(view, lambda app, got: (tenant_share(view, app, got), got[app.app])),
    "optimus": lambda view: dealt(view, lambda app, got: -saved(view, app, got[app.app])),
    "slaq": lambda view: dealt(view, lambda app, got: -lowered(app, got[app.app])),
    "gandiva": lambda view: dealt(view, lambda app, got: got[app.app] // app.gang, keeps=True),
    "gandiva-placement": lambda view: dealt(view, lambda app, got: (got[app.app] // app.gang, view.served_gpu_s(app))),
    "maxmin-ftf": by_need,
    # without any history nothing is fair: a tenant has had something, and that is enough, or not; its apps take turns
    "astraea": lambda view: dealt(view, lambda app, got: (tenant_share(view, app, got) > 0, got[app.app])),
    "yarn-cs": within_whole_quotas,
    "hived": lent_last,
    "allox": lambda view: walked(view, shortest_of_the_first_tenant(view)),
    "gandiva-fair": lambda view: dealt(view, lambda app, got: got[app.app]),
}


def one_that_finds_no_room() -> View:
    """A gang of three finds two GPUs left: of its tenant's quota it holds nothing then, and the gang of two fits."""
    asking = [("t", 1, 2), ("u", 3, 6), ("u", 2, 2), ("u", 1, 1)]
    apps = [
        AppView(
            AppId(f"o-{index}"),
            TenantId(tenant),
            gang,
            demand,
            "cluster",
            float(index),
            (),
            (),
            requirements=Requirements(spans=True),
        )
        for index, (tenant, gang, demand) in enumerate(asking)
    ]
    return replace(view_of(gpus_of(2, 2), apps), cluster_gpus=4)


@pytest.mark.parametrize("name", sorted(REFERENCE))
@given(view=rounds(counted=True))
@example(view=one_that_finds_no_room())
@settings(max_examples=examples(300), deadline=None)
def test_gangs_that_span_are_served_as_counting_says(name: str, view: View) -> None:
    assert counts(name, view) == REFERENCE[name](view)


@ordered
@given(view=rounds(counted=True), tells=st.booleans())
@settings(max_examples=examples(100), deadline=None)
def test_an_incumbent_keeps_its_very_gpus(name: str, view: View, tells: bool) -> None:
    allocation = POLICIES[name].made().allocate(replace(view, tells=tells), {})
    final = {
        gpu.gpu: gpu.holder for gpu in view.gpus if gpu.gpu not in allocation.freed and allocation.unnamed == "holder"
    }
    after = final | dict(allocation.assign)
    moved = {outcome.app for outcome in allocation.outcomes if "closer together" in outcome.reason}
    for app in view.apps:
        held = set(app.renewable)
        has = {gpu for gpu, owner in after.items() if owner == app.app}
        assert app.app in moved or has <= held or held <= has


def test_three_nodes_of_two_give_a_gang_of_four_and_one_of_two_whole_machines() -> None:
    gpus = gpus_of(2, 2, 2)
    _, outcomes = decided("srtf", round_of(gpus, job("four", 4, left_s=2.0), job("two", 2, left_s=1.0)))
    nodes: list[set[NodeId]] = [{gpu.node for gpu in gpus if gpu.gpu in outcomes[app].gpus} for app in ("four", "two")]
    assert [len(each) for each in nodes] == [2, 1]
