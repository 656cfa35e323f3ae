"""Small auctions: makers of problems, and an oracle that tries everything."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

from arbiter.core.auction.problem import Bidder, Problem, build
from arbiter.core.placement import LOOSENESS, locality
from arbiter.core.policy import AppView, GpuView, View
from protocol.messages import LEVELS, AppId, Bid, BidRow, GpuId, Level, NodeId, RoundId, TenantId

AMPLE = 10_000_000


def gpus_of(*sizes: int, slots: int = 1, racks: int = 1, first: int = 0) -> tuple[GpuView, ...]:
    """Machines with so many GPUs each, every machine cut into `slots` slots, dealt over `racks` racks."""
    return tuple(
        GpuView(GpuId(f"g{m:02}-{i:02}"), NodeId(f"n{m:02}"), f"r{m % racks}", f"s{i * slots // size}")
        for m, size in enumerate(sizes, start=first)
        for i in range(size)
    )


def app_of(
    name: str,
    *,
    gang: int = 1,
    demand_max: int = 10_000,
    level_max: Level = "cluster",
    rho: float | None = 1.0,
    kept: Sequence[GpuView] = (),
    renewable: Sequence[GpuId] = (),
    only: Sequence[GpuId] | None = None,
) -> AppView:
    return AppView(
        app=AppId(name),
        tenant=TenantId("t"),
        gang=gang,
        demand_max=demand_max,
        level_max=level_max,
        elapsed_s=0.0,
        rho=rho,
        kept=tuple(kept),
        renewable=tuple(renewable),
        only=None if only is None else tuple(only),
    )


def view_of(gpus: Iterable[GpuView], apps: Iterable[AppView], seed: int = 7) -> View:
    return View(round=1, seed=seed, lease_s=60.0, cluster_gpus=64, gpus=tuple(gpus), apps=tuple(apps))


def bid_of(name: str, rho_none: float, *rows: tuple[int, Level, float], only: Sequence[GpuId] | None = None) -> Bid:
    found = tuple(BidRow(gpus, level, rho) for gpus, level, rho in rows)
    return Bid(AppId(name), RoundId(1), rho_none, found, None if only is None else tuple(only))


def problem_of(
    gpus: Sequence[GpuView], apps: Sequence[AppView], bids: Sequence[Bid], *, work: int = AMPLE, seed: int = 7
) -> Problem:
    return build(view_of(gpus, apps, seed), {bid.app: bid for bid in bids}, work=work)


# --- the oracle -----------------------------------------------------------------------------------------------------


def worth(bidder: Bidder, gpus: Sequence[GpuView]) -> list[float]:
    """worth[mask]: the greatest gain from any part of the GPUs in `mask`, straight from what a row promises."""
    values = [0.0] * (1 << len(gpus))
    for mask in range(1, len(values)):
        members = [gpu for bit, gpu in enumerate(gpus) if mask >> bit & 1]
        values[mask] = max(values[mask & ~(1 << bit)] for bit in range(len(gpus)) if mask >> bit & 1)
        if bidder.only is None or all(gpu.gpu in bidder.only for gpu in members):
            values[mask] = max(values[mask], _exactly(bidder, members))
    return values


def _exactly(bidder: Bidder, members: Sequence[GpuView]) -> float:
    nodes = {gpu.node for gpu in members}
    union = [*bidder.kept, *members]
    if any(sum(gpu.node == node for gpu in union) % bidder.gang for node in nodes):
        return 0.0
    spread = LOOSENESS[locality(union)]
    return max((r.gain for r in bidder.rows if r.new == len(members) and LOOSENESS[r.level] >= spread), default=0.0)


def best_value(problem: Problem, skip: int | None = None) -> float:
    """The greatest sum of gains over all ways to deal the GPUs, bidder `skip` left out."""
    total = [0.0] * (1 << len(problem.gpus))
    for index, bidder in enumerate(problem.bidders):
        if index == skip:
            continue
        values = worth(bidder, problem.gpus)
        total = [_best_split(total, values, mask) for mask in range(len(total))]
    return total[-1]


def _best_split(total: list[float], values: list[float], mask: int) -> float:
    best, part = total[mask], mask
    while part:
        best = max(best, values[part] + total[mask ^ part])
        part = (part - 1) & mask
    return best


# --- chance ---------------------------------------------------------------------------------------------------------


def random_problem(seed: int, *, gpus_max: int = 7, bidders_max: int = 5, work: int = AMPLE) -> Problem:
    """A small auction with everything in it: gangs, kept GPUs, levels, named GPUs, ties and absurd values."""
    dice = random.Random(seed)
    sizes: list[int] = []
    while sum(sizes) < gpus_max - 1:
        sizes.append(dice.randint(1, min(4, gpus_max - sum(sizes))))
    racks = dice.choice((1, 1, 2))
    cluster = gpus_of(*sizes, slots=dice.choice((1, 2)), racks=racks)
    elsewhere = gpus_of(2, 2, racks=racks, first=len(sizes))
    apps: list[AppView] = []
    bids: list[Bid] = []
    kept_pool = list(cluster[: dice.choice((0, 0, 1, 2))])
    offered = [gpu for gpu in cluster if gpu not in kept_pool]
    kept_pool += elsewhere
    for index in range(dice.randint(1, bidders_max)):
        gang = dice.choice((1, 1, 1, 2, 3))
        kept = [kept_pool.pop(0) for _ in range(dice.choice((0, 0, 0, 1, 2))) if kept_pool]
        base = dice.choice((1.0, 1.0, 1e-9, 1e9, 37.5))
        only = dice.sample([gpu.gpu for gpu in offered], k=min(len(offered), dice.randint(0, 3)))
        rows = [
            (len(kept) + new, level, base * dice.choice((0.9, 0.5, 0.25, 0.1, round(dice.random(), 2) + 0.01)))
            for new in range(1, len(offered) + 2)
            for level in dice.sample(LEVELS, k=dice.randint(1, 4))
            if dice.random() < 0.6
        ]
        name = f"a{index}"
        apps.append(app_of(name, gang=gang, kept=kept))
        bids.append(bid_of(name, base, *rows, only=only if dice.random() < 0.25 else None))
        if dice.random() < 0.2:
            apps.append(app_of(name + "twin", gang=gang, kept=[]))
            bids.append(bid_of(name + "twin", base, *rows))
    return problem_of(offered, apps, bids, work=work, seed=seed)


def log_sum(values: Iterable[float]) -> float:
    return math.fsum(values)
