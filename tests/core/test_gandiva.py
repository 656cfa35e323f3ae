"""The policy `gandiva`: rounds worked out by hand. Seats are made by `shared`, GPUs by `gpus_of`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from arbiter.core.policies.gandiva.policy import Gandiva, Settings
from arbiter.core.seam import Allocation, AppView, GpuView, Outcome, View
from protocol.messages import AppId, GpuId, seat
from tests.core.test_policies import settled
from tests.support.auctions import app_of, gpus_of, view_of
from tests.support.wishes import replace


def shared(gpus: Sequence[GpuView], seats: int = 3) -> list[GpuView]:
    """Every GPU with so many seats, by id."""
    every = [replace(gpu, gpu=seat(gpu.gpu, number)) for gpu in gpus for number in range(seats)]
    return sorted(every, key=lambda each: each.gpu)


def app(name: str, gang: int = 1, held: Sequence[GpuId | str] = (), **more: object) -> AppView:
    """An app of one job, which it has divided all it holds to; it is known to be suspendable if it holds something."""
    gpus = tuple(GpuId(gpu) for gpu in held)
    view = app_of(name, gang=gang, demand_max=gang, renewable=gpus)
    known: dict[str, object] = {"leases": len(gpus), "jobs": (gpus,), "cooperative": True if gpus else None}
    return replace(view, **(known | more))  # type: ignore[arg-type]


def decided(gpus: Sequence[GpuView], *apps: AppView, now: float = 1000.0, **knobs: object) -> dict[str, Outcome]:
    return allocated(gpus, *apps, now=now, **knobs)[1]


def allocated(
    gpus: Sequence[GpuView], *apps: AppView, now: float = 1000.0, **knobs: object
) -> tuple[Allocation, dict[str, Outcome], View]:
    """The round's answer, checked for what must hold of any, and that nobody has two seats of one GPU."""
    holder = {gpu: each.app for each in apps for gpu in each.renewable}
    arrived = [replace(each, arrived_at=float(place)) for place, each in enumerate(apps)]
    kept = {gpu.gpu for each in apps for gpu in each.kept}
    shown = [
        replace(gpu, holder=holder.get(gpu.gpu), free_since=None if gpu.gpu in holder else gpu.free_since or 0.0)
        for gpu in gpus
        if gpu.gpu not in kept
    ]
    view = replace(view_of(shown, arrived), now=now, shared=any("+" in gpu.gpu for gpu in gpus))
    allocation = Gandiva(Settings(**knobs)).allocate(view, {})  # type: ignore[arg-type]
    outcomes = settled(view, allocation)
    for each in arrived:
        mine = [gpu.gpu for gpu in each.kept] + list(outcomes[each.app].gpus)
        devices = [gpu.partition("+")[0] for gpu in mine]
        assert len(devices) == len(set(devices)), f"{each.app} has two seats of one GPU: {mine}"
    return allocation, outcomes, view


def names(gpus: Sequence[GpuView]) -> tuple[GpuId, ...]:
    return tuple(gpu.gpu for gpu in gpus)


# --- reactive mode --------------------------------------------------------------------------------------------------


def test_a_job_goes_to_the_server_that_serves_its_size_before_an_idle_one_before_any_other() -> None:
    gpus = gpus_of(4, 4, 4)
    ones, twos = app("ones", 1, names(gpus[:1])), app("twos", 2, names(gpus[4:6]))
    outcomes = decided(gpus, ones, twos, app("new", 2))
    assert outcomes["new"].gpus == names(gpus[6:8])
    assert outcomes["new"].reason == "gets 2 GPUs on n01, which serves jobs of 2"
    outcomes = decided(gpus, ones, twos, app("new", 4))
    assert outcomes["new"].gpus == names(gpus[8:])
    assert outcomes["new"].reason == "gets 4 GPUs on n02, which was idle"
    outcomes = decided(gpus[:8], ones, twos, app("new", 3))
    assert outcomes["new"].gpus == names(gpus[1:4])
    assert outcomes["new"].reason == "gets 3 GPUs on n00, beside jobs of 1"


