"""The answers to the two questions of a round that follow from what an app has stated (PAPERS.md section 1).

An app agent answers a probe and an offer so, and so does the arbiter in its place: the same numbers, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from protocol.messages import BidRow, GpuId, Home, OfferedGpu, StandingValuation, device_of
from valuation import bids, finish_time
from valuation.bids import Goods
from valuation.finish_time import Known, Valuation


class Circumstances(Struct, frozen=True):
    """The numbers of Eq. 1 and 2 that the arbiter knows: seconds, N_avg, and R_C, the GPUs of the cluster."""

    elapsed_s: float
    lease_s: float
    apps_mean: float
    cluster_gpus: int


class Shape(Struct, frozen=True):
    """The shape of an app's wishes: GPUs come in gangs, which may span nodes, up to `demand_max` now."""

    gang: int
    spans: bool
    demand_max: int


class Worth(Struct, frozen=True):
    """A bid: rho if the app gains nothing, and with so many GPUs; see `protocol.messages.Bid`."""

    rho_none: float
    rows: tuple[BidRow, ...]
    only: tuple[GpuId, ...] | None


class Outlook(Struct, frozen=True):
    """The part of the answer to a probe that does not change with time: seconds left, and T_cluster, 0: unknown."""

    left_s: float
    waits: bool  #: one more lease comes first, without GPUs
    alone_s: float


def value_of(standing: StandingValuation, shape: Shape, seen: Circumstances, known: Known | None = None) -> Valuation:
    """Return the numbers from which rho of any allocation follows."""
    return Valuation(
        phases=standing.phases,
        gang=shape.gang,
        terms=standing.terms,
        elapsed_s=seen.elapsed_s,
        lease_s=seen.lease_s,
        fair_s=finish_time.fair_time_s(alone_s(standing, seen.cluster_gpus), apps_mean=seen.apps_mean),
        hoped=standing.hoped,
        sizes=standing.sizes,
        known=known,
        phase_demands=standing.phase_demands,
    )


def alone_s(standing: StandingValuation, cluster_gpus: int) -> float:
    """Return T_cluster, the finish time alone on so many GPUs; 0: their number is not known."""
    if not cluster_gpus:
        return 0.0
    return finish_time.cluster_time_s(standing.budget_gpu_s, cluster_gpus=cluster_gpus, demand_max=standing.demand_max)


def outlook_of(value: Valuation, held: Sequence[OfferedGpu], *, spans: bool, alone_s: float) -> Outlook:
    """Return the outlook of an app with the GPUs that are `held` and stay."""
    reach = bids.reach_of(held, (), gang=value.gang, spans=spans, levels=())
    return Outlook(*bids.left_kept(value, reach), alone_s)


def rho_then(outlook: Outlook, *, elapsed_s: float, lease_s: float, apps_mean: float) -> float:
    """Return the answer to a probe: `rho_now`, to the last bit."""
    later_s = lease_s + outlook.left_s if outlook.waits else outlook.left_s
    return finish_time.rho(elapsed_s + later_s, finish_time.fair_time_s(outlook.alone_s, apps_mean=apps_mean))


def rho_now(value: Valuation, held: Sequence[OfferedGpu], *, spans: bool) -> float:
    """Return the answer to a probe: rho with the GPUs that are `held` and stay."""
    return bids.rho_kept(value, bids.reach_of(held, (), gang=value.gang, spans=spans, levels=()))


def worth_of(
    standing: StandingValuation,
    value: Valuation,
    shape: Shape,
    *,
    offered: Goods,
    kept: Sequence[OfferedGpu],
) -> Worth:
    """Return the answer to an offer: whole gangs, up to what the app can use now, on GPUs that its jobs can use."""
    only, usable = None, offered
    if standing.homes is not None:
        only = _reachable(standing.homes, offered.gpus, kept)
        named = set(only)
        usable = Goods(gpu for gpu in offered.gpus if gpu.gpu in named)
    levels = [terms.level for terms in value.terms]
    reach = bids.reach_of(kept, usable, gang=value.gang, spans=shape.spans, levels=levels)
    rho_none = bids.rho_kept(value, reach)
    return Worth(rho_none, bids.bid_rows(value, reach, rho_none=rho_none, gpus_max=shape.demand_max), only)


def _reachable(homes: Sequence[Home], offered: Sequence[OfferedGpu], kept: Sequence[OfferedGpu]) -> tuple[GpuId, ...]:
    """Return the offered GPUs on which one of the jobs can go on that are bound to `homes`."""
    there = {device_of(gpu.gpu) for gpu in (*offered, *kept)}
    reachable = {device for home in homes for device in _devices(home, there)}
    return tuple(gpu.gpu for gpu in offered if device_of(gpu.gpu) in reachable)


def _devices(home: Home, there: set[GpuId]) -> set[GpuId]:
    """Return the devices on which a bound job can go on: its own if all can be had, else others of its node, too."""
    own = set(map(device_of, home.gpus))
    able = (own if own <= there else own.union(home.other_gpus)) & there
    return able if len(able) >= len(own) else set()
