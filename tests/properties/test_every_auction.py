"""What holds of every auction, at random and exhaustively: files of schema `themis-auction-1` and their outcomes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations_with_replacement

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arbiter.core.policies.themis.auction.instance import Bidding, Host, Instance, Result, Slowdown, parse, solve
from tests.support import exact_auctions
from tests.support.effort import examples

pytestmark = pytest.mark.usefixtures("compiled_auction")

EXACT = 1e-9
BUDGET_MS = 20_000.0
INSENSITIVE = Slowdown(1.0, 1.0, 1.0)


def host(number: int, free: int, *, rack: int = 0, gpus: int | None = None) -> Host:
    return Host(f"m{number}", f"r{rack}", max(free, 1) if gpus is None else gpus, free)


def app(name: str, *, demand: int = 4, gang: int = 1, work: float = 1000.0, **others: object) -> Bidding:
    fields: dict[str, object] = {"elapsed": 60.0, "t_id": 500.0, "slowdown": Slowdown(1.0, 1.2, 1.7), **others}
    return Bidding(id=name, work_left=work, demand_max=demand, gang=gang, **fields)  # type: ignore[arg-type]


def auction(machines: Sequence[Host], apps: Sequence[Bidding], budget_ms: float = BUDGET_MS, seed: int = 0) -> Result:
    instance = Instance("themis-auction-1", 600.0, list(machines), list(apps))
    result = solve(parse(msgspec.json.encode(instance)), budget_ms, seed=seed)
    check(instance, result)
    return result


def check(instance: Instance, result: Result) -> None:
    """What holds whether or not the optima are proven."""
    plain = msgspec.to_builtins(instance)
    assert exact_auctions.infeasible(plain, result.allocation) == []
    assert exact_auctions.infeasible(plain, result.grants) == []
    assert set(result.allocation) == set(result.c) == {app.id for app in instance.apps}
    assert result.gap >= 0.0
    assert all(gap >= 0.0 for gap in result.without_gap.values())
    for app_ in instance.apps:
        won, kept = result.allocation[app_.id], result.grants[app_.id]
        assert all(kept[machine] <= won[machine] for machine in kept)
        assert 0.0 < result.c[app_.id] <= 1.0
        if not won:
            assert result.c[app_.id] == 1.0


def best(machines: Sequence[Host], apps: Sequence[Bidding], skip: str | None = None) -> float:
    instance = Instance("themis-auction-1", 600.0, list(machines), list(apps))
    return exact_auctions.best(msgspec.to_builtins(instance), skip)


def check_optima(machines: Sequence[Host], apps: Sequence[Bidding]) -> Result:
    """Compare every optimum of an auction with what trying everything finds."""
    result = auction(machines, apps)
    assert result.proven
    assert result.sum_log_v == pytest.approx(best(machines, apps), abs=EXACT)
    for one in apps:
        assert result.without[one.id] == pytest.approx(best(machines, apps, one.id), abs=EXACT)
    return result


# --- at random ------------------------------------------------------------------------------------------------------

Auction = tuple[list[Host], list[Bidding]]


@st.composite
def auctions(draw: st.DrawFn, *, free_max: int = 40, apps_max: int = 8) -> Auction:
    frees = draw(st.lists(st.integers(0, 8), min_size=1, max_size=8).filter(lambda found: sum(found) <= free_max))
    held_here = draw(st.integers(0, len(frees) - 1))
    machines = [host(number, free, rack=draw(st.integers(0, 2)), gpus=free + 4) for number, free in enumerate(frees)]
    apps = []
    for number in range(draw(st.integers(1, apps_max))):
        rack = draw(st.sampled_from([1.0, 1.05, 1.3, 2.0]))
        apps.append(
            app(
                f"a{number}",
                demand=draw(st.integers(1, 12)),
                gang=draw(st.sampled_from([1, 1, 1, 2, 3])),
                work=draw(st.sampled_from([1e-9, 10.0, 777.7, 5000.0, 1e9])),
                elapsed=draw(st.sampled_from([0.0, 1.0, 900.0, 1e6])),
                t_id=draw(st.sampled_from([1e-9, 1.0, 250.0, 1e9])),
                slowdown=Slowdown(1.0, rack, rack * draw(st.sampled_from([1.0, 1.1, 1.8]))),
                held={f"m{held_here}": 1} if number == 0 and draw(st.booleans()) else {},
            )
        )
    return machines, apps


@given(case=auctions())
@settings(max_examples=examples(100), deadline=None)
def test_every_outcome_is_feasible_and_its_bounds_are_in_order(case: Auction) -> None:
    auction(*case)


@given(case=auctions(), budget_ms=st.sampled_from([1e-3, 0.05, 1.0]))
@settings(max_examples=examples(60), deadline=None)
def test_out_of_budget_the_bounds_hold_the_proven_optimum(case: Auction, budget_ms: float) -> None:
    hasty, patient = auction(*case, budget_ms=budget_ms), auction(*case)
    assert patient.proven
    assert hasty.sum_log_v - EXACT <= patient.sum_log_v <= hasty.upper_bound + EXACT


@given(case=auctions(free_max=6, apps_max=3).filter(lambda case: len(case[0]) <= 3))
@settings(max_examples=examples(60), deadline=None)
def test_the_optima_are_those_that_trying_everything_finds(case: Auction) -> None:
    check_optima(*case)


@given(case=auctions())
@settings(max_examples=examples(80), deadline=None)
def test_no_app_can_gain_from_what_is_left_over(case: Auction) -> None:
    """Pareto efficiency: a gain without another's loss would have to come from GPUs that nobody won."""
    machines, apps = case
    result = auction(machines, apps)
    plain = msgspec.to_builtins(Instance("themis-auction-1", 600.0, machines, apps))
    used: dict[str, int] = {}
    for counts in result.allocation.values():
        for machine, count in counts.items():
            used[machine] = used.get(machine, 0) + count
    left = {machine.id: machine.free - used.get(machine.id, 0) for machine in machines}
    for one in plain["apps"]:
        now = exact_auctions.log_v(plain, one, result.allocation[one["id"]])
        for more in _some_of(left):
            wider = {name: result.allocation[one["id"]].get(name, 0) + more.get(name, 0) for name in left}
            assert exact_auctions.log_v(plain, one, wider) <= now + EXACT