def test_of_servers_of_its_size_a_job_takes_the_least_loaded() -> None:
    gpus = gpus_of(4, 4)
    busy = [app("a", 1, names(gpus[:1])), app("b", 1, names(gpus[1:2])), app("c", 1, names(gpus[4:5]))]
    assert decided(gpus, *busy, app("new"))["new"].gpus == names(gpus[5:6])


def test_a_gang_that_spans_may_be_fragmented_and_one_that_does_not_waits() -> None:
    gpus = gpus_of(2, 2)
    there = [app("a", 1, names(gpus[:1])), app("b", 1, names(gpus[2:3]))]
    assert decided(gpus, *there, app("new", 2, spans=True))["new"].gpus == (gpus[1].gpu, gpus[3].gpu)
    outcome = decided(gpus, *there, app("new", 2))["new"]
    assert outcome.reason == "waits: it needs a gang of 2 on one node, and the largest hole is 1"


def test_early_feedback_comes_first_and_priority_before_it() -> None:
    gpus = gpus_of(2)
    many = replace(app("many"), demand_max=3, jobs=())
    outcomes = decided(gpus, many, app("one"))
    assert (len(outcomes["many"].gpus), len(outcomes["one"].gpus)) == (1, 1)
    outcomes = decided(gpus, replace(many, priority=1), app("one"))
    assert (len(outcomes["many"].gpus), len(outcomes["one"].gpus)) == (2, 0)
    assert outcomes["many"].reason.startswith("gets 1 GPU on n00, which was idle; gets 1 GPU on n00, which serves")


def test_nobody_is_preempted_for_a_newcomer_where_gpus_are_not_shared() -> None:
    gpus = gpus_of(1)
    allocation, outcomes, _ = allocated(gpus, app("a", 1, names(gpus)), app("new", priority=9))
    assert (dict(allocation.assign), allocation.freed) == ({}, ())
    assert outcomes["new"].reason == "waits: nothing is left of the GPUs in play, which went to a (1)"
    assert outcomes["a"].reason == "keeps the 1 GPU it holds"


# --- over-subscription ----------------------------------------------------------------------------------------------


def test_where_all_gpus_are_taken_a_job_shares_those_of_the_lowest_server_of_its_size() -> None:
    gpus = gpus_of(1, 1, 2)
    seats = shared(gpus)
    there = [
        app("a", 1, ["g00-00"]),
        app("b", 1, ["g00-00+1"]),
        app("c", 1, ["g01-00"]),
        app("two", 2, ["g02-00", "g02-01"]),
    ]
    outcome = decided(seats, *there, app("new"))["new"]
    assert outcome.gpus == ("g01-00+1",)
    assert outcome.reason == "shares g01-00 on n01 with c: no GPU was free for it"
    outcome = decided(seats, *there, app("new", 2))["new"]
    assert outcome.gpus == ("g02-00+1", "g02-01+1")


def test_height_is_counted_with_the_job_and_goes_before_load() -> None:
    seats = shared(gpus_of(4, 8))
    four, eight = ([f"g0{node}-{number:02}" for number in range(size)] for node, size in ((0, 4), (1, 8)))
    there = [app("a", 4, four), app("b", 4, eight[:4]), app("c", 4, eight[4:]), app("d", 1, [f"{four[0]}+1"])]
    there += [app(f"e{number}", 1, [f"{eight[number]}+1"]) for number in range(3)]
    # ceil((5 + 4) / 4) is 3, ceil((11 + 4) / 8) is 2, though 11 of 8 are more than 5 of 4
    assert {gpu.partition("-")[0] for gpu in decided(seats, *there, app("new", 4))["new"].gpus} == {"g01"}


