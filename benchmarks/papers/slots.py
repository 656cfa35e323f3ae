"""OASiS's own model, slot by slot: jobs with workers and parameter servers, hosts, and the algorithms compared.

Jobs are drawn from the ranges that PAPERS.md section 5 recalls. What it leaves open is chosen here and nowhere else:

- a slot is an hour; tau is drawn log-uniformly; (E, M, tau) are drawn again until the job can end by its target with
  all its N workers (uniform draws would make most jobs last beyond the horizon however many workers they had, and no
  algorithm could be told from another); jobs come uniformly within the first 80 % of the horizon;
- a worker host has 8 GPUs, 64 CPUs, 256 GB and 25 Gb/s, a host of parameter servers 64 CPUs, 256 GB and 50 Gb/s;
- the fixed number of workers of a job under FIFO, DRF and RRH is as many as would end it by its target if it started
  at once, a user's sensible choice ("enough"); or 1 to 30 drawn uniformly ("drawn").

FIFO serves in order of arrival, whole numbers of workers, nobody overtakes. DRF fills progressively, worker by worker,
anew in every slot. RRH admits a job on arrival if its reward is positive, and starts those that wait in order of their
reward (`pricing.reward`). Dorm partitions anew when a job has come or gone (`pricing.dorm`), from one worker to N. All
may move workers between hosts in every slot for nothing. A chunk that a slot does not finish goes on in the next; the
paper's Algorithm 2 begins it again, which would cost OASiS alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from arbiter.core.policies.oasis.dorm_partition import AppDemand, dominant, partition
from arbiter.core.policies.oasis.prices import Bounds, Priced, bounds_of, density, learnt_bounds, scaled, seen_of
from arbiter.core.policies.oasis.rebooking import BookedApp, best_schedule, make_room
from arbiter.core.policies.oasis.reward import Candidate, rewards
from arbiter.core.policies.oasis.schedule import Pool, Request, Schedule, Servers, sell
from arbiter.core.policies.oasis.settings import Terms
from arbiter.core.policies.oasis.utility import Sigmoid
from benchmarks.papers.oasis_optimum import OfflineJob

Floats = NDArray[np.float64]

WORKER_HOST = (8.0, 64.0, 256.0, 25.0)  #: GPUs, CPUs, GB, Gb/s
SERVER_HOST = (0.0, 64.0, 256.0, 50.0)
SLOT_S = 3600.0
FIXED_MOST = 30
ARRIVING = 0.8


class Draw(Struct, frozen=True):
    """What is drawn: so many jobs over so many slots, on so many hosts of each kind, at which sizes."""

    jobs: int
    slots: int = 100
    hosts: int = 50
    epochs: tuple[int, int] = (50, 200)
    chunks: tuple[int, int] = (5, 100)
    batches: tuple[int, int] = (10, 100)
    tau: tuple[float, float] = (0.001, 0.1)
    targets: tuple[float, float] = (1.0, 15.0)
    servers: bool = True  #: whether there are parameter servers


class SlotJob(Struct, frozen=True):
    """One job; `chunk` is M (tau + 2e/b), the slots of one worker for one chunk, `units` is E N, the chunks to do."""

    arrival: int
    units: int
    chunk: float
    workers_max: int
    demand: tuple[float, ...]
    sigmoid: Sigmoid
    fixed: int
    servers: Servers | None = None

    @property
    def work(self) -> float:
        """Slots of one worker that it takes."""
        return self.units * self.chunk

    @property
    def fewest(self) -> int:
        """Slots in which it ends with all its workers."""
        return math.ceil(self.work / self.workers_max - 1e-9)


class Ended(Struct, frozen=True):
    """What became of a job: its utility, the slots it took (None: it never ended), and the decision's time."""

    utility: float
    took: int | None
    decided_s: float = 0.0


