"""Each stage of the auction's solver alone: a stage that the ones before it leave nothing to do is still right."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from arbiter.core.policies.themis.auction import kernel
from arbiter.core.policies.themis.auction.exact import patterns, search
from arbiter.core.policies.themis.auction.instance import Entry, enter, parse
from arbiter.core.policies.themis.auction.prices import Pricing
from arbiter.core.policies.themis.auction.problem import (
    CLUSTER,
    MACHINE,
    RACK,
    SLOT,
    Home,
    Machine,
    Map,
    Problem,
    Rows,
    build,
)
from arbiter.core.policies.themis.auction.solve import Budget, solve
from tests.support.auctions import best_value, random_entry, random_round
from tests.support.exact_auctions import Proven, infeasible, proven

pytestmark = pytest.mark.usefixtures("compiled_auction")

#: Those with something to win, every third, so that all kinds are among them.
SET = [case for case in proven() if case.without][::3]
CLOSE = 1e-6


def entered(case: Proven) -> Entry:
    return enter(parse(msgspec.json.encode(case.instance)))


def optimum_of(case: Proven, entry: Entry, skip: int) -> float:
    """The proven sum of gains, of all (-1) or without one."""
    if skip < 0:
        return case.optimum - sum(entry.log_none)
    name = case.instance["apps"][skip]["id"]
    return case.without[name] - sum(entry.log_none) + entry.log_none[skip]


def placed(problem: Problem, picks: np.ndarray, spots: np.ndarray) -> np.ndarray:
    places = len(problem.ground.room)
    out = np.zeros((problem.bidders, places), dtype=np.int64)
    kernel.place_all(problem.ground, problem.options, picks, spots, np.zeros_like(out), out)
    return out


def by_machine(case: Proven, entry: Entry, out: np.ndarray) -> dict[str, dict[str, int]]:
    names = {place: machine for machine, place in entry.places.place_of_machine.items()}
    return {
        app["id"]: {names[place]: int(row[place]) for place in np.flatnonzero(row)}
        for app, row in zip(case.instance["apps"], out, strict=True)
    }


def packed(problem: Problem, chosen: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
    """What packing says of some options, and an allocation of them."""
    options, ground = problem.options, problem.ground
    room = ground.room.copy()
    picks = np.full(problem.bidders, -1, dtype=np.int64)
    wide = max(1, int(options.pieces.max(initial=1)))
    spots = np.full((problem.bidders, wide), -1, dtype=np.int64)
    if not all([kernel.take_fixed(room, ground.parent, options, option, 1) for option in chosen]):  # noqa: C419 - all
        return kernel.NO, picks, spots
    found = np.full((max(1, len(chosen)), wide), -1, dtype=np.int64)
    answer = kernel.pack(ground, room, options, chosen, found, np.zeros(1, dtype=np.int64), 100_000)
    owners = np.searchsorted(options.off, chosen, side="right") - 1
    picks[owners], spots[owners] = chosen, found[: len(chosen)]
    return answer, picks, spots


# --- prices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SET, ids=lambda case: case.name)
def test_no_price_lets_the_bound_fall_below_an_optimum(case: Proven) -> None:
    entry = entered(case)
    pricing = Pricing(entry.problem)
    for skip in (-1, *range(len(case.instance["apps"]))):
        optimum = optimum_of(case, entry, skip)
        own = pricing.prices(skip, -np.inf)
        assert own.bound(skip) >= optimum - CLOSE
        assert own.bound(skip) <= pricing.plain().bound(skip) + CLOSE


def test_scarce_machines_and_racks_get_prices() -> None:
    """The programme closes most of what one price for all GPUs promises too much."""
    too_much, left = 0.0, 0.0
    for case in SET:
        entry = entered(case)
        pricing = Pricing(entry.problem)
        optimum = optimum_of(case, entry, -1)
        too_much += pricing.plain().bound(-1) - optimum
        left += pricing.prices(-1, -np.inf).bound(-1) - optimum
    assert left < 0.75 * too_much


# --- the mixed-integer programme ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SET, ids=lambda case: case.name)
def test_the_programme_finds_the_optimum_from_nothing_and_nothing_above_it(case: Proven) -> None:
    entry = entered(case)
    problem, pricing = entry.problem, Pricing(entry.problem)
    for skip in (-1, 0):
        optimum, priced = optimum_of(case, entry, skip), pricing.prices(skip, -np.inf)
        if optimum > CLOSE:
            found = search(problem, priced, skip, 0.0, np.inf, limit_s=60.0)
            assert problem.options.gain[found.chosen].sum() == pytest.approx(optimum, abs=CLOSE)
            assert found.upper == pytest.approx(optimum, abs=CLOSE)
            answer, picks, spots = packed(problem, found.chosen)
            assert answer == kernel.YES
            assert infeasible(case.instance, by_machine(case, entry, placed(problem, picks, spots))) == []
        none = search(problem, priced, skip, optimum + CLOSE, np.inf, limit_s=60.0)
        assert len(none.chosen) == 0
        assert none.upper <= optimum + 2 * CLOSE


@pytest.mark.parametrize("seed", range(60))
def test_the_programme_knows_gangs_kept_parts_and_named_gpus(seed: int) -> None:
    view, bids = random_round(seed, gpus_max=6)
    problem = random_entry(seed, gpus_max=6).problem
    if len(problem.options.new) == 0 or (problem.options.kind == kernel.ON_SLOT).any():
        assert best_value(view, bids) >= 0.0
        return
    optimum = best_value(view, bids)
    found = search(problem, Pricing(problem).prices(-1, -np.inf), -1, 0.0, np.inf, limit_s=60.0)
    assert found.upper == pytest.approx(optimum, abs=CLOSE)
    assert problem.options.gain[found.chosen].sum() == pytest.approx(optimum, abs=CLOSE)


def test_a_programme_without_time_claims_nothing() -> None:
    case = max(SET, key=lambda case: len(case.instance["apps"]))
    problem = entered(case).problem
    answer = search(problem, Pricing(problem).prices(-1, -np.inf), -1, 0.0, 123.0, limit_s=0.0)
    assert answer.upper <= 123.0
    assert answer.upper >= optimum_of(case, entered(case), -1) - CLOSE


@pytest.mark.parametrize(("free", "sizes"), [(8, [5, 3, 2]), (4, [4, 1]), (7, [6]), (3, [])])
def test_patterns_are_all_ways_to_fill_a_machine_up(free: int, sizes: list[int]) -> None:
    counts = itertools.product(*(range(free // size + 1) for size in sizes))
    rest = {count: free - sum(n * size for n, size in zip(count, sizes, strict=True)) for count in counts}
    full = {count for count, left in rest.items() if left >= 0 and all(size > left for size in sizes)}
    found = list(patterns(free, sizes))
    assert set(found) == full
    assert len(found) == len(full)


# --- repair ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", SET, ids=lambda case: case.name)
def test_repair_makes_allocations_that_fit_and_are_worth_what_it_says(case: Proven) -> None:
    entry = entered(case)
    if len(entry.problem.options.new) == 0:
        return  # With nobody to take out and put back it would never come to its end; the solver does not ask for it.
    problem, plain = entry.problem, Pricing(entry.problem).plain()
    picks = np.full(problem.bidders, -1, dtype=np.int64)
    spots = np.full((problem.bidders, max(1, int(problem.options.pieces.max(initial=1)))), -1, dtype=np.int64)
    work = np.zeros(1, dtype=np.int64)
    value = kernel.repair(
        problem.ground, problem.options, plain.worth, plain.price(-1), -1, picks, spots, 7, np.inf, work, 300_000
    )
    optimum = optimum_of(case, entry, -1)
    assert value == pytest.approx(problem.options.gain[picks[picks >= 0]].sum(), abs=CLOSE)
    assert infeasible(case.instance, by_machine(case, entry, placed(problem, picks, spots))) == []
    assert 0.97 * optimum - CLOSE <= value <= optimum + CLOSE


# --- packing --------------------------------------------------------------------------------------------------------


def random_packing(seed: int) -> tuple[Problem, np.ndarray]:
    """A few machines, and a few bidders with one row each that they all want to have."""
    dice = random.Random(seed)
    machines = [
        Machine(f"m{m}", f"r{dice.randrange(3)}", sum(slots), slots)
        for m in range(dice.randint(2, 5))
        for slots in [tuple(dice.randint(0, 3) for _ in range(2))]
    ]
    total = sum(machine.free for machine in machines)
    rows, gangs = [], []
    while sum(new for new, _ in rows) < total and len(rows) < 6:
        gang = dice.choice((1, 1, 2))
        level = dice.choice((MACHINE, RACK, RACK, CLUSTER) if gang > 1 else (SLOT, MACHINE, RACK, CLUSTER))
        rows.append((gang * dice.randint(1, 4 // gang if level <= MACHINE else 6 // gang), level))
        gangs.append(gang)
    table = Rows(
        np.arange(len(rows)),
        np.array([new for new, _ in rows]),
        np.array([level for _, level in rows]),
        np.ones(len(rows)),
    )
    problem = build(Map(machines), table, [Home()] * len(rows), gangs)
    return problem, np.arange(len(problem.options.new))


def can_pack(problem: Problem, chosen: Sequence[int]) -> bool:  # noqa: C901 - every kind of option once
    """Try everything, GPU groups by slot: the definition, without a thought for speed."""
    options, ground = problem.options, problem.ground
    racks = range(len(ground.rack_off) - 1)

    def inside(machine: int) -> range:
        index = machine - ground.first_machine
        return range(int(ground.slot_off[index]), int(ground.slot_off[index + 1]))

    def machines(rack: int) -> range:
        return range(
            ground.first_machine + int(ground.rack_off[rack]), ground.first_machine + int(ground.rack_off[rack + 1])
        )

    everywhere = [machine for rack in racks for machine in machines(rack)]

    def spend(left: tuple[int, ...], slots: Sequence[int], count: int) -> set[tuple[int, ...]]:
        """All that can be left after `count` GPUs are taken out of these slots."""
        if count == 0:
            return {left}
        if not slots:
            return set()
        results = set()
        for share in range(min(count, left[slots[0]]) + 1):
            after = list(left)
            after[slots[0]] -= share
            results |= spend(tuple(after), slots[1:], count - share)
        return results

    def gangs(left: set[tuple[int, ...]], where: Sequence[int], pieces: int, size: int) -> set[tuple[int, ...]]:
        for _ in range(pieces):
            left = {after for state in left for machine in where for after in spend(state, inside(machine), size)}
        return left

    def all_slots(where: Sequence[int]) -> list[int]:
        return [slot for machine in where for slot in inside(machine)]

    states = {tuple(int(count) for count in ground.room[: ground.first_machine])}
    for option in chosen:
        kind, new = int(options.kind[option]), int(options.new[option])
        pieces, size = int(options.pieces[option]), int(options.size[option])
        match kind:
            case kernel.LOOSE:
                states = {after for state in states for after in spend(state, all_slots(everywhere), new)}
            case kernel.BLOCK:
                states = {
                    after
                    for state in states
                    for rack in racks
                    for after in spend(state, all_slots(machines(rack)), new)
                }
            case kernel.ON_SLOT:
                states = {after for s in states for slot in all_slots(everywhere) for after in spend(s, [slot], size)}
            case kernel.PIECES:
                states = gangs(states, everywhere, pieces, size)
            case kernel.GANGS:
                states = set().union(*(gangs(states, machines(rack), pieces, size) for rack in racks))
    return bool(states)


@pytest.mark.parametrize("first", range(0, 400, 40))
def test_packing_is_what_trying_everything_says(first: int) -> None:
    answers = set()
    for seed in range(first, first + 40):
        problem, chosen = random_packing(seed)
        fits = int(problem.options.new.sum()) <= problem.ground.total
        answer, picks, spots = packed(problem, chosen)
        if fits:
            assert answer == (kernel.YES if can_pack(problem, chosen.tolist()) else kernel.NO), f"seed {seed}"
            answers.add(answer)
        if fits and answer == kernel.YES:
            out = placed(problem, picks, spots)
            assert (out.sum(axis=1)[picks >= 0] == problem.options.new[picks[picks >= 0]]).all(), f"seed {seed}"
    assert answers == {kernel.YES, kernel.NO}


# --- the budget -----------------------------------------------------------------------------------------------------


def test_the_clock_ends_the_search_and_the_bound_stays_true() -> None:
    case = max(SET, key=lambda case: len(case.instance["apps"]))
    entry = entered(case)
    late = itertools.chain([0.0], itertools.repeat(1e9))
    solved = solve(entry.problem, Budget.of(1000.0, lambda: next(late)))
    assert solved.open()
    assert solved.upper >= optimum_of(case, entry, -1) - CLOSE >= solved.value - 2 * CLOSE
