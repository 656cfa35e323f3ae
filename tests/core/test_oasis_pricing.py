"""OASiS's numbers: utilities, prices by hand, schedules against brute force, the offline bound."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence

import numpy as np
import pytest
from msgspec.structs import replace

from arbiter.core.policies.oasis.prices import (
    BELOW,
    IDLE,
    Bounds,
    Priced,
    Seen,
    bounds_of,
    density,
    learnt_bounds,
    prices,
    ratio_bound,
    scaled,
    seen_of,
)
from arbiter.core.policies.oasis.rebooking import GAIN, BookedApp, best_schedule, make_room, price_of
from arbiter.core.policies.oasis.schedule import Deployment, Pool, Prospects, Request, Schedule, Servers, sell
from arbiter.core.policies.oasis.utility import Sigmoid, in_slots
from benchmarks.papers.oasis_optimum import OfflineJob, optimum
from protocol.utility_forms import FORMS, parse

FREE = Bounds((math.log(100.0),), math.log(1.0))
PATIENT = Sigmoid(200.0, 0.0, 0.0)

# --- utilities --------------------------------------------------------------------------------------------------------


def test_the_sigmoid_is_half_its_worth_at_the_target_and_steep_ones_do_not_overflow() -> None:
    assert Sigmoid(50.0, 2.0, 6.0).at(6.0) == pytest.approx(25.0)
    assert Sigmoid(50.0, 2.0, 6.0).at(7.0) == pytest.approx(50.0 / (1.0 + math.exp(2.0)))
    assert Sigmoid(1.0, 6.0, 1.0).log_at(1e6) == pytest.approx(-6.0 * (1e6 - 1.0))
    assert Sigmoid(1.0, 6.0, 1.0).at(1e6) == 0.0


def test_people_write_deadlines_and_the_paper_writes_thetas() -> None:
    paper = in_slots(parse("sigmoid:50,2/h,6h"), slot_s=1800.0, work_gpu_s=1.0)
    assert [paper.worth, paper.decay, paper.target] == pytest.approx([50.0, 1.0, 12.0])
    hard = in_slots(parse("deadline:10h,8"), slot_s=3600.0, work_gpu_s=1.0)
    assert [float(hard.at(at)) for at in (10.0, 11.0)] == pytest.approx([8 * 0.99, 8 * 0.01])
    soft = in_slots(parse("soft:10h,8"), slot_s=3600.0, work_gpu_s=1.0)
    assert [float(soft.at(at)) for at in (0.0, 10.0, 20.0)] == pytest.approx([8 * 0.99, 4.0, 8 * 0.01])
    never = in_slots(parse("none:8"), slot_s=3600.0, work_gpu_s=1.0)
    assert [float(never.at(at)) for at in (0.0, 1e6)] == pytest.approx([8.0, 8.0])
    assert in_slots(parse("deadline:1h"), slot_s=3600.0, work_gpu_s=7200.0).worth == 2.0, "1 for each GPU-hour"


@pytest.mark.parametrize("text", ["", "soon", "deadline", "deadline:x", "soft:0", "sigmoid:1,2", "sigmoid:1,2/y,3h"])
def test_what_is_no_utility_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(ValueError, match="utility"):
        parse(text)


def test_what_the_forms_name_can_be_written() -> None:
    examples = re.findall(r"(?:sigmoid|deadline|soft|none):\d[\w,/]*\w", FORMS)
    assert examples == ["sigmoid:50,2/h,6h", "deadline:6h", "soft:6h", "deadline:6h,50", "none:50"]
    for example in examples:
        parse(example)
    assert "none after a colon" in FORMS
    with pytest.raises(ValueError, match="no utility"):
        parse("none,5")


@pytest.mark.parametrize("text", ["deadline:6", "soft:6,50", "sigmoid:50,2,6h", "sigmoid:50,2/h,6"])
def test_a_time_without_a_unit_is_refused_by_what_is_missing(text: str) -> None:
    with pytest.raises(ValueError, match=r"'[26]' in a utility has no unit of time"):
        parse(text)


# --- prices -----------------------------------------------------------------------------------------------------------


def test_prices_at_empty_half_and_full_by_hand() -> None:
    """Eq. 22 with U = 100 and L = 1: 1 when empty, sqrt(1 * 100) = 10 when half is sold, 100 when all is."""
    capacity = np.array([[8.0]])
    sold = np.array([[[0.0]], [[4.0]], [[8.0]]])
    assert prices(sold, capacity, FREE).ravel() == pytest.approx([1.0, 10.0, 100.0])


def test_bounds_by_hand() -> None:
    """Two jobs that need (2, 1) and (1, 0): U by Eq. 23, L by Eq. 24 with eta of the smaller one."""
    flat = Sigmoid(40.0, 0.0, 0.0)  # worth 20 at any time
    falling = Sigmoid(30.0, 1.0, 4.0)
    jobs = [Priced(flat, 0, 6, 2, (2.0, 1.0)), Priced(falling, 1, 4, 4, (1.0, 0.0))]
    capacity = np.array([[4.0, 2.0], [4.0, 2.0]])
    bounds = bounds_of(jobs, capacity, horizon=10)
    assert bounds is not None
    # 20 / 2 against f(4) = 15 over 1; of the second resource 20 / 1.
    assert np.exp(bounds.log_upper) == pytest.approx([15.0, 20.0])
    # Takes: 6 * 3 = 18 and 4; 1 / eta = 4 / (10 * 12); L = min(20 / (4 eta 18), f(9) / (4 eta 4)).
    eta = 10.0 * 12.0 / 4.0
    least = min(20.0 / (4 * eta * 18), 30.0 / (1 + math.exp(5.0)) / (4 * eta * 4))
    assert math.exp(bounds.log_lower) == pytest.approx(least)


def test_bounds_stay_finite_for_jobs_worth_nothing_at_the_horizon_and_a_floor_lifts_them() -> None:
    urgent = Priced(Sigmoid(50.0, 6.0, 3.0), 0, 8, 2, (1.0,))
    capacity = np.array([[8.0]])
    exact, lifted = (bounds_of([urgent], capacity, horizon=300, least=least) for least in (0.0, 0.001))
    assert exact is not None
    assert lifted is not None
    assert exact.log_lower < -1700.0
    assert lifted.log_lower == pytest.approx(exact.log_upper[0] + math.log(0.001) - math.log(4 * 300 * 8))
    assert np.isfinite(prices(np.array([[[7.0]]]), capacity, exact)).all()
    assert ratio_bound([FREE]) == pytest.approx(2 * math.log(100.0))


def test_the_density_of_a_job_is_its_worth_for_each_slot_of_a_worker_and_part_of_a_server() -> None:
    """Worth 20 at any time, for 5 slots of a worker that takes a half and a quarter: 20 / (5 * 0.75)."""
    job = Priced(Sigmoid(40.0, 0.0, 0.0), 0, 5.0, 2, (0.5, 0.25))
    assert math.exp(density(job)) == pytest.approx(20.0 / 3.75)
    assert seen_of(job) == Seen(density(job), 3.75)


def test_prices_are_to_clear_the_market() -> None:
    """Work of densities 1, 2, 3 in parts 1 : 2 : 1; of a load of 0.7, half of the work is to pay too much: up to 2."""
    seen = [Seen(math.log(value), takes) for value, takes in ((3.0, 1.0), (1.0, 1.0), (2.0, 2.0))]
    busy_, idle = (learnt_bounds(seen, load=load, kinds=2) for load in (0.7, 0.125))
    assert busy_ is not None
    assert idle is not None
    assert busy_.log_lower == pytest.approx(math.log(2.0) - BELOW)
    assert busy_.log_upper[0] == busy_.log_upper[1] == pytest.approx(0.2 * math.log(2.0) + 0.8 * math.log(3.0))
    assert idle.log_lower == pytest.approx(math.log(1.0) - BELOW - 0.75 * IDLE)
    assert learnt_bounds([Seen(-math.inf, 1.0)], load=1.0, kinds=2) is None


def test_bounds_may_be_scaled() -> None:
    assert np.exp(scaled(FREE, upper=2.0, lower=0.5).log_upper) == pytest.approx([200.0])
    assert math.exp(scaled(FREE, upper=2.0, lower=0.5).log_lower) == pytest.approx(0.5)


def test_what_a_server_has_none_of_is_sold_out_and_what_nobody_needs_costs_nothing() -> None:
    capacity = np.array([[8.0, 0.0]])
    bounds = Bounds((math.log(100.0), -math.inf), 0.0)
    assert prices(np.zeros((1, 1, 2)), capacity, bounds).ravel() == pytest.approx([1.0, 0.0])
    pool = Pool.empty(capacity, 1, bounds)
    assert pool.offer((1.0, 1.0), slice(0, 1))[1].ravel().tolist() == [0]


# --- schedules --------------------------------------------------------------------------------------------------------


def random_pool(dice: np.random.Generator, slots: int, servers: int, kinds: int = 2) -> Pool:
    capacity = dice.integers(1, 5, (servers, kinds)).astype(float)
    sold = np.floor(dice.random((slots, servers, kinds)) * (capacity + 0.5))
    return Pool(capacity, sold, Bounds(tuple(dice.uniform(1.0, 4.0, kinds)), float(dice.uniform(-2.0, 0.5))))


def brute_force(request: Request, workers: Pool, servers: Pool | None) -> float:
    """The greatest payoff over every way to deploy any accepted count on any servers in every slot."""
    slots = len(workers.sold)
    offers = [options(request, workers, servers, slot) for slot in range(request.arrival, slots)]
    best = -math.inf
    for end in range(len(offers)):
        utility = float(request.sigmoid.at(end + 1.0 + request.waited))
        for choice in itertools.product(*offers[: end + 1]):
            if sum(units for units, _ in choice) >= request.work:
                best = max(best, utility - sum(cost for _, cost in choice))
    return best


def options(request: Request, workers: Pool, servers: Pool | None, slot: int) -> list[tuple[int, float]]:
    """Units and least cost of each accepted count in a slot, every division over the servers tried."""
    first = slot == request.arrival and request.first_units
    found = [(0, 0.0)]
    for count, units in zip(request.counts, request.first_units if first else request.units, strict=True):
        cost = cheapest(workers, request.demand, slot, count, alone=request.one_server)
        if request.servers is not None:
            assert servers is not None
            needed = math.ceil(count * request.servers.per_worker - 1e-9)
            cost += cheapest(servers, request.servers.demand, slot, needed) if needed <= count else math.inf
        if math.isfinite(cost):
            found.append((units, cost * (request.first_part if first else 1.0)))
    return found


def cheapest(pool: Pool, demand: tuple[float, ...], slot: int, count: int, *, alone: bool = False) -> float:
    each = prices(pool.sold[slot], pool.capacity, pool.bounds) @ np.array(demand)
    left = pool.capacity - pool.sold[slot]
    best = math.inf
    for split in itertools.product(range(count + 1), repeat=len(pool.capacity)):
        if sum(split) != count or (alone and sum(number > 0 for number in split) > 1):
            continue
        if all(
            number * need <= have + 1e-9
            for number, row in zip(split, left, strict=True)
            for need, have in zip(demand, row, strict=True)
        ):
            best = min(best, float(np.dot(split, each)))
    return best


def random_request(dice: np.random.Generator, kind: str) -> Request:
    counts = (1, 2, 3) if kind in ("plain", "servers", "alone") else (1, 2, 4)
    per_worker = tuple(sorted(dice.integers(1, 4, 3).cumsum().tolist())) if kind == "uneven" else counts
    demand = tuple(float(need) for need in dice.integers(0, 3, 2)) if kind != "alone" else (1.0, 0.0)
    return Request(
        arrival=int(dice.integers(0, 2)),
        work=int(dice.integers(1, 7)),
        counts=counts,
        units=per_worker,
        demand=demand if any(demand) else (1.0, 0.0),
        sigmoid=Sigmoid(float(dice.uniform(1, 100)), float(dice.uniform(0, 2)), float(dice.uniform(1, 5))),
        servers=Servers((1.0, 1.0), float(dice.uniform(0.2, 1.1))) if kind == "servers" else None,
        first_units=tuple(units // 2 for units in per_worker) if kind == "late" else (),
        first_part=0.6 if kind == "late" else 1.0,
        one_server=kind == "alone",
        waited=float(dice.integers(0, 2)) if kind == "late" else 0.0,
    )


@pytest.mark.parametrize("kind", ["plain", "uneven", "servers", "alone", "late"])
def test_schedules_equal_brute_force_on_small_random_instances(kind: str) -> None:
    feasible = 0
    for seed in range(60):
        dice = np.random.default_rng([seed, len(kind)])
        slots = 4
        workers, servers = random_pool(dice, slots, 3), random_pool(dice, slots, 2)
        request = random_request(dice, kind)
        truth = brute_force(request, workers, servers)
        found = Prospects(request, workers, servers).best()
        if found is None:
            assert truth == -math.inf, f"seed {seed}"
            continue
        feasible += 1
        assert found.payoff == pytest.approx(truth, rel=1e-9, abs=1e-9), f"seed {seed}"
        assert_is_what_it_says(found, request, workers, servers)
        pruned = Prospects(request, workers, servers, pruned=True).best()
        if truth > 1e-9:
            assert pruned is not None
            assert pruned.payoff == pytest.approx(truth), f"seed {seed}"
    assert feasible > 20, "most of these instances say nothing"


def assert_is_what_it_says(schedule: Schedule, request: Request, workers: Pool, servers: Pool) -> None:
    """A schedule does the work with counts it accepts, costs what it says, and fits."""
    done, cost = 0, 0.0
    for slot in schedule.slots:
        first = slot.slot == request.arrival and request.first_units
        done += dict(zip(request.counts, request.first_units if first else request.units, strict=True))[slot.count]
        each = prices(workers.sold[slot.slot], workers.capacity, workers.bounds) @ np.array(request.demand)
        part = request.first_part if first else 1.0
        cost += sum(each[server] * count for server, count in slot.workers) * part
        if request.servers is not None:
            each = prices(servers.sold[slot.slot], servers.capacity, servers.bounds) @ np.array(request.servers.demand)
            cost += sum(each[server] * count for server, count in slot.servers)
            assert sum(count for _, count in slot.servers) >= slot.count * request.servers.per_worker - 1e-9
    assert done >= request.work
    assert cost == pytest.approx(schedule.cost)
    before, before_servers = workers.sold.copy(), servers.sold.copy()
    sell(schedule.slots, request, workers, servers)
    assert (workers.sold <= workers.capacity + 1e-9).all() or (before > workers.capacity).any()
    assert (servers.sold <= servers.capacity + 1e-9).all()
    workers.sold, servers.sold = before, before_servers


def test_both_ways_to_the_least_cost_agree_where_both_apply() -> None:
    for seed in range(30):
        dice = np.random.default_rng(seed)
        workers = random_pool(dice, 12, 4)
        request = replace(random_request(dice, "plain"), work=int(dice.integers(1, 20)))
        convex = Prospects(request, workers)
        rows = Prospects(replace(request, first_units=request.units), workers)
        assert convex.costs == pytest.approx(rows.costs), f"seed {seed}"


# --- answers ----------------------------------------------------------------------------------------------------------


def busy(part: float) -> Pool:
    return Pool(np.array([[8.0]]), np.full((6, 1, 1), 8.0 * part), FREE)


def asking(worth: float, **changes: object) -> Request:
    known: dict[str, object] = {
        "arrival": 0,
        "work": 4,
        "counts": (1, 2, 3, 4),
        "units": (1, 2, 3, 4),
        "demand": (1.0,),
        "sigmoid": Sigmoid(worth, 1.0, 3.0),
    }
    return Request(**(known | changes))  # type: ignore[arg-type]


def test_a_job_pays_by_hand() -> None:
    """Half is sold, so a worker-slot costs 10 and four of them 40; at once f(1) = worth / (1 + e^-2) is 0.88 worth."""
    found = Prospects(asking(100.0), busy(0.5)).best()
    assert found is not None
    assert (found.end, found.slots[0].workers) == (0, ((0, 4),))
    assert found.payoff == pytest.approx(100.0 / (1.0 + math.exp(-2.0)) - 40.0)
    poor = Prospects(asking(40.0), busy(0.5)).best()
    assert poor is not None
    assert poor.payoff < 0


# --- the offline optimum ----------------------------------------------------------------------------------------------


def random_instance(seed: int) -> tuple[list[OfflineJob], np.ndarray, np.ndarray | None]:
    dice = np.random.default_rng(seed)
    jobs = []
    with_servers = seed % 2 == 1
    for _ in range(int(dice.integers(2, 6))):
        worth, decay, target = dice.uniform(1, 100), dice.choice([0.0, 0.5, 2.0]), dice.uniform(1, 5)
        jobs.append(
            OfflineJob(
                arrival=int(dice.integers(0, 3)),
                work=float(dice.integers(1, 8)),
                workers_max=int(dice.integers(1, 4)),
                demand=(float(dice.integers(1, 3)), float(dice.integers(0, 3))),
                sigmoid=Sigmoid(float(worth), float(decay), float(target)),
                server_demand=(1.0,) if with_servers else (),
                per_worker=0.5 if with_servers else 0.0,
            )
        )
    return jobs, np.array([[4.0, 4.0], [3.0, 5.0]]), np.array([[3.0]]) if with_servers else None


def online(
    jobs: list[OfflineJob], capacity: np.ndarray, server_capacity: np.ndarray | None, slots: int
) -> tuple[float, list[Bounds]]:
    """Admit jobs as they come at prices with the true U and L; return the total utility."""
    priced = [
        Priced(job.sigmoid, job.arrival, math.ceil(job.work), math.ceil(job.work / job.workers_max), job.demand)
        for job in jobs
    ]
    bounds = bounds_of(priced, capacity, horizon=slots)
    assert bounds is not None
    pools = [Pool.empty(capacity, slots, bounds)]
    if server_capacity is not None:
        of_servers = [replace(each, demand=job.server_demand) for each, job in zip(priced, jobs, strict=True)]
        more = bounds_of(of_servers, server_capacity, horizon=slots)
        assert more is not None
        pools.append(Pool.empty(server_capacity, slots, more))
    total = 0.0
    for job in sorted(jobs, key=lambda job: job.arrival):
        counts = tuple(range(1, job.workers_max + 1))
        served = Servers(job.server_demand, job.per_worker) if server_capacity is not None else None
        request = Request(job.arrival, math.ceil(job.work), counts, counts, job.demand, job.sigmoid, served)
        found = Prospects(request, *pools).best()
        if found is not None and found.payoff > 0:
            total += found.utility
            sell(found.slots, request, *pools)
    assert all((pool.sold <= pool.capacity + 1e-9).all() for pool in pools)
    return total, [pool.bounds for pool in pools]


def test_the_competitive_bound_is_never_violated_on_random_instances() -> None:
    ratios = []
    for seed in range(24):
        jobs, capacity, server_capacity = random_instance(seed)
        total, bounds = online(jobs, capacity, server_capacity, 6)
        best = optimum(jobs, slots=6, capacity=capacity, server_capacity=server_capacity)
        assert best.proven, f"seed {seed}"
        assert total <= best.utility * (1 + 1e-6) + 1e-9, f"seed {seed}: {total} beats {best.utility}"
        assert best.utility <= ratio_bound(bounds) * total, f"seed {seed}: {best.utility} over {total}"
        ratios.append(best.utility / total)
    assert max(ratios) > 1.0 + 1e-3, "not one of these instances is hard"


def test_the_offline_optimum_of_a_case_by_hand() -> None:
    """One server, one job at a time: the job worth more goes first and the other still ends in time for a half."""
    capacity = np.array([[1.0]])
    jobs = [
        OfflineJob(0, 1.0, 1, (1.0,), Sigmoid(10.0, 0.0, 0.0)),
        OfflineJob(0, 1.0, 1, (1.0,), Sigmoid(10.0, 50.0, 1.5)),
    ]
    best = optimum(jobs, slots=3, capacity=capacity)
    assert best.utility == pytest.approx(15.0)
    assert best.ends[1] == 0
    assert best.ends[0] in (1, 2)


# --- a second look ----------------------------------------------------------------------------------------------------


def _rebuilt(pool: Pool, all_: Sequence[tuple[Request, Schedule]]) -> Pool:
    again = Pool.empty(pool.capacity, len(pool.sold), pool.bounds)
    for request, schedule in all_:
        sell(schedule.slots, request, again)
    return again


@pytest.mark.parametrize("seed", range(40))
def test_room_is_made_only_where_all_are_worth_more_and_nobody_gets_less_than_it_was_promised(seed: int) -> None:
    dice = np.random.default_rng([seed, 77])
    one_server = bool(dice.integers(2))
    pool = Pool.empty(np.full((2, 1), 4.0), 8, Bounds((math.log(30.0),), math.log(0.5)))
    homes = ((0,), (1,)) if one_server else ()

    def drawn() -> Request:
        sigmoid = Sigmoid(float(dice.uniform(5, 80)), float(dice.choice([0.0, 2.0])), float(dice.uniform(1, 5)))
        return Request(
            arrival=0,
            work=int(dice.integers(2, 14)),
            counts=(1, 2, 4),
            units=(1, 2, 4),
            demand=(1.0,),
            sigmoid=sigmoid,
            one_server=one_server,
        )

    held: list[tuple[Request, Schedule]] = []
    while len(held) < 4:
        found, _ = best_schedule(request := drawn(), homes, (pool, None))
        if found is None or found.payoff <= 0.0:
            break
        sell(found.slots, request, pool)
        held.append((request, found))
    booked = [
        BookedApp(request, each.slots, each.utility, 0.6 * each.utility, each.utility / request.work, homes)
        for request, each in held
    ]
    newcomer, sold = drawn(), pool.sold.copy()
    first, _ = best_schedule(newcomer, homes, (pool, None))
    room = make_room(newcomer, booked, (pool, None), first)
    assert (pool.sold == sold).all(), "the pool is as it was"
    if room is None:
        return
    moved = dict(room.moved)
    after = [(request, moved.get(place, each)) for place, (request, each) in enumerate(held)]
    assert (_rebuilt(pool, [*after, (newcomer, room.schedule)]).sold <= pool.capacity + 1e-9).all()
    assert all(each.utility >= 0.6 * old.utility for (_, each), (_, old) in zip(after, held, strict=True))
    for request, each in (*after, (newcomer, room.schedule)):
        assert sum(slot.count for slot in each.slots) >= request.work
        assert not one_server or all(len(slot.workers) == 1 for slot in each.slots)
    # What it brings, in payoffs at the prices of those who are not moved.
    without = _rebuilt(pool, [each for place, each in enumerate(held) if place not in moved])

    def payoffs(in_turn: Sequence[tuple[Request, Schedule]]) -> float:
        trial, total = Pool(without.capacity, without.sold.copy(), without.bounds), 0.0
        for request, each in in_turn:
            cost = price_of(BookedApp(request, each.slots, 0.0, 0.0, 0.0), (trial, None))
            sell(each.slots, request, trial)
            total += each.utility - cost
        return total

    turn = [place for place, _ in room.moved]
    before = payoffs([held[place] for place in turn]) + max(0.0, first.payoff if first else 0.0)
    assert (
        payoffs([(newcomer, room.schedule), *((held[place][0], moved[place]) for place in turn)])
        > before + GAIN * room.schedule.utility
    )


def test_room_is_made_for_who_is_urgent_by_who_loses_nothing_and_not_by_who_would() -> None:
    pool = Pool.empty(np.full((1, 1), 4.0), 4, Bounds((math.log(30.0),), math.log(0.5)))
    patient = Request(0, 8, (1, 2, 4), (1, 2, 4), (1.0,), Sigmoid(60.0, 0.0, 0.0))
    urgent = Request(0, 4, (4,), (4,), (1.0,), Sigmoid(60.0, 50.0, 1.5))
    pool.sold[:2] = 4.0
    held = BookedApp(patient, (Deployment(0, ((0, 4),)), Deployment(1, ((0, 4),))), 30.0, 30.0, 1.0)
    room = make_room(urgent, [held], (pool, None), None)
    assert room is not None
    assert [slot.slot for slot in room.schedule.slots] == [0]
    assert {slot.slot for slot in room.moved[0][1].slots} <= {1, 2, 3}
    assert make_room(urgent, [replace(held, least=31.0)], (pool, None), None) is None


def test_the_price_of_what_is_booked_is_that_of_what_is_left_of_the_slot_that_has_begun() -> None:
    pool = Pool.empty(np.full((1, 1), 4.0), 3, Bounds((math.log(16.0),), 0.0))
    pool.sold[1, 0, 0] = 2.0
    request = Request(0, 4, (1, 2), (1, 2), (1.0,), Sigmoid(10.0, 0.0, 0.0), first_units=(0, 1), first_part=0.5)
    slots = (Deployment(0, ((0, 2),)), Deployment(1, ((0, 1),)))
    assert price_of(BookedApp(request, slots, 5.0, 0.0, 1.0), (pool, None)) == pytest.approx(0.5 * 2 * 1.0 + 4.0)


def test_no_room_is_made_for_next_to_nothing_nor_beyond_the_work_that_may_be_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Worth 61 in the first slot and 59 or 40 in the second, which is free."""
    pool = Pool.empty(np.full((1, 1), 4.0), 4, Bounds((math.log(30.0),), math.log(0.5)))
    pool.sold[0] = 4.0
    held = BookedApp(
        Request(0, 4, (4,), (4,), (1.0,), Sigmoid(60.0, 0.0, 0.0)), (Deployment(0, ((0, 4),)),), 30.0, 30.0, 1.0
    )
    for later, moves in ((59.0, False), (40.0, True)):
        decay = 2.0
        target = 2.0 + math.log(later / (62.0 - later)) / decay
        comer = Request(0, 4, (4,), (4,), (1.0,), Sigmoid(62.0, decay, target))
        first, _ = best_schedule(comer, (), (pool, None))
        assert first is not None
        assert first.utility == pytest.approx(later)
        assert (make_room(comer, [held], (pool, None), first) is not None) is moves
    monkeypatch.setattr("arbiter.core.policies.oasis.rebooking.CELLS_MAX", 1.0)
    assert make_room(comer, [held], (pool, None), first) is None
