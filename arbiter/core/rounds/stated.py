"""The answers of apps that need not be asked, from the valuations that they have stated and the arbiter's own numbers.

The arbiter evaluates Eq. 1 and 2 with its clock, its N_avg and the leases that it knows, as their agents would: the
decision is the same, to the last bit (`valuation.standing`). A valuation lapses with the silence of its agent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from arbiter.core.leases import leases
from arbiter.core.state import model
from arbiter.core.state.index import Cache
from arbiter.core.turn import Turn
from protocol.messages import AppId, Bid, Offer, OfferedGpu, StandingValuation
from valuation.bids import Goods
from valuation.finish_time import Known, Valuation, effort
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
    """The outlook of an app, with what it was derived from beside the GPUs that are in service."""

    app: model.App
    version: int  #: of what it holds
    outlook: Outlook


EFFORTS: Cache[AppId, _Effort] = Cache(by_app=True)
OUTLOOKS: Cache[AppId, _Looked] = Cache(by_app=True)


def stands(turn: Turn, app: model.App) -> bool:
    """Whether what an app has stated answers for it now: its agent is heard of, and it is soon worked out."""
    return app.standing is not None and turn.hears(app) and _effort(turn, app) <= EFFORT_MAX


def answered(turn: Turn, apps: Sequence[model.App]) -> frozenset[AppId]:
    """Return the apps of a round for which their valuations answer, as many as are soon worked out."""
    found, left = set(), ROUND_EFFORT_MAX
    for app in apps:
        if app.standing is not None and turn.hears(app):
            steps = _effort(turn, app)
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


def outlook(turn: Turn, app: model.App) -> Outlook | None:
    """Return the part of an app's answer that is the same until it, or what it holds, changes; None: see `rho`."""
    known, version = OUTLOOKS.of(turn.index), turn.index.versions[app.id]
    looked = known.get(app.id)
    if looked is None or looked.app is not app or looked.version != version:
        found = _worked_out(turn, app, lambda: _outlook(turn, app))
        if found is None:
            return None
        looked = known[app.id] = _Looked(app, version, found)
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


def cluster_s(turn: Turn, app: model.App) -> float:
    """Return T_cluster, the app's finish time alone on the whole cluster, 0: unknown."""
    if app.standing is None:
        return app.ideal_s
    found = OUTLOOKS.of(turn.index).get(app.id)
    if found is not None and found.app is app:
        return found.outlook.alone_s
    return alone_s(app.standing, turn.index.count_for(app.requirements)[1])


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