def draw(plan: Draw, seed: int, *, fixed: str = "enough") -> list[SlotJob]:
    """Return the jobs, by arrival."""
    dice = np.random.default_rng([seed, 5])
    jobs = [_job(plan, dice, fixed) for _ in range(plan.jobs)]
    return sorted(jobs, key=lambda job: job.arrival)


def _job(plan: Draw, dice: np.random.Generator, fixed: str) -> SlotJob:
    kind = dice.random()
    decay = 0.0 if kind < 0.1 else dice.uniform(0.01, 1.0) if kind < 0.65 else dice.uniform(4.0, 6.0)
    sigmoid = Sigmoid(float(dice.uniform(1, 100)), float(decay), float(dice.uniform(*plan.targets)))
    while True:
        epochs, chunks, batches = (
            int(dice.integers(low, high + 1)) for low, high in (plan.epochs, plan.chunks, plan.batches)
        )
        tau = float(np.exp(dice.uniform(*np.log(plan.tau))))
        megabytes, speed, server_speed = dice.uniform(30, 575), dice.uniform(0.1, 5.0), dice.uniform(5.0, 20.0)
        exchange = 2.0 * megabytes * 8e6 / (speed * 1e9) / SLOT_S
        chunk = batches * (tau + exchange)
        if epochs * chunk <= max(1.0, math.floor(sigmoid.target)) and math.ceil(chunk) <= chunks:
            break
    of_worker = (float(dice.integers(0, 5)), float(dice.integers(1, 11)), float(dice.integers(2, 33)), float(speed))
    of_server = (0.0, float(dice.integers(1, 11)), float(dice.integers(2, 33)), float(server_speed))
    demand, server = parts(WORKER_HOST, of_worker), parts(SERVER_HOST, of_server)
    enough = math.ceil(epochs * chunks * chunk / max(1.0, math.floor(sigmoid.target)))
    drawn = int(dice.integers(1, FIXED_MOST + 1))
    job = SlotJob(
        arrival=int(dice.integers(0, max(1, int(plan.slots * ARRIVING)))),
        units=epochs * chunks,
        chunk=chunk,
        workers_max=chunks,
        demand=demand,
        sigmoid=sigmoid,
        fixed=min(chunks, enough if fixed == "enough" else drawn),
    )
    return replace(job, servers=Servers(server, float(speed / server_speed))) if plan.servers else job


def hosts_of(plan: Draw) -> tuple[Floats, Floats]:
    """Return what the hosts of workers and those of parameter servers have."""
    servers = np.tile([float(amount > 0) for amount in SERVER_HOST], (plan.hosts, 1))
    return np.ones((plan.hosts, len(WORKER_HOST))), servers


def parts(host: Sequence[float], demand: Sequence[float]) -> tuple[float, ...]:
    """Return a demand in parts of a host, so that one unit of price serves all resources."""
    return tuple(need / have if have else 0.0 for need, have in zip(demand, host, strict=True))


# --- OASiS ------------------------------------------------------------------------------------------------------------


def request_of(job: SlotJob) -> Request:
    """Return a job as OASiS schedules it, by slots of one worker: a chunk that is not done goes on in the next slot."""
    counts = tuple(range(1, job.workers_max + 1))
    return Request(
        arrival=job.arrival,
        work=math.ceil(job.work - 1e-9),
        counts=counts,
        units=counts,
        demand=job.demand,
        sigmoid=job.sigmoid,
        servers=job.servers,
    )


def priced(jobs: Sequence[SlotJob]) -> tuple[list[Priced], list[Priced]]:
    """Return what of jobs bounds the prices of both kinds of hosts."""
    of_workers = [Priced(job.sigmoid, job.arrival, math.ceil(job.work), job.fewest, job.demand) for job in jobs]
    of_servers = [
        replace(each, demand=job.servers.demand)
        for each, job in zip(of_workers, jobs, strict=True)
        if job.servers is not None
    ]
    return of_workers, of_servers