def _some_of(left: Mapping[str, int]) -> list[dict[str, int]]:
    """All of it, all of each machine, and every number of one machine's GPUs."""
    single = [{name: count} for name, free in left.items() for count in range(1, free + 1)]
    return [dict(left), *single]


@given(case=auctions())
@settings(max_examples=examples(60), deadline=None)
def test_c_is_one_just_where_the_others_lose_nothing_by_an_app(case: Auction) -> None:
    machines, apps = case
    result = auction(machines, apps)
    for one in apps:
        others = [other for other in apps if other.id != one.id]
        alone = auction(machines, others)
        assert alone.sum_log_v == pytest.approx(result.without[one.id], abs=EXACT)
        with_it = result.sum_log_v - result.log_v[one.id]
        lost = alone.sum_log_v - with_it
        if result.c[one.id] == 1.0:
            assert lost <= 2 * EXACT
        else:  # what is lost may be less than sums are exact to
            assert lost > -EXACT
            assert math.log(result.c[one.id]) == pytest.approx(-lost, abs=2 * EXACT)


@given(case=auctions(), which=st.integers(0, 7), factor=st.sampled_from([1e-6, 0.3, 1e5]))
@settings(max_examples=examples(60), deadline=None)
def test_scaling_the_values_of_an_app_changes_nothing(case: Auction, which: int, factor: float) -> None:
    machines, apps = case
    at = which % len(apps)
    scaled = [msgspec.structs.replace(one, t_id=one.t_id * factor) if i == at else one for i, one in enumerate(apps)]
    plain, other = auction(machines, apps), auction(machines, scaled)
    assert other.allocation == plain.allocation
    assert other.grants == plain.grants
    assert other.c == pytest.approx(plain.c, abs=EXACT)


