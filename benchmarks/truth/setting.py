"""Who bids for what in the truthfulness experiment, how a liar lies, and what GPUs are truly worth to it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from arbiter.core.policies.themis.auction.instance import Bidding, Host, Instance, Slowdown, log_value
from benchmarks.auctions.families import Cluster, make

SCHEMA: Literal["themis-auction-1"] = "themis-auction-1"
HOUR = 3600.0
#: Of each of the eight apps: 80 GPU-hours, ten hours on eight GPUs of one machine.
WORK_S = 80 * HOUR
LEASE_S = HOUR
APPS = 8
#: The liar; the apps are identical, so it does not matter which.
LIAR = "a0"

Counts = Mapping[str, int]  #: GPUs by machine


class Case(Struct, frozen=True):
    """Eight identical apps."""

    name: str
    rack: float
    cross: float
    elapsed_s: float = 0.0
    demand_max: int = 8
    gang: int = 1


#: The seven cases of the study (findings on the auction, section 7).
CASES = (
    Case("S 1.5/2, new, demand 8", 1.5, 2.0),
    Case("S 1.1/1.3, new, demand 8", 1.1, 1.3),
    Case("S 1.5/2, 10 h old, demand 8", 1.5, 2.0, elapsed_s=10 * HOUR),
    Case("S 1.5/2, new, demand 16", 1.5, 2.0, demand_max=16),
    Case("S 1.1/1.3, 1 h old, demand 16", 1.1, 1.3, elapsed_s=HOUR, demand_max=16),
    Case("S 1.5/2, new, demand 8, gangs of 4", 1.5, 2.0, gang=4),
    Case("S 1.5/2, new, demand 8, gangs of 8", 1.5, 2.0, gang=8),
)


def hosts() -> list[Host]:
    """Return the paper's 64 GPUs: one machine of eight, and 28 of two in racks of four machines, all free."""
    small = [Host(f"m{index:02}", f"r{index // 4}", 2, 2) for index in range(28)]
    return [Host("big", "r7", 8, 8), *small]


def apps_of(case: Case) -> list[Bidding]:
    """Return the eight apps of a case, as they truly are."""
    slowdown = Slowdown(1.0, case.rack, case.cross)
    ideal_s = APPS * WORK_S / case.demand_max
    return [
        Bidding(f"a{index}", case.elapsed_s, WORK_S, ideal_s, case.demand_max, case.gang, slowdown)
        for index in range(APPS)
    ]


def auction_of(apps: Sequence[Bidding]) -> Instance:
    """Return the auction of all 64 GPUs among these apps."""
    return Instance(SCHEMA, LEASE_S, hosts(), list(apps))


# --- small auctions at random ---------------------------------------------------------------------------------------


def random_auctions(count: int, *, first_seed: int = 0) -> Iterator[Instance]:
    """Yield small auctions of apps that differ in all that a bid says; up to half of the GPUs may be held."""
    for seed in range(first_seed, first_seed + count):
        dice = random.Random(f"truth/{seed}")
        sizes = tuple(dice.choice((1, 2, 4, 8)) for _ in range(dice.randint(2, 6)))
        bidders = dice.randint(2, 6)
        family = dice.choice(("mixed", "odd", "gang", "scale"))
        free = 1.0 if sum(sizes) < 4 else dice.choice((1.0, 1.0, 0.5))
        made = make(Cluster(sizes, dice.randint(1, 3)), bidders, free, family, seed)
        yield msgspec.convert(made, Instance)


# --- lies -----------------------------------------------------------------------------------------------------------


#: What can be said untruly of an app.
SPREAD = "over-reports rack and cross slowdown"
LIES = (
    SPREAD,
    "under-reports dense slowdown",
    "inflates work",
    "deflates work",
    "inflates demand",
    "inflates elapsed",
)


def claim(true: Bidding, kind: str, by: float, lease_s: float) -> Bidding:
    """Return what an app says of itself that lies about one thing, `kind`, by so much: 1.0 is 100 %."""
    more, slow = 1.0 + by, true.slowdown
    match kind:
        case "over-reports rack and cross slowdown":
            return replace(true, slowdown=Slowdown(slow.machine, slow.rack * more, slow.cross * more))
        case "under-reports dense slowdown":
            return replace(true, slowdown=Slowdown(slow.machine / more, slow.rack, slow.cross))
        case "inflates work":
            return replace(true, work_left=true.work_left * more)
        case "deflates work":
            return replace(true, work_left=true.work_left / more)
        case "inflates demand":
            return replace(true, demand_max=math.ceil(true.demand_max * more))
        case "inflates elapsed":
            return replace(true, elapsed=true.elapsed * more + by * 10 * lease_s)
        case _:
            raise ValueError(f"{kind} is no lie about a bid; there are {', '.join(LIES)}")


def lying(instance: Instance, liar: str, kind: str, by: float) -> Instance:
    """Return the auction with one app's claims changed."""
    apps = [claim(app, kind, by, instance.lease) if app.id == liar else app for app in instance.apps]
    return replace(instance, apps=apps)


# --- true worth -----------------------------------------------------------------------------------------------------


def best_log_value(instance: Instance, app: Bidding, new: Counts) -> float:
    """Return the true log V of an app with `new` GPUs beside what it holds, of which it may leave some unused."""
    return max(
        log_value(instance, app, {name: app.held.get(name, 0) + part.get(name, 0) for name in {**app.held, **part}})
        for part in parts_worth_trying(instance.machines, new)
    )


def parts_worth_trying(machines: Iterable[Host], new: Counts) -> Iterable[Counts]:
    """Yield what of a bundle can be best to use: at each locality, more is never worse."""
    yield {}
    yield new
    by_rack: dict[str, dict[str, int]] = {}
    for host in machines:
        if new.get(host.id):
            yield {host.id: new[host.id]}
            by_rack.setdefault(host.rack, {})[host.id] = new[host.id]
    yield from by_rack.values()


# --- a busy testbed -------------------------------------------------------------------------------------------------

#: Work per app of the generator, in GPU-hours, over the cluster's 64 GPUs: apps so far apart keep all of them busy.
HOURS_APART = 0.4


def workload(apps: int, load: float, seed: int) -> tuple[list[Host], list[tuple[Bidding, float]]]:
    """Return the testbed's 64 GPUs (12 machines of four, 8 of two), and apps that differ, each with its arrival.

    `load` 1.0 is about as much work as the GPUs can do, 2.0 twice that.
    """
    made = msgspec.convert(make("c64", apps, 1.0, "mixed", seed), Instance)
    dice = random.Random(f"arrivals/{seed}")
    at_s, arriving = 0.0, []
    for app in made.apps:
        arriving.append((replace(app, elapsed=0.0), at_s))
        at_s += dice.expovariate(load / (HOURS_APART * HOUR))
    return list(made.machines), arriving
