"""What an app waits for, in short: by the ids of those in its way. `arbiter.queries` has the long form of `explain`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from arbiter.core.rounds import phases
from arbiter.core.state import model
from arbiter.core.state.model import App, Dependent, Draining, Enrolling, Free, Gpu, Leased, State
from protocol.messages import AppId


class _Scene:
    """The state of the GPUs of one kind, or of all."""

    def __init__(self, state: State, gpus: Iterable[Gpu]) -> None:
        self.usable = False
        self.free = False
        self.ends: list[tuple[float, AppId]] = []  #: one entry a GPU: the end of its lease and the holder
        for gpu in gpus:
            usable = model.usable(state, gpu)
            self.usable |= usable
            self.free |= usable and isinstance(gpu.state, Free)
            if isinstance(gpu.state, Leased):
                self.ends.append((gpu.state.lease.expires_at, gpu.state.lease.app))
        self.ends.sort()


class Waits:
    """The state of the GPUs at one moment, as apps that wait look at it."""

    def __init__(self, state: State) -> None:
        """Look at all GPUs once."""
        self._state = state
        self._scenes: dict[tuple[tuple[str, ...], int], _Scene] = {}  #: by the kind that an app asks for
        self._leaving: defaultdict[AppId, set[AppId]] = defaultdict(set)  #: by the winner of their GPUs
        for gpu in state.gpus.values():
            if isinstance(gpu.state, Draining) and gpu.state.promised_to is not None:
                self._leaving[gpu.state.promised_to].add(gpu.state.lease.app)

    def _scene(self, app: App) -> _Scene:
        """Return the GPUs that an app could use; they are looked at once."""
        wished = app.requirements
        kind = wished.gpu_types, wished.min_memory_bytes
        if kind not in self._scenes:
            gpus = (gpu for gpu in self._state.gpus.values() if model.suits(app, gpu))
            self._scenes[kind] = _Scene(self._state, gpus)
        return self._scenes[kind]

    def of(self, app: App) -> dict[str, Any]:
        """Return what an app that waits waits for: its `kind`, and the `ids` of apps where these are in its way."""
        kind, ids = self._kind_and_ids(app)
        return {"kind": kind, "ids": list(ids)}

    def _kind_and_ids(self, app: App) -> tuple[str, Sequence[AppId]]:
        state = self._state
        if app.held_by:
            return "release", ()
        if isinstance(app.state, Dependent):
            return "after", app.state.after
        if isinstance(app.state, Enrolling):
            return ("booking", ()) if state.nodes else ("node", ())
        if leaving := self._leaving.get(app.id):
            return "apps", sorted(leaving)
        scene = self._scene(app)
        if not scene.usable:
            return "gpu", ()
        if phases.awaits_solver(state):
            return "solver", ()
        if phases.awaits_bookings(state):
            return "booking", ()
        return ("round", ()) if scene.free or not scene.ends else ("apps", self._holders(app, scene))

    def _holders(self, app: App, scene: _Scene) -> Sequence[AppId]:
        """Return the apps whose leases end first, as many of them as hold enough GPUs for one of its jobs."""
        first = (holder for _, holder in scene.ends if holder != app.id)
        return list(dict.fromkeys(holder for holder, _ in zip(first, range(app.gang), strict=False)))
