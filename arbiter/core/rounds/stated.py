"""The answers of apps that need not be asked, from the valuations that they have stated and the arbiter's own numbers.

The arbiter evaluates Eq. 1 and 2 with its clock, its N_avg and the leases that it knows, as their agents would: the
decision is the same, to the last bit (`valuation.standing`). A valuation lapses with the silence of its agent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from arbiter.core.leases import leases
from arbiter.core.state import model
from arbiter.core.state.index import Cache
from arbiter.core.turn import Turn
from protocol.messages import AppId, Bid, Offer, OfferedGpu, StandingValuation
from valuation import finish_time
from valuation.bids import Goods
from valuation.finish_time import Floats, Known, Valuation, effort
from valuation.standing import (
    Circumstances,
    Outlook,
    Shape,
    alone_s,
    outlook_of,
    rho_then,
    value_of,
    worth_of,
)

ReplyT = TypeVar("ReplyT")

#: Of working out what one app has stated, and all apps of one round together, in steps: some hundredths of a second,
#: and a second. Apps beyond that are asked.
EFFORT_MAX, ROUND_EFFORT_MAX = 200_000, 5_000_000
#: By app: its valuation, in gangs of so many GPUs, with the times that were worked out of it.
KNOWN: Cache[AppId, tuple[StandingValuation, int, Known]] = Cache(lasting=True, by_app=True)


class _Effort(Struct, frozen=True):
    """The effort of working out a valuation, in steps."""

    app: model.App
    steps: int


class _Looked(Struct, frozen=True):
    """The outlook of an app that is soon worked out, with what it was derived from beside the GPUs in service."""

    app: model.App
    version: int  #: of what it holds
    outlook: Outlook
    arrived_at: float
    apps_integral: float
    later_s: float  #: from now to its end, with the lease that comes first if one does
    alone_s: float


EFFORTS: Cache[AppId, _Effort] = Cache(by_app=True)
OUTLOOKS: Cache[AppId, _Looked] = Cache(by_app=True)


def stands(turn: Turn, app: model.App) -> bool:
    """Whether what an app has stated answers for it now: its agent is heard of, and it is soon worked out."""
    return app.standing is not None and turn.hears(app) and _effort(turn, app) <= EFFORT_MAX


def answered(turn: Turn, apps: Sequence[model.App]) -> frozenset[AppId]:
    """Return the apps of a round for which their valuations answer, as many as are soon worked out."""
    known, seen, left = EFFORTS.of(turn.index), turn.state.seen, ROUND_EFFORT_MAX
    now, timeout_s = turn.now, turn.state.settings.app_timeout_s
    found = set()
    for app in apps:
        if app.standing is not None and now - seen.get(app.id, app.arrived_at) <= timeout_s:  # `turn.hears`
            before = known.get(app.id)
            steps = before.steps if before is not None and before.app is app else _effort(turn, app)
            if steps <= EFFORT_MAX:
                left -= steps
                if left < 0:
                    break
                found.add(app.id)
    return frozenset(found)


def _effort(turn: Turn, app: model.App) -> int:
    known = EFFORTS.of(turn.index)
    found = known.get(app.id)
    if found is None or found.app is not app:
        assert app.standing is not None
        steps = effort(app.standing.phases, app.standing.terms, turn.index.census()[1] // app.gang)
        found = known[app.id] = _Effort(app, steps)
    return found.steps


def rho(turn: Turn, app: model.App, apps_mean: float) -> float | None:
    """Return the app's answer to a probe; None if it cannot be worked out."""
    found = outlook(turn, app)
    if found is None:
        return None
    lease_s = turn.state.settings.lease_s
    return rho_then(found, elapsed_s=turn.now - app.arrived_at, lease_s=lease_s, apps_mean=apps_mean)


def rhos(turn: Turn, app_ids: Sequence[AppId]) -> tuple[dict[AppId, float], dict[AppId, float]]:
    """Return the answers to probes of the apps that their valuations answer for now, and N_avg of each.

    They are those of `rho`, to the last bit. Of 10,000 apps hardly any has changed since the last round, so all are
    worked out at once.
    """
    found = _answering(turn, app_ids)
    names = [looked.app.id for looked in found]
    elapsed_s = turn.now - _column([looked.arrived_at for looked in found])
    means = apps_means(turn, elapsed_s, _column([looked.apps_integral for looked in found]))
    later_s = _column([looked.later_s for looked in found])
    fair_s = _column([looked.alone_s for looked in found]) * means  # Eq. 1
    answers = finish_time.rhos(elapsed_s + later_s, fair_s)
    return dict(zip(names, answers.tolist(), strict=True)), dict(zip(names, means.tolist(), strict=True))


def apps_means(turn: Turn, ages_s: Floats, integrals: Floats) -> Floats:
    """Return N_avg of apps of these ages, and integrals when they arrived, as `views.apps_mean` has it."""
    count = turn.state.apps_count
    with np.errstate(divide="ignore", invalid="ignore"):
        means = np.where(ages_s > 0.0, (count.integral(turn.now) - integrals) / ages_s, count.last_value)
    return np.where(means > 1.0, means, 1.0)


def _column(values: list[float]) -> Floats:
    return np.array(values, dtype=np.float64)


