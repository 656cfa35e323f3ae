"""Turns of a lease's length, for jobs that may lie on several nodes where GPUs are shared.

Such a job has its GPUs to itself (`AppView.whole_gpus`), so the short turns of node agents are not for it. Without a
rule it would wait for as long as newcomers come to share the GPUs, and once it had them, others would wait for its end.
So a job that has had its GPUs for `lease_s` gives them up

- to a gang that waits for whole GPUs: those on the GPUs with the fewest jobs, in one place that is close enough;
- if it has whole GPUs itself, to any that waits and could begin there.

Only jobs that can save or be suspended give way, and none does for a lower priority. A job that has given way is placed
anew in the same round: it shares GPUs elsewhere, or waits for its next turn.

*Source:* ours. Gandiva (OSDI 2018) has one kind of turns, a minute long, of jobs that all lie on one node each;
docs/decisions/0005 has the reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from arbiter.core.placement.locality import place_of
from arbiter.core.policies.gandiva.nodes import NodeTable
from arbiter.core.seam import AppView, GpuView, View
from protocol.messages import AppId, GpuId, device_of

Left = list[tuple[AppView, list[GpuView]]]  #: who gives way, and the seats that it leaves


class Job(Protocol):
    """One job that has its GPUs."""

    seats: list[GpuView]


class Round(Protocol):
    """The part of a round of `gandiva` that is used here."""

    view: View
    apps: dict[AppId, AppView]
    table: NodeTable

    def say(self, app: AppId, what: str) -> None:
        """Note something to tell an app."""

    def jobs(self, app: AppView) -> Sequence[Job]:
        """Return the jobs of `app` that have all the seats they were divided."""

    def place_gang(self, app: AppView) -> bool:
        """Place one gang of `app`, somehow."""


def take_turns(round_: Round, waiting: Sequence[AppView]) -> list[AppView]:
    """Let jobs that have had a lease's time give way to others; return the apps that still wait."""
    if not round_.view.shared:
        return list(waiting)
    still: list[AppView] = []
    given_way: list[AppView] = []
    for app in waiting:
        left = _clear(round_, app) if app.whole_gpus else _succeed(round_, app)
        given_way += [each for each, _ in left]
        if not left:
            still.append(app)
        for each, seats in left:
            nodes = ", ".join(sorted({seat.node for seat in seats}))
            round_.say(each.app, f"leaves {len(seats)} of its GPUs on {nodes} after a lease's time: {app.app} waits")
    return [*still, *(app for app in given_way if not round_.place_gang(app))]


def look_again_s(round_: Round, waiting: Sequence[AppView]) -> float | None:
    """Return when the next job will have had its GPUs for a lease's time that may have to give way then."""
    apps = [app for app in round_.view.apps if app.leases]
    pairs = ((app, other) for other in waiting for app in apps if other.whole_gpus or app.whole_gpus)
    times = [round_.view.lease_s - _held_s(round_, app) for app, _ in pairs] if round_.view.shared else []
    return min((max(1.0, time) for time in times if time > 0.0), default=None)


def _held_s(round_: Round, app: AppView) -> float:
    """Return for how long an app has had its GPUs, on the mean."""
    return round_.view.now - app.granted_sum / app.leases if app.leases else 0.0


def _gives_way(round_: Round, app: AppView, newcomer: AppView) -> bool:
    able = app.movable or app.cooperative is True
    lower = app.requirements.priority <= newcomer.requirements.priority
    return able and lower and app.app != newcomer.app and _held_s(round_, app) >= round_.view.lease_s


def _clear(round_: Round, app: AppView) -> Left:
    """Place a gang of `app` on whole GPUs that others give up; return these, none if it cannot be placed so."""
    table, apps = round_.table, round_.apps
    usable = None if app.only is None else frozenset(map(device_of, app.only))
    places: dict[tuple[str, ...], list[tuple[int, GpuId]]] = {}
    for node, devices in sorted(table.devices.items()):
        for device in sorted(devices if usable is None else devices & usable):
            sitting = table.sitting[device]
            if all(seat in table.held[each] for each, seat in sitting.items()) and all(
                _gives_way(round_, apps[each], app) for each in sitting
            ):
                seat = next(iter([*sitting.values(), *table.free.get(device, {}).values()]), None)
                if seat is not None:
                    assert seat.node == node
                    places.setdefault(place_of(seat, app.level_max), []).append((len(sitting), device))
    fitting = [sorted(place)[: app.gang] for _, place in sorted(places.items()) if len(place) >= app.gang]
    if not fitting:
        return []
    chosen = min(fitting, key=lambda place: sum(count for count, _ in place))
    names = {device for _, device in chosen}
    leavers: list[AppId] = sorted({each for device in names for each in table.sitting[device]})
    return _instead(round_, app, [(apps[each], _seats_on(round_, apps[each], names)) for each in leavers])


def _succeed(round_: Round, app: AppView) -> Left:
    """Place a gang of `app` where a job on whole GPUs gives them up, the one that has had them longest first."""
    holders = [each for each in round_.view.apps if each.whole_gpus and round_.table.held[each.app]]
    for holder in sorted(holders, key=lambda each: -_held_s(round_, each)):
        if _gives_way(round_, holder, app):
            for job in round_.jobs(holder):
                left = _instead(round_, app, [(holder, job.seats)])
                if left:
                    return left
    return []


def _seats_on(round_: Round, app: AppView, devices: set[GpuId]) -> list[GpuView]:
    """Return all seats of those jobs of `app` that have one on `devices`; of jobs that are not known, all it has."""
    jobs = [job.seats for job in round_.jobs(app) if any(seat.device in devices for seat in job.seats)]
    known = {seat.device for seats in jobs for seat in seats}
    held = round_.table.held[app.app]
    whole = known.issuperset(seat.device for seat in held if seat.device in devices)
    return [seat for seats in jobs for seat in seats] if whole else [*held]


def _instead(round_: Round, app: AppView, left: Left) -> Left:
    """Place a gang of `app` once these seats are left; if it cannot be placed even so, undo that and return none."""
    for each, seats in left:
        round_.table.take(each.app, seats)
    if round_.place_gang(app):
        return left
    for each, seats in left:
        round_.table.put(each.app, seats)
    return []
