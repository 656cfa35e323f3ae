"""The frozen view of a round: the apps that can use GPUs, the GPUs in play, nodes, tenants, and what may be taken.

Views of apps are kept from round to round while what they were derived from is the same (`SHOWN`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from arbiter.core.layers import interactive
from arbiter.core.leases import leases, preemption_budget
from arbiter.core.rounds import seats
from arbiter.core.seam import (
    AppView,
    GpuView,
    NodeView,
    TenantView,
    View,
)
from arbiter.core.state import model
from arbiter.core.state.gpu_time import AppAccount
from arbiter.core.state.index import Cache
from arbiter.core.state.model import Draining, Gpu, Leased, State
from arbiter.core.turn import Turn
from protocol import gpu_kinds
from protocol.messages import AppId, GpuId, NodeId, TenantId

#: An app that has not left so long after its grace period is waited for no longer: its GPUs may never be empty.
LEAVE_S = 60.0
#: Apps that neither had nor got anything are told why one by one in rounds of up to so many apps. In larger rounds the
#: apps that wait share one sentence, and `rounds.losses` works out that of an app when a person asks.
REASONS_MAX = 2000


class Shown(Struct, frozen=True):
    """The view of an app that a round was last shown, with all that it was derived from."""

    app: model.App
    version: int  #: of what it holds and is promised
    renewable: tuple[GpuId, ...]  #: the GPUs in play that it holds
    guest_at: tuple[GpuId, ...]  #: the seats where it is a guest
    view: AppView
    matters: bool  #: whether the round could give it something, or take it
    movable: bool  #: whether a parked job of it can be moved, which depends on what is free
    stands: bool  #: whether it stays true while neither the app nor what it has changes, whatever else is in play
    keeps: int  #: the GPUs that it has and that are not in play
    waits: bool  #: whether it is an interactive app that has nothing and wants some


SHOWN: Cache[AppId, Shown] = Cache(by_app=True)


class Looks(Struct, frozen=True):
    """The apps that a round could give something or take it, in order of arrival, and what is known of the others."""

    apps: list[AppView]
    unseen: dict[TenantId, int]  #: the GPUs of the others, by tenant
    interactive_wait: bool  #: whether an interactive app has nothing and wants some


def make_view(turn: Turn, gpus: Mapping[GpuId, GpuView], rhos: Mapping[AppId, float]) -> View:
    """Return the frozen view of the apps that can use GPUs and the GPUs in play."""
    state, index = turn.state, turn.index
    seen = looks(turn, gpus)
    apps = tuple(seen.apps)
    waits = seen.interactive_wait and _serves_interactive(turn)
    may_be_taken, holders = takeable(turn, gpus) if waits else ((), ())
    return View(
        round=state.round,
        seed=seed_of(state),
        lease_s=state.settings.lease_s,
        cluster_gpus=index.census()[1],
        gpus=tuple(gpus.values()),
        apps=apps,
        rhos=dict(rhos),
        now=turn.now,
        apps_integral=state.apps_count.integral(turn.now),
        unseen=seen.unseen,
        seats=seats.seats_of(turn),
        shared=state.settings.shared,
        nodes=nodes_of(turn),
        leaving=leaving(turn),
        gathered=frozenset(state.aligned.keys() & gpus.keys()),
        takeable=may_be_taken,
        holders=holders,
        emptying=emptying(turn) if waits else (),
        tenants=_tenants(turn) if turn.policy.sees_tenants else {},
        budget_ms=state.settings.solver_budget_ms,
        interactive_share=state.settings.interactive_share,
        interactive_s=state.settings.interactive_s,
        tells=len(apps) <= REASONS_MAX,
        explains=False,
    )


def looks(turn: Turn, gpus: Mapping[GpuId, GpuView]) -> Looks:
    """Return what a round about these GPUs sees of all active apps.

    This walks over all of them, up to twice a round: what one of them costs is what a round costs. So the walks only
    compare; an app is looked at anew if it has changed, or what it may be given.
    """
    index, apps, seen = turn.index, turn.state.apps, turn.state.seen
    known, versions = SHOWN.of(index), index.versions
    ids = [app_id for _, app_id in index.order]
    _look_anew(
        turn,
        gpus,
        [
            app_id
            for app_id in ids
            if (shown := known.get(app_id)) is None
            or shown.app is not apps[app_id]
            or shown.version != versions[app_id]
            or not shown.stands
        ],
    )
    found = [known[app_id] for app_id in ids]
    heard_since = turn.now - turn.state.settings.app_timeout_s + 1.0  # about: `hears` says it to the last bit
    quiet = {app_id for app_id in ids if seen.get(app_id, 0.0) <= heard_since}
    if quiet:
        found = [_as_heard(turn, shown) if shown.app.id in quiet else shown for shown in found]
    traits = turn.policy.traits
    # Where a policy deals with seats, no other app may have one beside this one's without a look at it.
    sees_holders = traits.shares or traits.all_holders
    unseen: dict[TenantId, int] = {}
    for shown in [shown for shown in found if shown.keeps and not (shown.matters or sees_holders)]:
        unseen[shown.app.tenant] = unseen.get(shown.app.tenant, 0) + shown.keeps
    return Looks(
        [shown.view for shown in found if shown.matters or (sees_holders and shown.keeps)],
        unseen,
        any(shown.waits for shown in found),
    )


def _look_anew(turn: Turn, gpus: Mapping[GpuId, GpuView], changed: Sequence[AppId]) -> None:
    """Bring up to date what is shown of these apps, and of those of whom GPUs are in play, or seats a guest's."""
    index, known = turn.index, SHOWN.of(turn.index)
    promised, guests, in_play = leases.promised(turn), seats.seating(turn).guests, _in_play(gpus)
    apart = index.active if index.divided else index.active & (in_play.keys() | guests.keys())
    for app_id in apart.union(changed):
        app, shown = turn.state.apps[app_id], known.get(app_id)
        renewable, guest_at = in_play.get(app_id, ()), guests.get(app_id, ())
        if (
            shown is None
            or shown.app is not app
            or shown.version != index.versions[app_id]
            or shown.renewable != renewable
            or shown.guest_at != guest_at
            or ((index.divided or shown.movable) and shown.view.only != seats.only(turn, app, guest_at))
        ):
            known[app_id] = _shown(turn, app, renewable, guest_at, promised.get(app_id, ()))