def printed_bounds(jobs: Sequence[SlotJob], plan: Draw, least: float = 0.0) -> tuple[Bounds, Bounds]:
    """Return U and L as printed, Eq. 23 to 26."""
    capacities = hosts_of(plan)
    found = [
        bounds_of(each, capacity, horizon=plan.slots, least=least)
        for each, capacity in zip(priced(jobs), capacities, strict=True)
    ]
    assert found[0] is not None
    return found[0], found[1] or found[0]


def learnt(jobs: Sequence[SlotJob], plan: Draw) -> tuple[Bounds, Bounds]:
    """Return U and L as the policy `oasis` learns them from jobs seen, of the resource that is asked for most."""
    found = []
    for some in priced(jobs):
        takes = [np.array(each.demand) * each.work for each in some]
        load = float(np.sum(takes, axis=0).max()) / (plan.slots * plan.hosts) if some else 0.0
        found.append(learnt_bounds([seen_of(each) for each in some], load=load, kinds=len(WORKER_HOST)))
    assert found[0] is not None
    return found[0], found[1] or found[0]


class Entered(Struct):
    """A job that was admitted: what it was told it would be worth, and all its slots."""

    number: int
    job: SlotJob
    request: Request
    told: float
    schedule: Schedule

    def booked(self, now: int, promise: float) -> BookedApp:
        """Return it as it would ask now for the rest of its work."""
        done = sum(slot.count for slot in self.schedule.slots if slot.slot < now)
        request = replace(
            self.request, arrival=now, work=self.request.work - done, waited=float(now - self.request.arrival)
        )
        ahead = tuple(slot for slot in self.schedule.slots if slot.slot >= now)
        (priced_,), _ = priced([replace(self.job, servers=None)])
        return BookedApp(request, ahead, self.schedule.utility, promise * self.told, density(priced_))

    def ended(self) -> Ended:
        """Return what becomes of it."""
        return Ended(self.schedule.utility, self.schedule.end + 1 - self.job.arrival)


def oasis(
    jobs: Sequence[SlotJob],
    plan: Draw,
    bounds: tuple[Bounds, Bounds],
    *,
    factor: float = 1.0,
    promise: float | None = Terms().promise,
) -> list[Ended]:
    """Return what becomes of the jobs under OASiS, U and L being `factor` times what `bounds` say.

    Those that are booked keep the part `promise` of what they were told when others come; None: they are never moved,
    as published.
    """
    workers, servers = (
        Pool.empty(capacity, plan.slots, scaled(each, upper=factor, lower=factor))
        for capacity, each in zip(hosts_of(plan), bounds, strict=True)
    )
    ended = []
    entered: list[Entered] = []
    for number, job in enumerate(jobs):
        began = time.perf_counter()
        request = request_of(job)
        entered = [each for each in entered if each.schedule.end >= job.arrival]
        found, _ = best_schedule(request, (), (workers, servers), pruned=True)
        if promise is not None:
            booked = [each.booked(job.arrival, promise) for each in entered]
            room = make_room(request, booked, (workers, servers), found)
            if room is not None:
                for place, anew in room.moved:
                    sell(booked[place].slots, booked[place].request, workers, servers, back=True)
                    past = tuple(slot for slot in entered[place].schedule.slots if slot.slot < job.arrival)
                    entered[place].schedule = replace(anew, slots=past + anew.slots)
                for place, anew in room.moved:
                    sell(anew.slots, booked[place].request, workers, servers)
                    ended[entered[place].number] = replace(
                        entered[place].ended(), decided_s=ended[entered[place].number].decided_s
                    )
                found = room.schedule
        took_s = time.perf_counter() - began
        if found is None or found.payoff <= 0.0:
            ended.append(Ended(0.0, None, took_s))
            continue
        sell(found.slots, request, workers, servers)
        entered.append(Entered(number, job, request, found.utility, found))
        ended.append(replace(entered[-1].ended(), decided_s=took_s))
    for pool in (workers, servers):
        assert (pool.sold <= pool.capacity + 1e-6).all(), "more is sold than there is"
    return ended


