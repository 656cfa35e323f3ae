"""The answers of apps that need not be asked, from the valuations that they have stated and the arbiter's own numbers.

The arbiter evaluates Eq. 1 and 2 with its clock, its N_avg and the leases that it knows, as their agents would: the
decision is the same, to the last bit (`valuation.standing`). A valuation lapses with the silence of its agent.
"""

from __future__ import annotations

from arbiter.core.leases import leases
from arbiter.core.state import model
from arbiter.core.state.index import Cache
from arbiter.core.turn import Turn
from protocol.messages import AppId, Bid, Offer, OfferedGpu, StandingValuation
from valuation.finish_time import Known, Valuation
from valuation.standing import Circumstances, Shape, alone_s, rho_now, value_of, worth_of

#: By app: its valuation, in gangs of so many GPUs, with the times that were worked out of it.
KNOWN: Cache[AppId, tuple[StandingValuation, int, Known]] = Cache(lasting=True, by_app=True)


def stands(turn: Turn, app: model.App) -> bool:
    """Whether what an app has stated answers for it now: its agent is heard of."""
    return app.standing is not None and turn.hears(app)


def rho(turn: Turn, app: model.App, apps_mean: float) -> float:
    """Return the app's answer to a probe."""
    assert app.standing is not None
    value = _value(turn, app, app.standing, apps_mean)
    held = [OfferedGpu(gpu.id, gpu.node, gpu.rack, gpu.slot) for gpu in leases.held(turn, app.id)]
    return rho_now(value, held, spans=app.spans)


def bid(turn: Turn, offer: Offer, apps_mean: float) -> Bid:
    """Return the app's answer to an offer; N_avg is that of the probe."""
    app = turn.state.apps[offer.app]
    assert app.standing is not None
    value = _value(turn, app, app.standing, apps_mean)
    worth = worth_of(app.standing, value, _shape(app), offered=offer.gpus, kept=offer.kept)
    return Bid(app.id, offer.round, worth.rho_none, worth.rows, worth.only)


def cluster_s(turn: Turn, app: model.App) -> float:
    """Return T_cluster, the app's finish time alone on the whole cluster, 0: unknown."""
    return app.ideal_s if app.standing is None else alone_s(app.standing, turn.index.count_for(app.requirements)[1])


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