def _shown(
    turn: Turn, app: model.App, renewable: tuple[GpuId, ...], guest_at: tuple[GpuId, ...], promised: Sequence[Gpu]
) -> Shown:
    view, movable = _look_at(turn, app, renewable, guest_at, promised), seats.movable(app)
    return Shown(
        app=app,
        version=turn.index.versions[app.id],
        renewable=renewable,
        guest_at=guest_at,
        view=view,
        matters=bool(renewable) or view.wants,
        movable=movable,
        stands=not (movable or renewable or guest_at),
        keeps=len(view.kept),
        waits=_waits(view),
    )


def _as_heard(turn: Turn, shown: Shown) -> Shown:
    """Return what is shown of an app, or if its agent is silent: then it can use only that on which it runs."""
    if not shown.matters or turn.hears(shown.app):
        return shown
    view = replace(shown.view, demand_max=min(shown.view.demand_max, turn.usable(shown.app)))
    matters = bool(view.demand_max and (shown.renewable or view.want))
    return replace(shown, view=view, matters=matters, waits=matters and _waits(view))


def _waits(view: AppView) -> bool:
    """Whether this is an interactive app that has nothing and wants some."""
    return view.requirements.kind == "interactive" and view.wants and not (view.kept or view.renewable)


def _in_play(gpus: Mapping[GpuId, GpuView]) -> dict[AppId, tuple[GpuId, ...]]:
    """Return the GPUs in play that each app holds, by id as these are."""
    found: dict[AppId, tuple[GpuId, ...]] = {}
    for gpu_id, view in gpus.items():
        if view.holder is not None:
            found[view.holder] = (*found.get(view.holder, ()), gpu_id)
    return found


def _tenants(turn: Turn) -> dict[TenantId, TenantView]:
    history, now = turn.state.history, turn.now
    weights = {each.name: each.weight for each in history.terms}
    return {
        name: TenantView(
            weight=weights.get(name, 1.0),
            quota_gpus=account.quota.rate,
            fair_gpus=account.fair.rate,
            gpus_per_weight=history.pools[name].gpus_per_weight,
            allocated_gpu_s=account.allocated.at(now),
            fair_gpu_s=account.fair.at(now),
            quota_gpu_s=account.quota.at(now),
            fair_groups=history.pools[name].accrued(now),
        )
        for name, account in sorted(history.tenants.items())
    }


