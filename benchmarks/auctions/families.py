"""Seeded auction instances: clusters of five sizes, five families of demands, and degenerate cases by hand.

`make` is a pure function of its arguments: the same cluster, number of bidders, share of free GPUs, family and seed
give the same instance on every machine.

*Source:* clusters of 64 and 256 GPUs after Themis (NSDI 2020), section 8.1; its simulated list (16x8 + 6x4 + 16x1)
adds up to 168, which is `c168`, and `c256` is the same kind of mixture with 256.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from benchmarks.auctions.instances import SCHEMA, App, Instance, Machine, Slowdown

#: Themis's default lease is ten minutes; its testbed's 20, which make losing a round matter, are used here.
LEASE_S = 1200.0
#: Share of the bidders that hold some of the occupied GPUs.
HOLDERS = 0.6
#: Share of the bidders in family `gang` that need gangs of more than one GPU.
GANGS = 0.7
#: Share of the bidders that have just arrived.
NEWCOMERS = 0.2


class Cluster(NamedTuple):
    """Machines by size (GPUs), dealt over racks of at most `per_rack` machines so that every rack has some of each."""

    sizes: tuple[int, ...]
    per_rack: int

    @property
    def gpus(self) -> int:
        """GPUs of all machines together."""
        return sum(self.sizes)


CLUSTERS: Mapping[str, Cluster] = {
    "c64": Cluster((4,) * 12 + (2,) * 8, 7),
    "c168": Cluster((8,) * 16 + (4,) * 6 + (1,) * 16, 9),
    "c256": Cluster((8,) * 24 + (4,) * 12 + (1,) * 16, 9),
    "c1024": Cluster((8,) * 128, 8),
    "c8192": Cluster((8,) * 1024, 16),
}


class Kind(NamedTuple):
    """What makes one bidder different from the next: its largest useful number of GPUs and the size of its gangs."""

    demand_max: int
    gang: int = 1


def _mixed(dice: random.Random, _: float) -> Kind:
    return Kind(dice.choice((1, 2, 4, 8, 16, 32, 64)))


def _odd(dice: random.Random, _: float) -> Kind:
    return Kind(dice.choice((1, 2, 3, 5, 6, 7, 9, 11, 13, 17, 21, 27)))


def _gang(dice: random.Random, _: float) -> Kind:
    gang = dice.choice((2, 4, 8)) if dice.random() < GANGS else 1
    return Kind(gang * dice.choice((1, 2, 3, 4, 8)), gang)


def _large(dice: random.Random, _: float) -> Kind:
    return Kind(dice.choice((16, 24, 32, 48, 64, 96, 128, 192, 256)))


def _scale(dice: random.Random, fair: float) -> Kind:
    return Kind(max(1, round(fair * dice.choice((0.25, 0.5, 1.0, 2.0, 4.0, 8.0)))))


#: Family to a maker of demands; `fair` is the cluster's GPUs per bidder.
FAMILIES: Mapping[str, Callable[[random.Random, float], Kind]] = {
    "mixed": _mixed,
    "odd": _odd,
    "gang": _gang,
    "large": _large,
    "scale": _scale,
}


def make(cluster: str | Cluster, bidders: int, free: float, family: str, seed: int) -> Instance:
    """Return one instance.

    Parameters
    ----------
    cluster
        A name in `CLUSTERS`, or a cluster.
    bidders
        Number of apps.
    free
        Share of the GPUs in the auction, 0 to 1. The others are occupied, some of them by 60 % of the bidders.
    family
        A name in `FAMILIES`.
    seed
        Of all that is drawn.
    """
    spec = CLUSTERS[cluster] if isinstance(cluster, str) else cluster
    dice = random.Random(f"{spec}/{bidders}/{free}/{family}/{seed}")
    occupied = _occupied(dice, spec.sizes, spec.gpus - round(spec.gpus * free))
    machines = _machines(spec, occupied)
    apps = [_app(dice, f"a{i:03}", FAMILIES[family](dice, spec.gpus / bidders)) for i in range(bidders)]
    _give_held(dice, apps, machines)
    return instance(machines, apps)


def instance(machines: Sequence[Machine], apps: Sequence[App], lease: float = LEASE_S) -> Instance:
    """Return these machines and apps as an auction."""
    return {"schema": SCHEMA, "lease": lease, "machines": list(machines), "apps": list(apps)}


def _machines(spec: Cluster, occupied: Sequence[int]) -> list[Machine]:
    racks = -(-len(spec.sizes) // spec.per_rack)
    return [
        {"id": f"m{i:04}", "rack": f"r{i % racks:03}", "gpus": size, "free": size - taken}
        for i, (size, taken) in enumerate(zip(spec.sizes, occupied, strict=True))
    ]


def _occupied(dice: random.Random, sizes: Sequence[int], count: int) -> list[int]:
    """Return how many GPUs of each machine are occupied: half of them in whole machines, half scattered."""
    occupied = [0] * len(sizes)
    left = count // 2
    for machine in dice.sample(range(len(sizes)), k=len(sizes)):
        if sizes[machine] <= left:
            occupied[machine] = sizes[machine]
            left -= sizes[machine]
    single = [machine for machine, size in enumerate(sizes) for _ in range(size - occupied[machine])]
    for machine in dice.sample(single, k=count - sum(occupied)):
        occupied[machine] += 1
    return occupied


def _app(dice: random.Random, name: str, kind: Kind) -> App:
    hours = dice.lognormvariate(0.0, 0.8)  # alone with all it can use: about an hour in the median
    work = hours * 3600.0 * kind.demand_max
    elapsed = 0.0 if dice.random() < NEWCOMERS else dice.uniform(0.0, 3.0 * 3600.0)
    return {
        "id": name,
        "elapsed": round(elapsed, 1),
        "work_left": round(work, 1),
        "t_id": round(hours * 3600.0 * dice.uniform(1.0, 20.0), 1),
        "demand_max": kind.demand_max,
        "gang": kind.gang,
        "slowdown": _slowdown(dice),
        "held": {},
    }


def _slowdown(dice: random.Random) -> Slowdown:
    """40 % of the models hardly mind where their GPUs are, 35 % do, 25 % mind very much (as VGG does)."""
    draw = dice.random()
    if draw < 0.40:
        rack, cross = 1.0, dice.uniform(1.02, 1.10)
    elif draw < 0.75:
        rack, cross = dice.uniform(1.05, 1.15), dice.uniform(1.20, 1.45)
    else:
        rack, cross = dice.uniform(1.4, 2.0), dice.uniform(1.8, 3.0)
    rack = round(rack, 3)
    return {"machine": 1.0, "rack": rack, "cross": max(rack, round(cross, 3))}


def _give_held(dice: random.Random, apps: Sequence[App], machines: Sequence[Machine]) -> None:
    """Let some of the apps hold occupied GPUs: on one machine, in one rack or anywhere, whole gangs when they can."""
    pool = {machine["id"]: machine["gpus"] - machine["free"] for machine in machines}
    by_rack: dict[str, list[str]] = defaultdict(list)
    for machine in machines:
        by_rack[machine["rack"]].append(machine["id"])
    for app in apps:
        if dice.random() >= HOLDERS:
            continue
        wanted = app["gang"] * dice.randint(1, max(1, app["demand_max"] // app["gang"]))
        start = dice.choice([name for name, count in pool.items() if count] or [""])
        if not start:
            return
        home = next(rack for rack, names in by_rack.items() if start in names)
        reach = dice.choice(([start], by_rack[home], list(pool)))
        app["held"] = _take(pool, [start, *(name for name in reach if name != start)], wanted, app["gang"])


def _take(pool: dict[str, int], names: Sequence[str], wanted: int, gang: int) -> dict[str, int]:
    available = sum(pool[name] for name in names)
    left = min(wanted, available) // gang * gang or min(wanted, available)
    held: dict[str, int] = {}
    for name in names:
        count = min(pool[name], left)
        if count:
            held[name] = count
            pool[name] -= count
            left -= count
    return held


# --- by hand --------------------------------------------------------------------------------------------------------


def app(name: str, **changes: object) -> App:
    """Return an ordinary app, but for `changes`."""
    ordinary: App = {
        "id": name,
        "elapsed": 600.0,
        "work_left": 28800.0,
        "t_id": 7200.0,
        "demand_max": 8,
        "gang": 1,
        "slowdown": {"machine": 1.0, "rack": 1.1, "cross": 1.3},
        "held": {},
    }
    unknown = changes.keys() - ordinary.keys()
    assert not unknown, f"An app has no {sorted(unknown)}."
    return {**ordinary, **changes}  # type: ignore[typeddict-item]  # the keys were checked, the values are literals


def machines(*sizes: int, per_rack: int = 4, free: Sequence[int] | None = None) -> list[Machine]:
    """Return machines with so many GPUs each, `free` of them in the auction (all, when None)."""
    spec = Cluster(sizes, per_rack)
    taken = [0] * len(sizes) if free is None else [size - rest for size, rest in zip(sizes, free, strict=True)]
    return _machines(spec, taken)


def degenerate() -> dict[str, Instance]:
    """Return the cases that break solvers, by name."""
    insensitive: Slowdown = {"machine": 1.0, "rack": 1.0, "cross": 1.0}
    harsh: Slowdown = {"machine": 1.0, "rack": 4.0, "cross": 9.0}
    many = {f"a{i:02}": 28800.0 + 3600.0 * i for i in range(40)}
    return {
        "no-bidder": instance(machines(4, 4), []),
        "nothing-free": instance(machines(4, 4, free=(0, 0)), [app("a", held={"m0000": 2}), app("b")]),
        "one-bidder": instance(machines(4, 4, 2), [app("a")]),
        "one-gpu-one-bidder": instance(machines(1), [app("a")]),
        "one-gpu-two-bidders": instance(machines(1), [app("a"), app("b", work_left=14400.0)]),
        "identical-bidders": instance(machines(*(4,) * 6), [app(f"a{i}") for i in range(6)]),
        "identical-bidders-one-large-machine": instance(machines(8, *(2,) * 28), [app(f"a{i}") for i in range(8)]),
        "identical-bidders-more-than-gpus": instance(machines(2, 2, 2), [app(f"a{i:02}") for i in range(20)]),
        "more-bidders-than-gpus": instance(machines(2, 2, 2), [app(n, work_left=w) for n, w in many.items()]),
        "giant-bidder": instance(
            machines(*(8,) * 8),
            [app("giant", work_left=1e9, demand_max=64), *(app(f"a{i}", demand_max=4) for i in range(5))],
        ),
        "giant-bidder-locality": instance(
            machines(*(4,) * 8),
            [app("giant", work_left=1e8, demand_max=64, slowdown=harsh), *(app(f"a{i}") for i in range(4))],
        ),
        "demand-beyond-cluster": instance(machines(4, 4, 4, 4), [app("a", demand_max=10_000), app("b", demand_max=99)]),
        "gang-beyond-machine": instance(
            machines(4, 4, 4, 4, per_rack=2), [app("a", gang=8, demand_max=16), app("b", gang=3, demand_max=9)]
        ),
        "gang-beyond-cluster": instance(machines(4, 4), [app("a", gang=16, demand_max=64), app("b")]),
        "gang-beyond-demand": instance(machines(4, 4), [app("a", gang=8, demand_max=4), app("b")]),
        "gang-odd-held": instance(
            machines(6, 6, 6, free=(2, 5, 6)),
            [app("a", gang=4, demand_max=12, held={"m0000": 3}), app("b", gang=4, demand_max=8, held={"m0000": 1})],
        ),
        "saturated-holder": instance(
            machines(8, 8, free=(2, 8)), [app("a", demand_max=6, held={"m0000": 6}), app("b", demand_max=6)]
        ),
        "over-saturated-holder": instance(
            machines(8, 8, free=(1, 8)), [app("a", demand_max=4, held={"m0000": 7}), app("b", demand_max=4)]
        ),
        "holder-in-one-rack": instance(
            machines(4, 4, 4, 4, per_rack=2, free=(3, 4, 3, 4)),
            [app("a", held={"m0000": 1, "m0002": 1}, demand_max=12, slowdown=harsh), app("b", slowdown=harsh)],
        ),
        "holder-across-racks": instance(
            machines(4, 4, 4, 4, per_rack=2, free=(3, 3, 4, 4)),
            [app("a", held={"m0000": 1, "m0001": 1}, demand_max=12, slowdown=harsh), app("b", slowdown=harsh)],
        ),
        "holder-would-rather-not-spread": instance(
            machines(4, 4, per_rack=1, free=(0, 4)),
            [app("a", held={"m0000": 4}, slowdown=harsh), app("b", held={}, slowdown=harsh, demand_max=3)],
        ),
        "two-holders-one-home": instance(
            machines(8, 4, 4, free=(3, 4, 4)),
            [app("a", held={"m0000": 2}, slowdown=harsh), app("b", held={"m0000": 3}, slowdown=harsh), app("c")],
        ),
        "insensitive": instance(machines(4, 4, 2, 2), [app(f"a{i}", slowdown=insensitive) for i in range(5)]),
        "harsh-slowdowns": instance(machines(4, 3, 2, 2, 1), [app(f"a{i}", slowdown=harsh) for i in range(4)]),
        "slow-machine-level": instance(
            machines(4, 4, 4),
            [app(f"a{i}", slowdown={"machine": 1.5, "rack": 2.5, "cross": 2.5}) for i in range(4)],
        ),
        "work-left-zero": instance(machines(4, 4), [app("done", work_left=0.0), app("a"), app("b")]),
        "work-left-tiny": instance(machines(4, 4), [app("a", work_left=1e-3), app("b", work_left=1e-3), app("c")]),
        "work-left-huge": instance(machines(4, 4), [app("a", work_left=1e12), app("b"), app("c", work_left=1e11)]),
        "elapsed-zero": instance(machines(4, 4, 2), [app(f"a{i}", elapsed=0.0) for i in range(4)]),
        "elapsed-huge": instance(machines(4, 4), [app("a", elapsed=1e9), app("b"), app("c", elapsed=1e6)]),
        "t-id-tiny": instance(machines(4, 4), [app("a", t_id=1e-9), app("b", t_id=1e-9), app("c", t_id=1e-9)]),
        "t-id-huge": instance(machines(4, 4), [app("a", t_id=1e9), app("b", t_id=1e9), app("c")]),
        "t-id-apart": instance(machines(4, 2, 2), [app("a", t_id=1e-9), app("b", t_id=1e9), app("c", t_id=1.0)]),
        "one-gpu-per-machine": instance(
            machines(*(1,) * 16), [app(f"a{i}", demand_max=d) for i, d in enumerate((2, 3, 5, 8))]
        ),
        "sixteen-gpu-machines": instance(
            machines(16, 16, 16, 16, per_rack=2),
            [app(f"a{i}", demand_max=d) for i, d in enumerate((5, 11, 13, 16, 24))],
        ),
        "one-machine": instance(machines(16), [app(f"a{i}", demand_max=d) for i, d in enumerate((3, 5, 7, 16))]),
        "one-machine-per-rack": instance(machines(4, 4, 2, 2, per_rack=1), [app(f"a{i}") for i in range(4)]),
        "ties": instance(machines(3, 3, 2), [app(f"a{i}", demand_max=2, slowdown=insensitive) for i in range(6)]),
        "near-ties": instance(
            machines(3, 3, 2), [app(f"a{i}", demand_max=3, work_left=28800.0 * (1 + 1e-10 * i)) for i in range(5)]
        ),
        "lease-tiny": instance(machines(2, 2), [app("a"), app("b"), app("c")], lease=1e-3),
        "lease-huge": instance(machines(2, 2), [app(f"a{i}") for i in range(6)], lease=1e9),
        "tight-packing": instance(
            machines(5, 5, 5, 5, 4, per_rack=5),
            [app(f"a{i}", demand_max=d, gang=d, slowdown=harsh) for i, d in enumerate((3, 3, 3, 3, 2, 2, 2, 2, 2, 2))],
        ),
    }


def tied(seed: int) -> Instance:
    """Return an auction of many equal sums: few kinds of bidders in round numbers, many times over, few GPUs."""
    dice = random.Random(f"tied/{seed}")
    kinds = [
        {
            "elapsed": dice.choice((0.0, 3600.0)),
            "work_left": 3600.0 * dice.choice((1, 2, 4, 8)),
            "demand_max": dice.choice((2, 4, 8)),
            "gang": dice.choice((1, 1, 2)),
            "slowdown": {"machine": 1.0, "rack": dice.choice((1.0, 2.0)), "cross": 2.0},
        }
        for _ in range(dice.randint(1, 3))
    ]
    sizes = [dice.choice((1, 2, 4)) for _ in range(dice.randint(2, 5))]
    bidders = [app(f"a{i}", **dice.choice(kinds)) for i in range(dice.randint(2, 8))]
    free = [dice.randint(0, size) for size in sizes]
    hosts = machines(*sizes, per_rack=2, free=free)
    for bidder, host in zip(bidders, hosts, strict=False):
        taken = host["gpus"] - host["free"]
        if taken and dice.random() < HOLDERS:
            bidder["held"] = {host["id"]: dice.randint(1, taken)}
    return instance(hosts, bidders)