# --- the others: in each slot, who gets how many workers --------------------------------------------------------------


class Hosts:
    """The hosts of one slot while workers and parameter servers are put on them."""

    def __init__(self, workers: Floats, servers: Floats) -> None:
        self._workers = workers.copy()
        self._servers = servers.copy()

    def put(self, job: SlotJob, count: int) -> int:
        """Put up to `count` workers with their parameter servers on the first hosts that have room; return how many."""
        room = _room(self._workers, job.demand)
        count = min(count, int(room.sum()))
        needed = 0
        if job.servers is not None and count:
            servers = _room(self._servers, job.servers.demand)
            able = int(servers.sum())
            while count and (job.servers.needed(count) > able or job.servers.needed(count) > count):
                count -= 1
            needed = job.servers.needed(count)
            _fill(self._servers, servers, job.servers.demand, needed)
        _fill(self._workers, room, job.demand, count)
        return count

    def fits(self, job: SlotJob, count: int) -> bool:
        """Whether so many workers have room."""
        enough = int(_room(self._workers, job.demand).sum()) >= count
        if job.servers is None or not enough:
            return enough
        return int(_room(self._servers, job.servers.demand).sum()) >= job.servers.needed(count)


def _room(free: Floats, demand: Sequence[float]) -> NDArray[np.int64]:
    needed = [(kind, need) for kind, need in enumerate(demand) if need > 0]
    rooms = [np.floor((free[:, kind] + 1e-9) / need) for kind, need in needed]
    return np.asarray(np.maximum(0, np.min(rooms, axis=0)), dtype=np.int64)


def _fill(free: Floats, room: NDArray[np.int64], demand: Sequence[float], count: int) -> None:
    before = np.cumsum(room) - room
    taken = np.clip(count - before, 0, room)
    free -= taken[:, None] * np.array(demand)


class Live(Struct):
    """A job that has come and not ended."""

    number: int
    job: SlotJob
    left: float
    has: int = 0


class Moment(Struct, frozen=True):
    """A slot: the jobs that have come and not ended, and the hosts, which are empty again."""

    slot: int
    live: list[Live]
    hosts: Hosts
    plan: Draw


#: Puts workers on the hosts; answers how many each job got.
Algorithm = Callable[[Moment], dict[int, int]]


def play(jobs: Sequence[SlotJob], plan: Draw, algorithm: Algorithm) -> list[Ended]:
    """Return what becomes of the jobs under an algorithm."""
    ended = [Ended(0.0, None) for _ in jobs]
    live: list[Live] = []
    workers, servers = hosts_of(plan)
    for slot in range(plan.slots):
        live += [Live(number, job, job.work) for number, job in enumerate(jobs) if job.arrival == slot]
        given = algorithm(Moment(slot, live, Hosts(workers, servers), plan))
        for each in live:
            each.has = given.get(each.number, 0)
            each.left -= each.has
            if each.left <= 1e-6:
                took = slot + 1 - each.job.arrival
                ended[each.number] = Ended(float(each.job.sigmoid.at(float(took))), took)
        live = [each for each in live if each.left > 1e-6]
    return ended


def fifo(moment: Moment) -> dict[int, int]:
    """Those that run, then those that wait as they came, until one does not fit."""
    given = {}
    for each in sorted(moment.live, key=lambda each: (each.has == 0, each.number)):
        if not moment.hosts.fits(each.job, each.job.fixed):
            break
        given[each.number] = moment.hosts.put(each.job, each.job.fixed)
    return given