def seed_of(state: State) -> int:
    """Return the seed of the present round."""
    return state.settings.seed * 1_000_003 + state.round


def _look_at(
    turn: Turn, app: model.App, renewable: tuple[GpuId, ...], guest_at: tuple[GpuId, ...], promised: Sequence[Gpu]
) -> AppView:
    held = leases.held(turn, app.id)
    only = seats.only(turn, app, guest_at)
    account = turn.state.history.apps.get(app.id) or AppAccount(app.tenant)
    had = account.allocated
    untrained = account.spent.untrained(preemption_budget.starting_gpu_s(turn, app.id))
    return AppView(
        app=app.id,
        tenant=app.tenant,
        gang=app.gang,
        demand_max=_within_kind(turn, app, app.demand_able, held),
        level_max=app.level_max,
        arrived_at=app.arrived_at,
        released_at=app.released_at,
        kept=_kept(turn, app, held, frozenset((*renewable, *guest_at)), promised),
        renewable=renewable,
        only=only,
        by_kind=only is not None and seats.bound_to(turn, app, guest_at) is None,
        requirements=app.requirements,
        alone_s=app.ideal_s,
        apps_integral=app.apps_integral,
        left_s=app.left_s,
        left_gpu_s=app.left_gpu_s,
        left_at=app.left_at,
        demand_held=app.demand_held or app.demand_max,
        declared_gpu_s=app.declared_gpu_s,
        overrun=app.overrun,
        shown=app.shown,
        asked=app.demand_max if app.shown else 0,
        loss_drop=app.loss_drop,
        served_gpu_s=app.tally.gpu_seconds,
        leases=len(held),
        granted_sum=math.fsum(gpu.state.lease.granted_at for gpu in held if isinstance(gpu.state, Leased)),
        sizes=app.sizes,
        move_s=app.move_s,
        jobs=tuple([job.gpus for job in app.jobs]),
        cooperative=app.cooperative,
        movable=app.movable,
        booking=app.booking,
        preempted=app.preempted,
        preempted_in=app.preempted_in,
        allocated=(had.total - had.rate * had.since, had.rate),
        untrained=(untrained.total - untrained.rate * untrained.since, untrained.rate),
        fair_group=account.key if account.demand else "",
        fair_offset_gpu_s=account.fair_within,
    )


def _kept(
    turn: Turn, app: model.App, held: Sequence[Gpu], apart: frozenset[GpuId], promised: Sequence[Gpu]
) -> tuple[GpuView, ...]:
    """Return the GPUs that an app keeps in any case: those that it holds but `apart`, and those promised to it."""
    useful = promised[: max(0, app.demand_able - len(held))]  # a GPU of no use must not stand for one that it runs on
    kept = [turn.index.show(gpu) for gpu in (*(gpu for gpu in held if gpu.id not in apart), *useful)]
    return tuple(sorted(kept, key=lambda gpu: gpu.gpu))


def _within_kind(turn: Turn, app: model.App, demand: int, held: Sequence[Gpu]) -> int:
    """Return how much of its demand there is at all of the kind of GPUs that an app's user asked for: whole gangs.

    An app never waits in a round for GPUs that the site has not got: it would keep others from what is there.
    """
    if not gpu_kinds.wishes_kind(app.requirements):
        return demand
    has = sum(not model.usable(turn.state, gpu) for gpu in held)
    there = turn.index.suited(app.requirements).usable + has
    return demand if there >= demand else there // app.gang * app.gang


def apps_mean(state: State, app: model.App, now: float) -> float:
    """Return N_avg: the time-weighted mean of the number of apps over this app's life so far (at least 1)."""
    return max(1.0, state.apps_count.mean_since(app.apps_integral, app.arrived_at, now))


# --- phase 2 --------------------------------------------------------------------------------------------------------