def _answering(turn: Turn, app_ids: Sequence[AppId]) -> list[_Looked]:
    """Return what is known of those of these apps for which their valuations answer now."""
    apps, seen, versions, known = turn.state.apps, turn.state.seen, turn.index.versions, OUTLOOKS.of(turn.index)
    now, timeout_s = turn.now, turn.state.settings.app_timeout_s
    found = []
    for app_id in app_ids:
        looked = known.get(app_id)
        if looked is None or looked.app is not apps.get(app_id) or looked.version != versions[app_id]:
            app = apps.get(app_id)
            if app is not None and app.active and stands(turn, app) and outlook(turn, app) is not None:
                found.append(known[app_id])
        elif now - seen.get(app_id, looked.arrived_at) <= timeout_s:  # `turn.hears`
            found.append(looked)
    return found


def outlook(turn: Turn, app: model.App) -> Outlook | None:
    """Return the part of an app's answer that is the same until it, or what it holds, changes; None: see `rho`."""
    known, version = OUTLOOKS.of(turn.index), turn.index.versions[app.id]
    looked = known.get(app.id)
    if looked is None or looked.app is not app or looked.version != version:
        found = _worked_out(turn, app, lambda: _outlook(turn, app))
        if found is None:
            return None
        later_s = turn.state.settings.lease_s + found.left_s if found.waits else found.left_s
        looked = _Looked(app, version, found, app.arrived_at, app.apps_integral, later_s, found.alone_s)
        known[app.id] = looked
    return looked.outlook


def looked_at(turn: Turn) -> list[model.App]:
    """Return the apps whose outlook is known."""
    return [
        looked.app for looked in OUTLOOKS.of(turn.index).values() if turn.state.apps.get(looked.app.id) is looked.app
    ]


def _outlook(turn: Turn, app: model.App) -> Outlook:
    standing = app.standing
    assert standing is not None
    held = [OfferedGpu(gpu.id, gpu.node, gpu.rack, gpu.slot) for gpu in leases.held(turn, app.id)]
    value = _value(turn, app, standing, apps_mean=1.0)
    alone = alone_s(standing, turn.index.count_for(app.requirements)[1])
    return outlook_of(value, held, spans=app.spans, alone_s=alone)


def bid(turn: Turn, offer: Offer, goods: Goods, apps_mean: float) -> Bid | None:
    """Return the app's answer to an offer of these goods, N_avg as in the probe; None if it cannot be worked out."""
    app = turn.state.apps[offer.app]
    standing = app.standing
    assert standing is not None

    def work() -> Bid:
        value = _value(turn, app, standing, apps_mean)
        worth = worth_of(standing, value, _shape(app), offered=goods, kept=offer.kept)
        return Bid(app.id, offer.round, worth.rho_none, worth.rows, worth.only)

    return _worked_out(turn, app, work)


def _worked_out(turn: Turn, app: model.App, work: Callable[[], ReplyT]) -> ReplyT | None:
    """Return a reply that follows from what an app has stated; if none does, the app is asked from now on.

    A valuation is a peer's. It must not end the arbiter, which would read it again from its journal.
    """
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is of this app alone
        why = f"its valuation cannot be worked out, so it is asked ({type(error).__name__}: {error})"
        turn.tell(app.id, why, loudly=True)
        turn.state.apps[app.id] = replace(turn.state.apps[app.id], standing=None)
        return None


def ideal_times_s(turn: Turn, app_ids: Iterable[AppId]) -> dict[AppId, float]:
    """Return T_id of each of these apps now."""
    apps = [turn.state.apps[app_id] for app_id in app_ids]
    means = apps_means(
        turn, turn.now - _column([app.arrived_at for app in apps]), _column([app.apps_integral for app in apps])
    )
    times_s = (_clusters_s(turn, apps) * means).tolist()  # Eq. 1
    return {app.id: ideal_s for app, ideal_s in zip(apps, times_s, strict=True)}


def _clusters_s(turn: Turn, apps: Sequence[model.App]) -> Floats:
    """Return T_cluster of each, its finish time alone on the whole cluster, 0: unknown."""
    known = OUTLOOKS.of(turn.index)

    def cluster_s(app: model.App) -> float:
        looked = known.get(app.id)
        if looked is not None and looked.app is app:
            return looked.alone_s
        if app.standing is None:
            return app.ideal_s
        return alone_s(app.standing, turn.index.count_for(app.requirements)[1])

    return _column([cluster_s(app) for app in apps])


def _value(turn: Turn, app: model.App, standing: StandingValuation, apps_mean: float) -> Valuation:
    seen = Circumstances(
        elapsed_s=turn.now - app.arrived_at,
        lease_s=turn.state.settings.lease_s,
        apps_mean=apps_mean,
        cluster_gpus=turn.index.count_for(app.requirements)[1],
    )
    return value_of(standing, _shape(app), seen, _known(turn, app, standing))


def _shape(app: model.App) -> Shape:
    return Shape(app.gang, app.spans, app.demand_wished or app.demand_max)


def _known(turn: Turn, app: model.App, standing: StandingValuation) -> Known:
    known = KNOWN.of(turn.index)
    found = known.get(app.id)
    if found is None or found[0] is not standing or found[1] != app.gang:
        if found is not None and found[1] == app.gang and found[0] == standing:
            return found[2]
        found = known[app.id] = (standing, app.gang, Known())
    return found[2]
