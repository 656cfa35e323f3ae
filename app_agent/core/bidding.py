"""The two questions of a round: how fair is the app's lot (probe), and how much is the offer worth to it (bid)."""

from __future__ import annotations

from app_agent.core import bids, demand, estimates, jobs, valuation
from app_agent.core.app import App
from app_agent.core.model import HeldGpu, Job, Leaving, Placed, Suspended
from app_agent.core.valuation import LevelTerms, Valuation
from protocol.core import Send
from protocol.messages import ARBITER, LEVELS, Bid, GpuId, Level, Offer, OfferedGpu, Probe, ProbeReply, device_of


def answer_probe(app: App, probe: Probe) -> list[Send]:
    """Phase 1: say how fair the app's lot is now."""
    if app.state.over is not None or probe.epoch < app.state.view[0]:
        return []
    app.state.cluster_gpus = probe.cluster_gpus
    app.state.apps_mean = probe.apps_mean
    value = valuation_of(app, elapsed_s=probe.elapsed_s, apps_mean=probe.apps_mean)
    staying = [_offered(held) for held in app.state.held.values() if not held.leaving]
    rho = bids.rho_kept(value, bids.reach_of(staying, (), gang=value.gang, spans=app.state.spec.spans, levels=()))
    return [Send(ARBITER, ProbeReply(app.state.app, probe.round, rho))]


def answer_offer(app: App, offer: Offer, now: float) -> list[Send]:
    """Phase 2: bid for whole gangs, up to what the app can use now; N_avg is that of the newest probe."""
    state = app.state
    if state.over is not None or offer.epoch < state.view[0]:
        return []
    state.lease_s = offer.lease_s
    value = valuation_of(app, elapsed_s=now - state.since, apps_mean=state.apps_mean)
    only = _reachable_homes(app, offer)
    named = None if only is None else set(only)
    usable = [gpu for gpu in offer.gpus if named is None or gpu.gpu in named]
    levels = [terms.level for terms in value.terms]
    reach = bids.reach_of(offer.kept, usable, gang=value.gang, spans=state.spec.spans, levels=levels)
    rho_none = bids.rho_kept(value, reach)
    rows = bids.bid_rows(value, reach, rho_none=rho_none, gpus_max=demand.demand_max(app))
    return [Send(ARBITER, Bid(state.app, offer.round, rho_none, rows, only))]


def _reachable_homes(app: App, offer: Offer) -> tuple[GpuId, ...] | None:
    """Return the offered GPUs that jobs are bound to which can go on nowhere else, if that is so of all jobs."""
    wanted = demand.jobs_of(app, app.facts.runnable)
    bound = [job for job in wanted if _bound(app, job)]
    if not wanted or len(bound) < len(wanted):
        return None
    reachable = {device_of(gpu.gpu) for gpu in (*offer.gpus, *offer.kept)}
    homes = {device for job in bound for device in _homes(job, reachable)}
    return tuple(gpu.gpu for gpu in offer.gpus if device_of(gpu.gpu) in homes)


def _homes(job: Job, reachable: set[GpuId]) -> set[GpuId]:
    """Return the devices on which a bound job can go on: its own if all can be had, else others of its node, too."""
    own = set(map(device_of, job.gpus))
    others = job.state.other_gpus if isinstance(job.state, Suspended) else ()
    able = (own if own <= reachable else own.union(others)) & reachable
    return able if len(able) >= len(own) else set()


def _bound(app: App, job: Job) -> bool:
    """Whether this job's process can go on only on the GPUs it is on: parked, or it would have to be parked."""
    if isinstance(job.state, Suspended):
        return True
    return isinstance(job.state, Placed | Leaving) and not jobs.movable(job, app.state.spec)


def _offered(held: HeldGpu) -> OfferedGpu:
    return OfferedGpu(held.gpu, held.node, held.rack, held.slot)


def valuation_of(app: App, *, elapsed_s: float, apps_mean: float) -> Valuation:
    """Return the numbers from which rho of any allocation follows, as things stand."""
    state = app.state
    terms = _terms(app)
    return Valuation(
        phases=estimates.works_s(app),
        gang=demand.gang(app),
        terms=terms,
        elapsed_s=elapsed_s,
        lease_s=state.lease_s,
        fair_s=valuation.fair_time_s(estimates.ideal_s(app), apps_mean=apps_mean),
        # A gang may be larger than every node: to hope for better would mean never to bid at all.
        hoped=terms[-1].level if state.spec.spans and state.spec.gang > 1 else "machine",
        sizes=state.spec.sizes,
    )


def _terms(app: App) -> tuple[LevelTerms, ...]:
    """Return the terms of this app at each level.

    A level bounds the union of the app's GPUs, but each job stands on one node. So one job accepts nothing beyond level
    `machine`, one node; several jobs are as fast in a cluster as on a node, only that a job cannot count on more than
    its gang when the GPUs lie scattered.

    Jobs that span accept all levels up to the loosest that their user does. Of several such jobs each is taken to
    lie as far apart as all together, which is the worst case.
    """
    spec = app.state.spec
    slowdown = app.facts.slowdown
    if spec.spans:
        accepted = LEVELS[: LEVELS.index(spec.level_max) + 1]
        return tuple(LevelTerms(level, slowdown[level], spec.job_demand_max) for level in accepted)
    tight: list[Level] = ["slot"] if spec.level_max == "slot" else ["slot", "machine"]
    terms = [LevelTerms(level, slowdown[level], spec.job_demand_max) for level in tight]
    if len(app.state.jobs) > 1:
        terms.append(LevelTerms("cluster", slowdown[tight[-1]], spec.gang))
    return tuple(terms)