def nodes_of(turn: Turn) -> dict[NodeId, NodeView]:
    """Return the capacity of nodes, and the part that goes with draining GPUs; none where no policy needs it."""
    state = turn.state
    if not turn.policy.reserves_nodes and not any(node.cpus or node.host_bytes for node in state.nodes.values()):
        return {}
    drained: dict[tuple[NodeId, AppId], list[model.App | None]] = defaultdict(list)  #: by leaver
    for gpu_id in sorted(turn.index.draining):
        gpu = state.gpus[gpu_id]
        if isinstance(gpu.state, Draining):
            winner = state.apps.get(gpu.state.promised_to) if gpu.state.promised_to is not None else None
            comes = winner if winner is not None and winner.active else None
            drained[gpu.node, gpu.state.lease.app].append(comes)
    leaving: dict[NodeId, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for (node_id, app_id), winners in drained.items():
        # A gang leaves as one, before any app comes to a part of it; of several gangs, some may still be there then.
        leaver = state.apps[app_id]
        for part in [winners] if len(winners) <= leaver.gang else [[winner] for winner in winners]:
            before, after = _taken([leaver] * len(part)), _taken(part)
            cpus, host_bytes = leaving[node_id]
            leaving[node_id] = (cpus + max(before[0], after[0]), host_bytes + max(before[1], after[1]))
    return {
        node.id: NodeView(
            sum(model.is_first(gpu) and model.usable(state, state.gpus[gpu]) for gpu in turn.index.node_gpus[node.id]),
            node.cpus,
            node.host_bytes,
            *leaving[node.id],
        )
        for node in sorted(state.nodes.values(), key=lambda each: each.id)
    }


def _taken(owners: Sequence[model.App | None]) -> tuple[float, float]:
    """Return the cores and bytes of memory that go with a GPU of each of these."""
    apps = [app for app in owners if app is not None]
    shares = [(app.requirements.cpus / app.gang, app.requirements.host_bytes / app.gang) for app in apps]
    return sum(cpus for cpus, _ in shares), sum(host_bytes for _, host_bytes in shares)


def leaving(turn: Turn) -> frozenset[AppId]:
    """Return the apps that have not left yet what they have lost, and will: it is in service, and their grace runs."""
    found = set()
    for gpu in (turn.state.gpus[gpu] for gpu in turn.index.draining):
        app = turn.state.apps.get(gpu.state.lease.app) if isinstance(gpu.state, Draining) else None
        if not isinstance(gpu.state, Draining) or app is None or not model.usable(turn.state, gpu):
            continue
        if turn.now < gpu.state.since + app.grace_s + LEAVE_S:
            found.add(app.id)
    return frozenset(found)


def interactive_waits(turn: Turn) -> bool:
    """Whether an interactive app that this layer serves has nothing: a reason for a round where nothing is in play."""
    if not _serves_interactive(turn):
        return False
    without = (turn.state.apps[app] for app in turn.index.active - turn.index.holders)
    return any(app.requirements.kind == "interactive" and not app.held_by for app in without)


def takeable(turn: Turn, gpus: Mapping[GpuId, GpuView]) -> tuple[tuple[GpuView, ...], tuple[AppView, ...]]:
    """Return the leased GPUs not in play that a waiting interactive app may be given, and the apps that hold them."""
    shown = SHOWN.of(turn.index)
    holders = sorted(turn.index.holders & shown.keys())
    held = (turn.state.gpus[gpu] for holder in holders for gpu in sorted(turn.index.gpus[holder]))
    able = [gpu for gpu in held if isinstance(gpu.state, Leased) and gpu.id not in gpus]
    kept = preemption_budget.kept(turn)
    able = [gpu for gpu in able if gpu.id not in kept]
    taken = tuple(turn.index.show(gpu) for gpu in able if model.usable(turn.state, gpu))
    names = {gpu.holder for gpu in taken}
    return taken, tuple(shown[app].view for app in holders if app in names)


def emptying(turn: Turn) -> tuple[GpuView, ...]:
    """Return, for interactive apps that wait, GPUs that are free in a moment: their app is over, none is next."""
    found = []
    for gpu in (turn.state.gpus[gpu] for gpu in sorted(turn.index.draining)):
        if isinstance(gpu.state, Draining) and gpu.state.promised_to is None and model.usable(turn.state, gpu):
            app = turn.state.apps.get(gpu.state.lease.app)
            if app is not None and not app.active and turn.now < gpu.state.since + interactive.EMPTY_S:
                found.append(turn.index.show(gpu))
    return tuple(found)


def _serves_interactive(turn: Turn) -> bool:
    """Whether interactive apps are served by the layer for them, and not by the policy or as guests."""
    settings = turn.state.settings
    return not settings.shared and interactive.serves(turn.policy, settings.interactive_share)
