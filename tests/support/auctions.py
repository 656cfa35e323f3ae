"""Small auctions: makers of rounds, and an oracle that deals the GPUs in every way there is."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from arbiter.core.placement.locality import LOOSENESS
from arbiter.core.policies.themis.auction import bids, instance
from arbiter.core.policies.themis.auction.bids import Entry, Settlement
from arbiter.core.policies.themis.auction.solve import Budget
from arbiter.core.seam import AppView, GpuView, View
from protocol.messages import LEVELS, AppId, Bid, BidRow, ExplicitRow, GpuId, Level, NodeId, RoundId, TenantId, locality

#: Steps enough for every auction here.
AMPLE = 100_000_000


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
        arrived_at=0.0,
        kept=tuple(kept),
        renewable=tuple(renewable),
        only=None if only is None else tuple(only),
    )


def view_of(
    gpus: Iterable[GpuView], apps: Iterable[AppView], rhos: Mapping[str, float] | None = None, *, seed: int = 7
) -> View:
    """A round in which the apps have told these rhos; by default all of them, and 1."""
    apps = tuple(apps)
    told = {app.app: 1.0 for app in apps} if rhos is None else {AppId(name): rho for name, rho in rhos.items()}
    return View(round=1, seed=seed, lease_s=60.0, cluster_gpus=64, gpus=tuple(gpus), apps=apps, rhos=told)


def bid_of(
    name: str,
    rho_none: float,
    *rows: tuple[int, Level, float],
    only: Sequence[GpuId] | None = None,
    explicit: Sequence[tuple[Mapping[str, int], float]] = (),
) -> Bid:
    return Bid(
        AppId(name),
        RoundId(1),
        rho_none,
        tuple(BidRow(gpus, level, rho) for gpus, level, rho in rows),
        None if only is None else tuple(only),
        tuple(ExplicitRow(tuple((NodeId(node), n) for node, n in new.items()), rho) for new, rho in explicit),
    )


def entry_of(
    gpus: Sequence[GpuView],
    apps: Sequence[AppView],
    bids_: Sequence[Bid],
    *,
    ideal_times_s: Mapping[AppId, float] = {},
    seed: int = 7,
) -> Entry:
    view = replace(view_of(gpus, apps, seed=seed), ideal_times_s=ideal_times_s)
    return bids.enter(view, {bid.app: bid for bid in bids_})


def settle(entry: Entry, steps: int = AMPLE) -> Settlement:
    return bids.settle(entry, Budget(steps))


# --- the oracle -----------------------------------------------------------------------------------------------------


def worth(app: AppView, bid: Bid, gpus: Sequence[GpuView]) -> list[float]:
    """worth[mask]: the greatest gain (log V over nothing) from any part of the GPUs in `mask`, as the bid says."""
    values = [0.0] * (1 << len(gpus))
    for mask in range(1, len(values)):
        members = [gpu for bit, gpu in enumerate(gpus) if mask >> bit & 1]
        values[mask] = max(values[mask & ~(1 << bit)] for bit in range(len(gpus)) if mask >> bit & 1)
        if all(gpu.gpu in only for gpu in members for only in (app.only, bid.only) if only is not None):
            values[mask] = max(values[mask], _exactly(app, bid, members))
    return values


def _exactly(app: AppView, bid: Bid, members: Sequence[GpuView]) -> float:
    by_node = Counter(gpu.node for gpu in members)
    kept = Counter(gpu.node for gpu in app.kept)
    if len(members) > app.want or any((kept[node] + count) % app.gang for node, count in by_node.items()):
        return 0.0
    spread = LOOSENESS[locality([*app.kept, *members])]
    count = len(app.kept) + len(members)
    plain = (row.rho for row in bid.rows if row.gpus == count and LOOSENESS[row.level] >= spread)
    named = (row.rho for row in bid.explicit if dict(row.new) == by_node)
    return max([0.0, *(math.log(bid.rho_none / rho) for rho in (*plain, *named))])


def best_value(view: View, bids_: Mapping[AppId, Bid], skip: AppId | None = None) -> float:
    """The greatest sum of gains over all ways to deal the GPUs, the app `skip` left out."""
    total = [0.0] * (1 << len(view.gpus))
    for app in view.apps:
        if app.app in bids_ and app.app != skip:
            values = worth(app, bids_[app.app], view.gpus)
            total = [_best_split(total, values, mask) for mask in range(len(total))]
    return total[-1]


def _best_split(total: list[float], values: list[float], mask: int) -> float:
    best, part = total[mask], mask
    while part:
        best = max(best, values[part] + total[mask ^ part])
        part = (part - 1) & mask
    return best


# --- chance ---------------------------------------------------------------------------------------------------------


def random_round(seed: int, *, gpus_max: int = 7, bidders_max: int = 5) -> tuple[View, dict[AppId, Bid]]:
    """A small round with everything in it: gangs, kept and held GPUs, levels, named GPUs, explicit rows, ties and
    absurd values.
    """
    dice = random.Random(seed)
    sizes: list[int] = []
    while sum(sizes) < gpus_max - 1:
        sizes.append(dice.randint(1, min(4, gpus_max - sum(sizes))))
    racks = dice.choice((1, 1, 2))
    cluster = gpus_of(*sizes, slots=dice.choice((1, 2)), racks=racks)
    elsewhere = gpus_of(2, 2, racks=racks, first=len(sizes))
    apps: list[AppView] = []
    found: list[Bid] = []
    kept_pool = list(cluster[: dice.choice((0, 0, 1, 2))])
    offered = [gpu for gpu in cluster if gpu not in kept_pool]
    held_pool = [gpu.gpu for gpu in dice.sample(offered, k=dice.choice((0, 0, 2, len(offered))))]
    kept_pool += elsewhere
    for index in range(dice.randint(1, bidders_max)):
        gang = dice.choice((1, 1, 1, 2, 3))
        kept = [kept_pool.pop(0) for _ in range(dice.choice((0, 0, 0, 1, 2))) if kept_pool]
        held = [held_pool.pop() for _ in range(dice.choice((0, 0, 1, 2))) if held_pool]
        base = dice.choice((1.0, 1.0, 1e-9, 1e9, 37.5))
        only = dice.sample([gpu.gpu for gpu in offered], k=min(len(offered), dice.randint(0, 3)))
        rows = [
            (len(kept) + new, level, base * _share(dice))
            for new in range(1, len(offered) + 2)
            for level in dice.sample(LEVELS, k=dice.randint(1, 4))
            if dice.random() < 0.6
        ]
        bound = only if dice.random() < 0.25 else None
        explicit = [(_some_of(offered, dice), base * _share(dice)) for _ in range(dice.choice((0, 0, 0, 1, 3)))]
        name = f"a{index}"
        apps.append(app_of(name, gang=gang, kept=kept, renewable=held))
        found.append(bid_of(name, base, *rows, only=bound, explicit=explicit))
        if dice.random() < 0.2:
            apps.append(app_of(name + "twin", gang=gang, kept=[]))
            found.append(bid_of(name + "twin", base, *rows))
    return view_of(offered, apps, seed=seed), {bid.app: bid for bid in found}


def _share(dice: random.Random) -> float:
    return dice.choice((0.9, 0.5, 0.25, 0.1, round(dice.random(), 2) + 0.01))


def _some_of(gpus: Sequence[GpuView], dice: random.Random) -> Mapping[str, int]:
    return Counter(gpu.node for gpu in dice.sample(list(gpus), k=dice.randint(1, len(gpus))))


def random_entry(seed: int, *, gpus_max: int = 7, bidders_max: int = 5) -> Entry:
    return bids.enter(*random_round(seed, gpus_max=gpus_max, bidders_max=bidders_max))


def compile_all() -> None:
    """Compile the loops (or read them from the cache) outside of the tests' time limits."""
    instance.warm_up()
