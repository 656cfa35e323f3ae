"""The worth of GPUs to the app: stated ahead, or told in a round (how fair is its lot, how much is the offer worth)."""

from __future__ import annotations

from app_agent.core import demand, estimates, jobs
from app_agent.core.app import App
from app_agent.core.model import HeldGpu, Job, Leaving, Placed, Suspended
from protocol.core import Send
from protocol.messages import (
    ARBITER,
    GPUS_MAX,
    JOBS_MAX,
    LEVELS,
    SECONDS_MAX,
    SLOWDOWN_MAX,
    WORKS_MAX,
    Bid,
    Home,
    Level,
    LevelTerms,
    Offer,
    OfferedGpu,
    Probe,
    ProbeReply,
    StandingValuation,
)
from valuation.bids import Goods
from valuation.standing import Circumstances, Shape, rho_now, value_of, worth_of


def answer_probe(app: App, probe: Probe) -> list[Send]:
    """Phase 1: say how fair the app's lot is now."""
    state = app.state
    if state.over is not None or probe.epoch < state.view[0]:
        return []
    state.cluster_gpus = probe.cluster_gpus
    state.apps_mean = probe.apps_mean
    value = value_of(valuation_of(app), _shape(app), _circumstances(app, probe.elapsed_s))
    staying = [_offered(held) for held in state.held.values() if not held.leaving]
    return [Send(ARBITER, ProbeReply(state.app, probe.round, rho_now(value, staying, spans=state.spec.spans)))]


def answer_offer(app: App, offer: Offer, now: float) -> list[Send]:
    """Phase 2: bid for whole gangs, up to what the app can use now; N_avg is that of the newest probe."""
    state = app.state
    if state.over is not None or offer.epoch < state.view[0]:
        return []
    state.lease_s = offer.lease_s
    elapsed_s = now - state.since if offer.elapsed_s is None else offer.elapsed_s
    stated, shape = valuation_of(app), _shape(app)
    value = value_of(stated, shape, _circumstances(app, elapsed_s))
    worth = worth_of(stated, value, shape, offered=Goods(offer.gpus), kept=offer.kept)
    return [Send(ARBITER, Bid(state.app, offer.round, worth.rho_none, worth.rows, worth.only))]


def standing(app: App) -> StandingValuation | None:
    """Return the valuation that the arbiter is to go by; None: no round asks for it, or it is too large to be told."""
    state = app.state
    if state.over is not None or not state.probes:
        return None
    stated = valuation_of(app)
    homes = stated.homes or ()
    works = [work_s for phase in stated.phases for work_s in phase]
    lists_fit = (
        len(works) <= WORKS_MAX
        and max(len(stated.sizes), *(len(home.gpus) + len(home.other_gpus) for home in homes), 0) <= GPUS_MAX
        and len(homes) <= JOBS_MAX
    )
    # A figure beyond the wire's bounds would lose the whole report.
    figures_fit = all(0.0 <= figure <= SECONDS_MAX for figure in (*works, stated.budget_gpu_s)) and all(
        0.0 <= terms.slowdown <= SLOWDOWN_MAX for terms in stated.terms
    )
    return stated if lists_fit and figures_fit else None


def valuation_of(app: App) -> StandingValuation:
    """Return all that is the app's own in the worth of an allocation to it, as things stand."""
    spec = app.state.spec
    phases, terms = estimates.works_s(app), _terms(app)
    return StandingValuation(
        phases=phases,
        terms=terms,
        budget_gpu_s=estimates.budget_gpu_s(app),
        demand_max=spec.demand_max,
        # A gang may be larger than every node: to hope for better would mean never to bid at all.
        hoped=terms[-1].level if spec.spans and spec.gang > 1 else "machine",
        sizes=spec.sizes,
        homes=_homes(app),
        phase_demands=app.phase_demands(len(phases)) if spec.phase_growth > 1 else (),
    )


def _shape(app: App) -> Shape:
    return Shape(demand.gang(app), app.state.spec.spans, demand.demand_max(app))


def _circumstances(app: App, elapsed_s: float) -> Circumstances:
    state = app.state
    return Circumstances(elapsed_s, state.lease_s, state.apps_mean, state.cluster_gpus)


def _homes(app: App) -> tuple[Home, ...] | None:
    """Return the GPUs that each job can go on on, where all of them are bound; else None."""
    wanted = demand.jobs_of(app, app.facts.runnable)
    bound = [job for job in wanted if _bound(app, job)]
    return tuple(map(_home, bound)) if wanted and len(bound) == len(wanted) else None


def _home(job: Job) -> Home:
    return Home(job.gpus, job.state.other_gpus if isinstance(job.state, Suspended) else ())


def _bound(app: App, job: Job) -> bool:
    """Whether this job's process can go on only on the GPUs it is on: parked, or it would have to be parked."""
    if isinstance(job.state, Suspended):
        return True
    return isinstance(job.state, Placed | Leaving) and not jobs.movable(job, app.state.spec)


def _offered(held: HeldGpu) -> OfferedGpu:
    return OfferedGpu(held.gpu, held.node, held.rack, held.slot)


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
