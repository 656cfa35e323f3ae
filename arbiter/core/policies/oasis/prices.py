"""Prices of the resources of a time slot: low while it is empty, more than any job would pay when it is full.

(22) p(t) = L (U / L)^(g / c) with g sold of c. U and L differ by a factor that may be beyond any float (a job that is
urgent is worth next to nothing at the horizon), so both are kept as logarithms.

*Source:* OASiS (INFOCOM 2018), Eq. 22 to 26 and eta of its section IV; PAPERS.md section 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from arbiter.core.policies.oasis.utility import Sigmoid

Floats = NDArray[np.float64]

#: A share of a server below this is none: amounts are sums of floats.
CRUMB = 1e-9
#: See `learnt_bounds`. Where jobs ask for more than this part of all resources, the least worthy are to pay too much
#: even for empty servers. It is less than all: jobs come unevenly, and urgent ones do not wait until servers are empty.
CLEARING = 0.35
BEST = 0.9
BELOW = 1.0
#: Below this load L falls, by `IDLE` times the part that is missing.
QUIET, IDLE = 0.5, 4.0


class Bounds(Struct, frozen=True):
    """ln U^r of each kind of resource, -inf for one that no job needs, and ln L, one for all of them."""

    log_upper: tuple[float, ...]
    log_lower: float


class Priced(Struct, frozen=True):
    """The figures of one job that bound the prices.

    Attributes
    ----------
    sigmoid
        Its utility, by the delay in slots.
    arrival
        The slot in which it comes.
    work
        ceil(E N M (tau + 2e/b)): slots of one worker that it takes in all.
    fewest
        Slots in which it ends with all the workers it can use, ceil(E M (tau + 2e/b)).
    demand
        w^r: the amount of each resource that one worker (or parameter server) takes.
    """

    sigmoid: Sigmoid
    arrival: int
    work: float
    fewest: int
    demand: tuple[float, ...]


def bounds_of(jobs: Iterable[Priced], capacity: Floats, *, horizon: int, least: float = 0.0) -> Bounds | None:
    """Return U (23, 25) and L (24, 26) of these jobs; None if none of them has a use of the resources.

    `capacity` is what each server has of each resource, shape (servers, resources). `least` is ours: no job counts in
    (24) with less than this part of what it is worth at its best. As printed (0), one urgent job makes L nil, since it
    is worth nothing at the horizon, and then nothing has a price before the last GPU of a slot.
    """
    some = [job for job in jobs if any(amount > 0 for amount in job.demand) and job.sigmoid.worth > 0]
    if not some:
        return None
    best = np.array([float(job.sigmoid.log_at(float(job.fewest))) for job in some])
    demands = np.array([job.demand for job in some])
    with np.errstate(divide="ignore"):
        upper = np.where(demands > 0, best[:, None] - np.log(demands), -np.inf).max(axis=0)
    takes = np.array([job.work for job in some]) * demands.sum(axis=1)
    # 1 / eta <= takes / (T sum c) for every job, so 4 eta takes is T sum c times 4 takes / min(takes).
    log_4_eta_takes = np.log(4.0 * takes / takes.min()) + np.log(horizon * max(capacity.sum(), CRUMB))
    last = np.array([float(job.sigmoid.log_at(float(max(0, horizon - job.arrival)))) for job in some])
    if least > 0.0:
        last = np.maximum(last, best + np.log(least))
    return Bounds(tuple(map(float, upper)), float((last - log_4_eta_takes).min()))


def density(job: Priced) -> float:
    """Return ln of the best worth of a job for each time slot of a worker and unit of resources in it."""
    takes = job.work * sum(job.demand)
    return float(job.sigmoid.log_at(float(job.fewest))) - math.log(takes) if takes > 0 else -math.inf


class Seen(Struct, frozen=True):
    """A job that has asked: its `density`, and all that it takes, time slots of a worker times parts of a server."""

    density: float
    takes: float


def seen_of(job: Priced) -> Seen:
    """Return the figures that are remembered of a job."""
    return Seen(density(job), job.work * sum(job.demand))


def learnt_bounds(seen: Sequence[Seen], *, load: float, kinds: int) -> Bounds | None:
    """Return U and L by the worths of the jobs seen, for the resources that they take; None without any.

    (23) bounds the price of the *first* time slot of a worker, though a job must buy many of them, and (24) divides by
    all resources for sale within the horizon: with these the last tenth of a server bears all of the price, and the
    first jobs to come are admitted. In practice prices should clear the market. Of jobs that take `load` times all
    resources, all but `CLEARING` / load are to be refused when it is tight: L is a little below the density under which
    that part of the work lies. U is that of the best tenth of the jobs. At a low load L is much lower, so that no job
    pays for idle servers. The figures were chosen on seeds 1 to 3 of benchmarks/papers/oasis.py, which reports others.

    Parameters
    ----------
    seen
        Jobs like those to come, of `kinds` resources that are measured in parts of a server.
    load
        What they take over what there is in the time in which they come.
    kinds
        How many resources there are.
    """
    some = sorted((each.density, each.takes) for each in seen if math.isfinite(each.density) and each.takes > 0)
    if not some:
        return None
    refused = max(0.0, 1.0 - CLEARING / max(load, 1e-9))
    upto = np.cumsum([takes for _, takes in some])
    low = some[min(len(some) - 1, int(np.searchsorted(upto, refused * upto[-1])))][0]
    high = max(low, float(np.quantile([each for each, _ in some], BEST)))
    return Bounds((high,) * kinds, low - BELOW - IDLE * max(0.0, 1.0 - load / QUIET))


def scaled(bounds: Bounds, *, upper: float = 1.0, lower: float = 1.0) -> Bounds:
    """Return bounds that are so many times as high: for experiments with wrong estimates."""
    factors = np.log([upper, lower])
    return Bounds(tuple(each + float(factors[0]) for each in bounds.log_upper), bounds.log_lower + float(factors[1]))


def prices(sold: Floats, capacity: Floats, bounds: Bounds) -> Floats:
    """Return (22) for each slot, server and resource.

    Parameters
    ----------
    sold
        Amounts sold already, shape (slots, servers, resources).
    capacity
        The amounts that there are, shape (servers, resources) or that of `sold`. A resource that a server lacks
        counts as sold out.
    bounds
        U of each resource, and L.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        part = np.where(capacity > CRUMB, sold / capacity, 1.0)
    upper: Floats = np.array(bounds.log_upper)
    used = np.isfinite(upper)
    upper = np.where(used, upper, 0.0)
    lower = np.minimum(bounds.log_lower, upper)
    return np.where(used, np.exp(lower + (upper - lower) * np.minimum(part, 1.0)), 0.0)


def ratio_bound(all_bounds: Sequence[Bounds]) -> float:
    """Return 2 max_r(1, ln U^r / L), how many times as much an offline optimum may be worth (Theorem 4)."""
    ratios = [upper - each.log_lower for each in all_bounds for upper in each.log_upper if np.isfinite(upper)]
    return 2.0 * max([1.0, *ratios])
