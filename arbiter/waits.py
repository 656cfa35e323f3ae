"""What an app waits for, in short: by the ids of those in its way. `arbiter.queries` has the long form of `explain`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from arbiter.core.rounds import phases
from arbiter.core.state import model
from arbiter.core.state.model import App, Draining, Enrolling, Free, Leased, State
from protocol.messages import AppId


class Waits:
    """The state of the GPUs at one moment, as apps that wait look at it."""

    def __init__(self, state: State) -> None:
        """Look at all GPUs once."""
        self._state = state
        self._usable = False
        self._free = False
        self._ends: list[tuple[float, AppId]] = []  #: one entry a GPU: the end of its lease and the holder
        self._leaving: defaultdict[AppId, set[AppId]] = defaultdict(set)  #: by the winner of their GPUs
        for gpu in state.gpus.values():
            usable = model.usable(state, gpu)
            self._usable |= usable
            self._free |= usable and isinstance(gpu.state, Free)
            if isinstance(gpu.state, Leased):
                self._ends.append((gpu.state.lease.expires_at, gpu.state.lease.app))
            elif isinstance(gpu.state, Draining) and gpu.state.promised_to is not None:
                self._leaving[gpu.state.promised_to].add(gpu.state.lease.app)
        self._ends.sort()

    def of(self, app: App) -> dict[str, Any]:
        """Return what an app that waits waits for: its `kind`, and the `ids` of apps where these are in its way."""
        kind, ids = self._of(app)
        return {"kind": kind, "ids": list(ids)}

    def _of(self, app: App) -> tuple[str, Sequence[AppId]]:
        state = self._state
        if app.held_by:
            return "release", ()
        if isinstance(app.state, Enrolling):
            return ("booking", ()) if state.nodes else ("node", ())
        if leaving := self._leaving.get(app.id):
            return "apps", sorted(leaving)
        if not self._usable:
            return "gpu", ()
        if phases.awaits_solver(state):
            return "solver", ()
        if phases.awaits_bookings(state):
            return "booking", ()
        return ("round", ()) if self._free or not self._ends else ("apps", self._holders(app))

    def _holders(self, app: App) -> Sequence[AppId]:
        """Return the apps whose leases end first, as many of them as hold enough GPUs for one of its jobs."""
        first = (holder for _, holder in self._ends if holder != app.id)
        return list(dict.fromkeys(holder for holder, _ in zip(first, range(app.gang), strict=False)))