def test_no_gpu_is_shared_while_one_is_idle() -> None:
    seats = shared(gpus_of(2))
    assert decided(seats, app("a", 1, ["g00-00"]), app("new"))["new"].gpus == ("g00-01",)


@pytest.mark.parametrize(
    ("there", "new"),
    [
        (app("a", 1, ["g00-00"], cooperative=False), app("new")),
        (app("a", 1, ["g00-00"], cooperative=None), app("new")),
        (app("a", 1, ["g00-00"], priority=1), app("new")),
        (app("a", 1, ["g00-00"]), app("new", cooperative=False)),
    ],
)
def test_nobody_shares_with_training_that_cannot_be_suspended_or_goes_before_it(there: AppView, new: AppView) -> None:
    outcome = decided(shared(gpus_of(1)), there, new)["new"]
    assert outcome.gpus == ()
    assert outcome.reason.startswith("waits: nothing is left")
    assert ("cannot be suspended, so it shares none" in outcome.reason) == (new.cooperative is False)


def test_a_job_of_another_size_than_its_server_does_not_share_with_it() -> None:
    outcome = decided(shared(gpus_of(2)), app("two", 2, ["g00-00", "g00-01"]), app("new"))["new"]
    assert outcome.gpus == ()
    assert outcome.reason.endswith("and no node of jobs of 1 has what it may share")


def test_nobody_gets_a_second_seat_of_a_gpu_and_no_more_share_one_than_it_has_seats() -> None:
    many = replace(app("a", 1, ["g00-00"]), demand_max=5)
    assert decided(shared(gpus_of(1)), many)["a"].gpus == ("g00-00",)
    outcomes = decided(shared(gpus_of(1), seats=2), app("a", 1, ["g00-00"]), app("b"), app("c"))
    assert [len(outcomes[name].gpus) for name in "abc"] == [1, 1, 0]


def test_two_newcomers_do_not_share_before_they_are_known_to_give_way() -> None:
    outcomes = decided(shared(gpus_of(1)), app("a"), app("b"))
    assert [len(outcomes[name].gpus) for name in "ab"] == [1, 0]


def test_who_turns_out_not_to_give_way_is_left_alone_with_its_gpu() -> None:
    there = [app("a", 1, ["g00-00"]), app("b", 1, ["g00-00+1"], cooperative=False)]
    outcomes = decided(shared(gpus_of(1)), *there)
    assert (outcomes["a"].gpus, outcomes["b"].gpus) == (("g00-00",), ())
    assert "leaves g00-00, which it shared: not all training there can be suspended" in outcomes["b"].reason


# --- introspective mode: moves ----------------------------------------------------------------------------------------


def crowded(left_s: float | None, **more: object) -> dict[str, Outcome]:
    """Two on one GPU, beside one that is idle; the later one could move for 10 s."""
    first = app("a", 1, ["g00-00"])
    second = app("b", 1, ["g00-00+1"], movable=True, move_s=10.0, left_s=left_s, left_at=1000.0)
    return decided(shared(gpus_of(1, 1)), first, replace(second, **more))


def test_a_job_leaves_a_shared_gpu_for_an_idle_one_if_that_saves_three_times_the_cost() -> None:
    outcome = crowded(31.0)["b"]
    assert outcome.gpus == ("g01-00",)
    assert "moves from n00 to n01, to have 1 GPU to itself: saves about 31 s, for 10 s" in outcome.reason
    assert crowded(29.0)["b"].gpus == ("g00-00+1",)


def test_a_move_whose_cost_was_never_measured_is_taken_to_cost_a_minute() -> None:
    assert crowded(179.0, move_s=0.0)["b"].gpus == ("g00-00+1",)
    assert crowded(181.0, move_s=0.0)["b"].gpus == ("g01-00",)


def test_a_job_of_unknown_length_is_taken_to_have_its_age_still_to_run() -> None:
    assert crowded(None)["b"].gpus == ("g01-00",)
    assert crowded(None, move_s=400.0)["b"].gpus == ("g00-00+1",)


