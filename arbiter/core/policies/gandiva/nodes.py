"""The seats of each node and their holders while a round is decided: the load, the height and the affinity of nodes.

A *device* is a GPU, a *seat* one job's part of it; unless GPUs are shared each device has one. Promised seats count as
taken, though they are not in play. No app has two seats of one device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from arbiter.core.seam import GpuView, View
from protocol.messages import AppId, GpuId, NodeId


class NodeTable:
    """All nodes with a seat in play or promised, and what the round has given and taken so far."""

    def __init__(self, view: View) -> None:
        self.seats = {seat.gpu: seat for seat in view.gpus}
        self.before = {seat.gpu: seat.holder for seat in view.gpus if seat.holder is not None}
        self.before |= {gpu: app.app for app in view.apps for gpu in app.renewable}
        self.owner: dict[GpuId, AppId] = {}  #: by seat in play
        self.held: dict[AppId, list[GpuView]] = {app.app: [] for app in view.apps}  #: seats in play, by app
        self.sitting: dict[GpuId, dict[AppId, GpuView]] = {}  #: by device, with those that are promised
        self.free: dict[GpuId, dict[GpuId, GpuView]] = {}  #: by device, the free seats
        self.devices: dict[NodeId, set[GpuId]] = {}
        self.idle: dict[NodeId, set[GpuId]] = {}  #: by node, the devices without an app
        self.taken: Counter[NodeId] = Counter()  #: by node, how many seats are taken
        self._gangs = {app.app: app.gang for app in view.apps}
        self._place = {app.app: place for place, app in enumerate(view.apps)}
        self._on: dict[NodeId, Counter[AppId]] = {}
        for seat in view.gpus:
            self.devices.setdefault(seat.node, set()).add(seat.device)
            self.free.setdefault(seat.device, {})[seat.gpu] = seat
            self.sitting.setdefault(seat.device, {})
        for node, devices in self.devices.items():
            self.idle[node] = set(devices)
        for app in view.apps:
            for seat in app.kept:
                self.devices.setdefault(seat.node, set()).add(seat.device)
                self._sit(app.app, seat)

    def _sit(self, app: AppId, seat: GpuView) -> None:
        self.sitting.setdefault(seat.device, {})[app] = seat
        self.idle.setdefault(seat.node, set()).discard(seat.device)
        self.taken[seat.node] += 1
        self._on.setdefault(seat.node, Counter())[app] += 1

    def put(self, app: AppId, seats: Iterable[GpuView]) -> None:
        """Give free seats to an app."""
        for seat in seats:
            del self.free[seat.device][seat.gpu]
            self.owner[seat.gpu] = app
            self.held[app].append(seat)
            self._sit(app, seat)

    def take(self, app: AppId, seats: Iterable[GpuView]) -> None:
        """Take seats from an app that has them."""
        for seat in seats:
            del self.owner[seat.gpu]
            self.held[app].remove(seat)
            del self.sitting[seat.device][app]
            self.free[seat.device][seat.gpu] = seat
            self.taken[seat.node] -= 1
            self._on[seat.node][app] -= 1
            if not self._on[seat.node][app]:
                del self._on[seat.node][app]
            if not self.sitting[seat.device]:
                self.idle[seat.node].add(seat.device)

    def affinity(self, node: NodeId) -> int:
        """Return the size of the jobs that a node serves: the gang of the app on it that came first; 0: of none."""
        on = self._on.get(node)
        return self._gangs[min(on, key=self._place.__getitem__)] if on else 0

    def load(self, node: NodeId) -> float:
        """Return M / N of a node."""
        return self.taken[node] / len(self.devices[node])

    def height(self, node: NodeId, more: int = 0) -> int:
        """Return ceil(M / N) of a node with so many more seats taken."""
        return -(-(self.taken[node] + more) // len(self.devices[node]))

    def idle_seats(self, node: NodeId) -> list[GpuView]:
        """Return one seat of each idle device of a node; if an app must leave it first, that app's."""
        return [self._best_seat(device) for device in sorted(self.idle.get(node, ()))]

    def _best_seat(self, device: GpuId) -> GpuView:
        return min(self.free[device].values(), key=lambda seat: (seat.gpu not in self.before, seat.gpu))

    def open_seat(self, device: GpuId) -> GpuView | None:
        """Return a free seat of a device that has an app, unless an app must leave it first."""
        free = self.free.get(device, {}).values()
        if not self.sitting[device] or any(seat.gpu in self.before for seat in free):
            return None
        return min(free, key=lambda seat: seat.gpu, default=None)

    def order(self, app: AppId) -> int:
        """Return an app's place by arrival."""
        return self._place[app]

    def sharers(self, seat: GpuView) -> int:
        """Return how many are on the device of a seat."""
        return len(self.sitting[seat.device])

    def largest(self) -> int:
        """Return the most idle devices of one node."""
        return max(map(len, self.idle.values()), default=0)

    def idle_count(self) -> int:
        """Return how many devices are idle."""
        return sum(map(len, self.idle.values()))