@given(case=auctions(), data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_permuting_apps_and_machines_changes_nothing_but_ties(case: Auction, data: st.DataObject) -> None:
    machines, apps = case
    permuted = auction(data.draw(st.permutations(machines)), data.draw(st.permutations(apps)))
    plain = auction(machines, apps)
    assert permuted.sum_log_v == pytest.approx(plain.sum_log_v, abs=EXACT)
    assert permuted.without == pytest.approx(plain.without, abs=EXACT)
    if sorted(permuted.log_v.values()) == pytest.approx(sorted(plain.log_v.values()), abs=EXACT):
        assert sorted(permuted.c.values()) == pytest.approx(sorted(plain.c.values()), abs=1e-8)


@given(case=auctions(), data=st.data())
@settings(max_examples=examples(40), deadline=None)
def test_renaming_interchangeable_machines_changes_nothing(case: Auction, data: st.DataObject) -> None:
    machines, apps = case
    names = data.draw(st.permutations([machine.id for machine in machines]))
    new = dict(zip([machine.id for machine in machines], names, strict=True))
    renamed = [msgspec.structs.replace(machine, id=new[machine.id]) for machine in machines]
    moved = [msgspec.structs.replace(one, held={new[name]: count for name, count in one.held.items()}) for one in apps]
    other, plain = auction(renamed, moved), auction(machines, apps)
    assert other.sum_log_v == pytest.approx(plain.sum_log_v, abs=EXACT)
    assert other.without == pytest.approx(plain.without, abs=EXACT)


# --- exhaustively ---------------------------------------------------------------------------------------------------

ARCHETYPES = (
    app("one", demand=1),
    app("two", demand=2, work=3000.0),
    app("many", demand=9, work=1e5, slowdown=INSENSITIVE),
    app("tight", demand=4, slowdown=Slowdown(1.0, 3.0, 9.0)),
    app("pairs", demand=4, gang=2),
    app("done", demand=2, work=0.0),
)
CLUSTERS = (
    [host(0, 1)],
    [host(0, 3)],
    [host(0, 2), host(1, 2)],
    [host(0, 2), host(1, 1, rack=1)],
    [host(0, 3), host(1, 1), host(2, 1, rack=1)],
    [host(0, 0), host(1, 2)],
)


@pytest.mark.parametrize("machines", CLUSTERS, ids=lambda machines: "-".join(str(m.free) for m in machines))
def test_all_small_auctions_are_solved_as_trying_everything_does(machines: list[Host]) -> None:
    for count in (1, 2, 3):
        for chosen in combinations_with_replacement(ARCHETYPES, count):
            apps = [msgspec.structs.replace(one, id=f"{one.id}{i}") for i, one in enumerate(chosen)]
            check_optima(machines, apps)


# --- the corners ----------------------------------------------------------------------------------------------------


def test_with_no_gpu_free_nobody_wins_and_nobody_pays() -> None:
    result = auction([host(0, 0), host(1, 0)], [app("a"), app("b")])
    assert result.proven
    assert result.allocation == {"a": {}, "b": {}}
    assert result.c == {"a": 1.0, "b": 1.0}


def test_one_giant_wins_no_more_than_its_share_among_equals() -> None:
    giant = app("giant", demand=10_000, work=1e9, slowdown=INSENSITIVE, elapsed=0.0)
    small = [app(f"s{i}", demand=10_000, work=1e3, slowdown=INSENSITIVE, elapsed=0.0) for i in range(3)]
    result = auction([host(0, 64)], [giant, *small])
    assert result.proven
    assert {sum(counts.values()) for counts in result.allocation.values()} == {16}


def test_identical_bidders_pay_alike_for_alike() -> None:
    result = auction([host(i, 4) for i in range(4)], [app(f"a{i}", demand=8) for i in range(12)])
    assert result.proven
    by_won: dict[int, set[float]] = {}
    for name, counts in result.allocation.items():
        by_won.setdefault(sum(counts.values()), set()).add(round(result.c[name], 9))
    assert all(len(found) == 1 for found in by_won.values())
    assert len({round(value + result.log_v[name], 9) for name, value in result.without.items()}) <= len(by_won)


@pytest.mark.parametrize("t_id", [1e-9, 1.0, 1e9])
@pytest.mark.parametrize("work", [1e-9, 1e9])
def test_values_of_any_size_are_solved_exactly(t_id: float, work: float) -> None:
    apps = [app("a", t_id=t_id, work=work), app("b", work=500.0), app("c", t_id=1.0 / t_id, work=1.0 / work)]
    check_optima([host(0, 2), host(1, 2)], apps)


def test_a_demand_beyond_the_cluster_is_worth_what_the_cluster_gives() -> None:
    vast, fitting = (app("a", demand=demand, slowdown=INSENSITIVE) for demand in (10_000, 6))
    machines = [host(0, 4), host(1, 2)]
    assert auction(machines, [vast]).log_v == pytest.approx(auction(machines, [fitting]).log_v)


# --- homogeneous valuations, as good as divisible -------------------------------------------------------------------


@pytest.mark.parametrize("bidders", [2, 3, 5, 8])
def test_many_gpus_for_values_in_proportion_to_them_are_shared_without_envy(bidders: int) -> None:
    """V = const * k: each gets 1/n, nobody would rather have another's bundle, and c is ((n - 1) / n)^(n - 1).

    *Source:* Cole, Gkatzelis and Goel (EC 2013): the mechanism's guarantee of 1/e for homogeneous valuations.
    """
    total = 840 * 4
    apps = [
        app(f"a{i}", demand=total, work=1e6 * (i + 1), slowdown=INSENSITIVE, elapsed=0.0, t_id=10.0 ** (i - 3))
        for i in range(bidders)
    ]
    result = auction([host(0, total)], apps)
    assert result.proven
    won = {name: sum(counts.values()) for name, counts in result.allocation.items()}
    assert set(won.values()) == {total // bidders}
    assert sorted(result.c.values()) == pytest.approx([((bidders - 1) / bidders) ** (bidders - 1)] * bidders, rel=1e-6)
    assert min(result.c.values()) >= 1.0 / math.e