@pytest.mark.parametrize("why", [{"movable": False}, {"jobs": ((),)}])
def test_a_job_that_cannot_leave_with_a_checkpoint_or_is_not_divided_yet_stays(why: dict[str, object]) -> None:
    assert crowded(1e6, **why)["b"].gpus == ("g00-00+1",)


def apart(left_s: float, **more: object) -> dict[str, Outcome]:
    """A gang of two on two servers of one rack, and a server with two idle GPUs."""
    gpus = gpus_of(1, 1, 2)
    gang = app("a", 2, names(gpus[:2]), spans=True, movable=True, move_s=10.0, left_s=left_s, left_at=1000.0)
    return decided(gpus, replace(gang, **more))


def test_a_gang_on_several_servers_moves_together_if_that_pays() -> None:
    outcome = apart(301.0)["a"]
    assert outcome.gpus == ("g02-00", "g02-01")
    assert "moves from n00, n01 to n02, to lie closer together: saves about 30.1 s, for 10 s" in outcome.reason
    assert apart(299.0)["a"].gpus == ("g00-00", "g01-00")
    assert apart(1e6, movable=False)["a"].gpus == ("g00-00", "g01-00")


def fragmented(left_s: float, *more: AppView, sizes: tuple[int, ...] = (4, 4)) -> dict[str, Outcome]:
    """Two servers with one small job each, which has so long to run and costs 10 s to move."""
    gpus = gpus_of(*sizes)
    there = [
        app(name, 1, [gpu], movable=True, move_s=10.0, left_s=left_s, left_at=1000.0)
        for name, gpu in (("a", "g00-00"), ("b", "g01-00"))
    ]
    return decided(gpus, *there, *more)


def test_servers_are_cleared_for_a_gang_that_waits_if_it_gains_three_times_the_cost() -> None:
    outcomes = fragmented(8.0, app("gang", 4))  # 4 GPUs * 8 s = 32 GPU-s, for 1 GPU * 10 s
    assert outcomes["gang"].gpus == ("g00-00", "g00-01", "g00-02", "g00-03")
    assert outcomes["gang"].reason == "gets 4 GPUs on n00, from where others have moved"
    assert outcomes["a"].gpus == ("g01-01",)
    assert "moves from n00 to n01, to make room for gang, which waits for a gang of 4" in outcomes["a"].reason
    assert "that gains 32 GPU-s, for 10 GPU-s" in outcomes["a"].reason
    outcomes = fragmented(7.0, app("gang", 4))
    assert (outcomes["gang"].gpus, outcomes["a"].gpus) == ((), ("g00-00",))


def test_without_a_gang_that_waits_no_job_is_moved_off_its_server() -> None:
    outcomes = fragmented(1e6)
    assert (outcomes["a"].gpus, outcomes["b"].gpus) == (("g00-00",), ("g01-00",))


def test_a_server_of_which_less_than_three_quarters_are_free_is_not_cleared() -> None:
    outcomes = fragmented(1e6, app("gang", 3), sizes=(3, 3))
    assert (outcomes["gang"].gpus, outcomes["a"].gpus) == ((), ("g00-00",))


# --- grow-shrink ----------------------------------------------------------------------------------------------------


def elastic(held: Sequence[str], **more: object) -> AppView:
    view = app("e", 1, held, sizes=(1, 2, 4), movable=True, move_s=10.0, left_gpu_s=1000.0, left_at=1000.0)
    return replace(view, **({"demand_max": 4} | more))  # type: ignore[arg-type]


def test_an_elastic_job_starts_on_its_smallest_size() -> None:
    outcome = decided(gpus_of(4), elastic([], jobs=((),)))["e"]
    assert len(outcome.gpus) == 1


def test_an_elastic_job_waits_though_its_app_still_names_the_gpu_that_it_has_lost() -> None:
    """The app has not been heard since, and what it says then is no reason for a round (fault world 1795600310)."""
    outcome = decided(gpus_of(4), elastic([], jobs=(("lost",),)))["e"]
    assert len(outcome.gpus) == 1


