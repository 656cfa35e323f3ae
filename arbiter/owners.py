"""GPU time by owner: the sums over an owner's apps, those of the state and those that only the ledger has."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from arbiter.core.effects import AppRecord
from arbiter.core.state.gpu_time import ratio
from arbiter.core.state.model import State
from protocol.messages import AppId

#: Apps of the ledger that are counted: the newest.
APPS_READ_MAX = 10_000


@dataclass
class Sums:
    """The GPU time of an owner's apps, in GPU-seconds."""

    had: float = 0.0
    fair: float = 0.0  #: among all apps (Astraea, Eq. 4)
    lost: float = 0.0
    held: float = 0.0  #: GPUs, now

    def add(self, had: float, fair: float, lost: float, held: float = 0.0) -> None:
        """Count one app more."""
        self.had += had
        self.fair += fair
        self.lost += lost
        self.held += held


def shares(state: State, over: Iterable[AppRecord], now: float) -> list[dict[str, Any]]:
    """Return one entry for each owner of apps in the state, or among those of the ledger that are `over`."""
    history = state.history
    sums: defaultdict[str, Sums] = defaultdict(Sums)
    for app, account in history.apps.items():
        standing = history.of_app(app, now)
        sums[owner_of(app)].add(
            standing.allocated_gpu_s, standing.fair_gpu_s, standing.lost_gpu_s, account.allocated.rate
        )
    for record in over:
        if record.app not in history.apps:
            sums[owner_of(record.app)].add(record.allocated_gpu_s, record.fair_gpu_s, record.lost_gpu_s)
    active = [app for app in state.apps.values() if app.active]
    apps, wanted = Counter(app.owner for app in active), Counter[str]()
    for each in active:
        wanted[each.owner] += each.demand_max
    return [
        {
            "owner": owner,
            "wanted_gpus": wanted[owner],
            "held_gpus": sums[owner].held,
            "apps": apps[owner],
            "gpu_seconds": sums[owner].had,
            "lost_gpu_seconds": sums[owner].lost,
            "fair_gpu_seconds": sums[owner].fair,
            "ltgf": ratio(sums[owner].had, sums[owner].fair),
        }
        for owner in sorted({*sums, *apps})
    ]


def owner_of(app: AppId) -> str:
    """Return the owner of an app, by its id."""
    return app.rpartition("-")[0]