def drf(moment: Moment) -> dict[int, int]:
    """One worker after the other to the job with the smallest dominant share."""
    total = tuple(float(each) for each in hosts_of(moment.plan)[0].sum(axis=0))
    counts = {each.number: 0 for each in moment.live}
    able = {each.number: each for each in moment.live}
    while able:
        number = min(able, key=lambda key: (counts[key] * dominant(able[key].job.demand, total), key))
        each = able[number]
        if counts[number] < each.job.fixed and moment.hosts.put(replace_servers(each.job, counts[number]), 1):
            counts[number] += 1
        else:
            del able[number]
    return counts


def replace_servers(job: SlotJob, has: int) -> SlotJob:
    """Return a job of which `has` workers are there: with the next comes a parameter server only when it is needed."""
    if job.servers is None or job.servers.needed(has + 1) > job.servers.needed(has):
        return job
    return replace(job, servers=None)


def rrh(moment: Moment) -> dict[int, int]:
    """Those that run, then by reward; one whose reward is not positive when it comes is never started."""
    total = tuple(float(each) for each in hosts_of(moment.plan)[0].sum(axis=0))
    waiting = [each for each in moment.live if not each.has]
    jobs = [
        Candidate(
            sigmoid=each.job.sigmoid,
            age=float(moment.slot - each.job.arrival),
            run=float(math.ceil(each.left / each.job.fixed)),
            part=min(1.0, each.job.fixed * dominant(each.job.demand, total)),
            takes=each.job.fixed * dominant(each.job.demand, total),
        )
        for each in waiting
    ]
    reward = dict(zip((each.number for each in waiting), map(float, rewards(jobs)), strict=True))
    given = {each.number: moment.hosts.put(each.job, each.job.fixed) for each in moment.live if each.has}
    for each in sorted(waiting, key=lambda each: (-reward[each.number], each.number)):
        if reward[each.number] > 0.0 and moment.hosts.fits(each.job, each.job.fixed):
            given[each.number] = moment.hosts.put(each.job, each.job.fixed)
    return given


class Dorm:
    """The partition, kept until a job comes or goes."""

    def __init__(self, *, fairness: float = 0.1, adjusted: float = 0.1) -> None:
        self._fairness = fairness
        self._adjusted = adjusted
        self._known: dict[int, int] = {}

    def __call__(self, moment: Moment) -> dict[int, int]:
        """Return the numbers of workers; what does not fit the hosts is not had."""
        if {each.number for each in moment.live} != self._known.keys():
            workers, servers = hosts_of(moment.plan)
            capacity = (*workers.sum(axis=0), *servers.sum(axis=0)[1:])
            demands = [AppDemand(self._demand(each.job), each.job.workers_max, each.has) for each in moment.live]
            counts = partition(demands, capacity, fairness=self._fairness, adjusted=self._adjusted)
            self._known = dict(zip((each.number for each in moment.live), counts, strict=True))
        return {each.number: moment.hosts.put(each.job, self._known[each.number]) for each in moment.live}

    @staticmethod
    def _demand(job: SlotJob) -> tuple[float, ...]:
        """Return what a worker takes, with its part of the parameter servers."""
        if job.servers is None:
            return (*job.demand, 0.0, 0.0, 0.0)
        return (*job.demand, *(need * job.servers.per_worker for need in job.servers.demand[1:]))


def baselines() -> dict[str, Algorithm]:
    """Return the algorithms compared with, by name."""
    return {"fifo": fifo, "drf": drf, "rrh": rrh, "dorm": Dorm()}


# --- the offline optimum ----------------------------------------------------------------------------------------------


def offline_of(jobs: Sequence[SlotJob]) -> list[OfflineJob]:
    """Return the jobs as the exact programme takes them."""
    return [
        OfflineJob(
            arrival=job.arrival,
            work=job.work,
            workers_max=job.workers_max,
            demand=job.demand,
            sigmoid=job.sigmoid,
            server_demand=() if job.servers is None else job.servers.demand,
            per_worker=0.0 if job.servers is None else job.servers.per_worker,
        )
        for job in jobs
    ]