def test_it_grows_within_its_server_onto_gpus_that_were_idle_for_long() -> None:
    gpus = [replace(gpu, free_since=939.0) for gpu in gpus_of(4, 2)]
    outcome = decided(gpus, elastic(["g00-00"]))["e"]
    assert outcome.gpus == names(gpus[:4])
    assert "grows to 4 GPUs on n00, where 3 GPUs had long been idle" in outcome.reason
    gpus = [replace(gpu, free_since=939.0) for gpu in gpus_of(3, 2)]
    assert len(decided(gpus, elastic(["g00-00"]))["e"].gpus) == 2  # 3 is no size it accepts


def test_it_does_not_grow_before_and_asks_to_be_looked_at_again_then() -> None:
    gpus = [replace(gpu, free_since=950.0) for gpu in gpus_of(4)]
    allocation, outcomes, _ = allocated(gpus, elastic(["g00-00"]))
    assert len(outcomes["e"].gpus) == 1
    assert allocation.look_again_s == pytest.approx(10.0)
    assert len(decided(gpus, elastic(["g00-00"]), idle_s=49.0)["e"].gpus) == 4


def test_it_grows_only_if_that_pays_and_everything_it_holds_is_divided() -> None:
    gpus = gpus_of(4)
    assert len(decided(gpus, elastic(["g00-00"], left_gpu_s=39.0))["e"].gpus) == 1  # 39 - 39 / 4 < 30
    assert len(decided(gpus, elastic(["g00-00"], left_gpu_s=41.0))["e"].gpus) == 4
    assert len(decided(gpus, elastic(["g00-00", "g00-01"], jobs=((GpuId("g00-00"),),)))["e"].gpus) == 2


def test_it_does_not_grow_while_a_gang_waits() -> None:
    outcomes = decided(gpus_of(2, 2), elastic(["g00-00"]), app("b", 1, ["g01-00"]), app("gang", 2, spans=False))
    assert outcomes["gang"].gpus == ()
    assert len(outcomes["e"].gpus) == 1


def test_it_shrinks_at_once_to_an_accepted_size_when_a_newcomer_needs_its_gpus() -> None:
    gpus = gpus_of(4)
    outcomes = decided(gpus, elastic(names(gpus)), app("new"))
    assert (outcomes["e"].gpus, outcomes["new"].gpus) == (names(gpus[:2]), names(gpus[2:3]))
    assert "shrinks to 2 GPUs on n00: new needs the others" in outcomes["e"].reason
    assert outcomes["new"].reason == "gets 1 GPU on n00, which elastic jobs have given up"
    outcomes = decided(gpus, elastic(names(gpus)), app("new", 3))
    assert (len(outcomes["e"].gpus), len(outcomes["new"].gpus)) == (1, 3)
    outcomes = decided(gpus, elastic(names(gpus)), app("new", 4))
    assert (len(outcomes["e"].gpus), len(outcomes["new"].gpus)) == (4, 0)


# --- jobs that may lie on several nodes, where GPUs are shared: turns of a lease, which is 60 s here ------------------

GANG = ("g00-00", "g01-00")


def wide(held: Sequence[str] = (), **more: object) -> AppView:
    """A gang of two that may lie on several nodes."""
    return app("wide", 2, held, **({"spans": True, "leases": len(held)} | more))


def test_a_job_that_may_lie_on_several_nodes_shares_no_gpu_and_none_is_shared_with_it() -> None:
    seats, young = shared(gpus_of(1, 1)), {"granted_sum": 990.0}
    outcomes = decided(seats, app("a", 1, ["g00-00"], **young), app("b", 1, ["g01-00"], **young), wide())
    assert outcomes["wide"].gpus == ()
    assert outcomes["wide"].reason.endswith("a job that may lie on several nodes has its GPUs to itself")
    outcomes = decided(seats, wide(GANG, granted_sum=2 * 990.0), app("new"))
    assert (outcomes["wide"].gpus, outcomes["new"].gpus) == (GANG, ())


def test_a_gang_of_its_size_does_not_share_with_it_either() -> None:
    seats = shared(gpus_of(2))
    there = {"granted_sum": 2 * 990.0, "spans": True}
    assert decided(seats, app("a", 2, ["g00-00", "g00-01"], granted_sum=2 * 990.0), app("new", 2))["new"].gpus
    assert not decided(seats, app("wide", 2, ["g00-00", "g00-01"], **there), app("new", 2))["new"].gpus


def test_it_gets_whole_gpus_from_jobs_that_have_had_theirs_for_a_lease_and_share_elsewhere_then() -> None:
    seats = shared(gpus_of(1, 1, 1))
    there = [
        app(name, 1, [gpu]) for name, gpu in (("a", "g00-00"), ("b", "g01-00"), ("c", "g02-00"), ("d", "g02-00+1"))
    ]
    outcomes = decided(seats, *there, wide())
    assert outcomes["wide"].gpus == GANG, "there are the fewest jobs"
    assert outcomes["a"].gpus == ("g02-00+2",)
    assert "leaves 1 of its GPUs on n00 after a lease's time: wide waits" in outcomes["a"].reason
    assert (outcomes["b"].gpus, "waits" in outcomes["b"].reason) == ((), True), "no seat is left"
    assert outcomes["c"].gpus + outcomes["d"].gpus == ("g02-00", "g02-00+1")


@pytest.mark.parametrize(
    "stays", [{"granted_sum": 950.0}, {"cooperative": False}, {"priority": 1}], ids=["young", "fixed", "high"]
)
def test_it_takes_nothing_from_a_job_that_is_young_or_cannot_stop_or_goes_before_it(stays: dict[str, object]) -> None:
    seats = shared(gpus_of(1, 1))
    outcomes = decided(seats, app("a", 1, ["g00-00"]), app("b", 1, ["g01-00"], **stays), wide())
    assert [outcomes[name].gpus for name in ("a", "b", "wide")] == [("g00-00",), ("g01-00",), ()]


def test_after_a_lease_it_gives_way_to_those_that_wait_and_the_next_look_is_then() -> None:
    seats, new = shared(gpus_of(1, 1)), app("new")
    allocation, outcomes, _ = allocated(seats, wide(GANG, granted_sum=2 * 950.0), new)
    assert (outcomes["wide"].gpus, outcomes["new"].gpus, allocation.look_again_s) == (GANG, (), 10.0)
    outcomes = decided(seats, wide(GANG, granted_sum=2 * 940.0), new)
    assert (outcomes["wide"].gpus, len(outcomes["new"].gpus)) == ((), 1)
    assert decided(seats, wide(GANG))["wide"].gpus == GANG, "no app waits"


def test_where_gpus_are_not_shared_nobody_gives_way() -> None:
    gpus = gpus_of(1, 1)
    outcomes = decided(gpus, app("a", 1, ["g00-00"]), app("b", 1, ["g01-00"]), wide())
    assert [outcomes[name].gpus for name in ("a", "b", "wide")] == [("g00-00",), ("g01-00",), ()]


def test_a_negative_idle_time_is_named() -> None:
    with pytest.raises(ValueError, match=r"idle_s is -1\.0; it must be 0 or more"):
        Gandiva(Settings(idle_s=-1.0))


def test_gpus_of_an_app_that_is_silent_are_given_to_others() -> None:
    gpus = [replace(gpu, holder=AppId("gone")) for gpu in gpus_of(2)]
    view = view_of(gpus, [app("new")])
    allocation = Gandiva().allocate(view, {})
    assert dict(allocation.assign) == {"g00-00": "new"}
    assert allocation.freed == ("g00-01",)
