"""A dry run is right: an app that is then submitted starts, or waits, as it was told, and on the same GPUs.

Random sites run with the real cores of all participants, under every policy, with exclusive and with shared GPUs, with
GPUs that fail and nodes that are lost. At some moment an owner asks for a dry run of a random app, and submits that app
at the same moment. What it has after the next round is compared with the answer. Only quiet sites count: those where
the arbiter hears nothing between the question and that round but the new app, and the replies that it asks for itself.

One kind of answer cannot be exact. In an auction the bids of other apps are known only once they are made, and a dry
run asks no other app. Such answers are marked as estimates, and counted apart: nine of ten must be right. A quick form
runs with the other tests; ``make dryruns`` runs 500 quiet sites.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from itertools import count
from random import Random
from typing import Any, Literal

import pytest
from msgspec import Struct

from app_agent.core.host import AppHost
from arbiter.core.dry_run import DryRun, Forecast, may_begin
from arbiter.core.effects import RoundRecord
from arbiter.core.registry import POLICIES
from arbiter.core.state.model import Draining, Idle, Leased, Refused, State
from protocol.core import Received
from protocol.messages import AppId, AppReport, Bid, OwnerId, Party, ProbeReply, Sharing
from simulator.faults.scenario import AppOptions, draw, facts_of
from simulator.world import Actor, World
from tests.properties.test_what_binds import a_site

#: Apps that wait and start, also on GPUs that others leave for them, and apps that are refused.
QUICK_SEEDS = range(60, 120)
#: Of the sites, those that must be quiet.
QUIET = 0.4
#: Of the answers that rest on guessed bids, those that may be wrong.
ESTIMATES_WRONG = 0.1
#: A site that is busy is looked at again so much later, so often.
PAUSE_S, LOOKS = 0.25, 40

Verdict = Literal["right", "wrong", "not quiet"]


class Comparison(Struct, frozen=True):
    """What one app was told, and what came of it; GPUs with their nodes."""

    seed: int
    policy: str
    estimate: bool
    starts: bool
    verdict: Verdict
    told: str
    was: str


def told_of(forecast: Forecast) -> str:
    if forecast.refusal:
        return f"refused: {forecast.refusal}"
    return f"{len(forecast.won)} GPUs: {', '.join(f'{gpu.gpu} of {gpu.node}' for gpu in forecast.won)}"


def what_became(state: State, app: AppId) -> str:
    known = state.apps.get(app)
    if known is not None and isinstance(known.state, Refused):
        return f"refused: {known.state.reason}"
    gpus = [gpu for _, gpu in sorted(state.gpus.items()) if _has(gpu.state, app)]
    return f"{len(gpus)} GPUs: {', '.join(f'{gpu.id} of {gpu.node}' for gpu in gpus)}"


def _has(state: object, app: AppId) -> bool:
    if isinstance(state, Leased):
        return state.lease.app == app
    return isinstance(state, Draining) and state.promised_to == app


def dry_run(world: World, app: AppOptions) -> Forecast:
    """Ask as a daemon does: once, and again with each reply that the arbiter wants of the app's agent."""
    owner = OwnerId(f"app{len(world.apps) + 1}")
    host = AppHost(owner, tenant=app.spec.tenant, beat_s=world.beat_s)
    agent = host.draft(app.spec, "", world.now)
    assert not isinstance(agent, str), agent
    (send,) = agent.restate(world.now)
    assert isinstance(send.message, AppReport)
    said: list[ProbeReply | Bid] = []
    while True:
        blob = world.arbiter.core.snapshot()
        forecast = DryRun(blob, Party("app", owner), send.message, world.now, said=said).run()
        assert world.arbiter.core.snapshot() == blob
        if forecast.question is None:
            return forecast
        for reply in agent.hear(forecast.question, world.now):
            assert isinstance(reply.message, ProbeReply | Bid)
            said.append(reply.message)


def crowd(world: World, seed: int, apps: Sequence[AppOptions]) -> None:
    """Let the first of these apps have a round, and the others wait for the next one, which comes after a pause."""
    for number, app in enumerate(apps):
        world.submit(f"crowd {number}", app.spec, facts_of(app, seed))
        world.run(world.now)


class Ear:
    """Hears what comes to the arbiter until its next round is decided, and notes what the app has then."""

    def __init__(self, world: World, app: AppId) -> None:
        self.quiet = True
        self.was: str | None = None
        self._app, self._world = app, world
        world.watcher = self.hear

    def hear(self, actor: Actor, event: Any, effects: Sequence[Any]) -> bool:
        if actor is self._world.arbiter and self.was is None:
            news = isinstance(event, Received) and not isinstance(event.message, ProbeReply | Bid)
            own = news and isinstance(event.message, AppReport) and event.message.app == self._app
            self.quiet = self.quiet and (own or not news)
            if any(isinstance(effect, RoundRecord) for effect in effects):
                self.was = what_became(actor.core.state, self._app)
        return True


def compare(seed: int) -> Comparison | None:
    """Return what a new app of a random site is told, and whether it is true; None: the site was never at rest."""
    dice = Random(f"dry run {seed}")
    policy = dice.choice(sorted(POLICIES)) if dice.random() < 0.8 else "themis"
    sharing: Sharing = dice.choice(("exclusive", "exclusive", "timeslice"))
    world = a_site(seed, dice, policy, sharing)
    apps = [app for other in range(3) for app in draw(seed * 3 + other).apps]
    app = dice.choice(apps)
    state: State = world.arbiter.core.state
    for _ in range(LOOKS):
        if may_begin(state):
            break
        world.run(world.now + PAUSE_S)
    else:
        return None
    if dice.random() < 0.5:
        crowd(world, seed, [dice.choice(apps) for _ in range(dice.randint(2, 4))])
    if not (may_begin(state) and isinstance(state.phase, Idle)):
        return None
    forecast = dry_run(world, app)
    told = told_of(forecast)
    at = max(world.now, state.phase.not_before)
    sim_app = world.submit("new", app.spec, facts_of(app, seed))
    ear = Ear(world, AppId(f"{sim_app.actor.party.id}-1"))
    world.run(at, done=lambda: ear.was is not None)
    while not isinstance(state.phase, Idle):  # a round that has begun then waits for agents that are silent
        world.run(world.next_s, done=lambda: ear.was is not None)
    was = ear.was or what_became(state, sim_app.id)
    verdict: Verdict = "right" if was == told else "wrong"
    if not ear.quiet:
        verdict = "not quiet"
    return Comparison(seed, policy, bool(forecast.guessed), forecast.starts, verdict, told, was)


def judge(found: Sequence[Comparison]) -> None:
    """Raise an assertion that names the answers that were not right, if there are too many of them."""
    wrong = [each for each in found if each.verdict == "wrong" and not each.estimate]
    assert not wrong, wrong[:5]
    estimates = [each for each in found if each.verdict != "not quiet" and each.estimate]
    missed = [each for each in estimates if each.verdict == "wrong"]
    assert len(missed) <= max(1, ESTIMATES_WRONG * len(estimates)), missed[:5]


@pytest.mark.parametrize("part", range(3))
def test_an_app_starts_or_waits_as_its_dry_run_said_and_on_those_gpus(part: int) -> None:
    seeds = QUICK_SEEDS[part::3]
    found = [each for seed in seeds if (each := compare(seed)) is not None]
    quiet = [each for each in found if each.verdict != "not quiet"]
    assert len(quiet) >= QUIET * len(seeds)
    assert any(each.starts for each in quiet)
    assert any(not each.starts for each in quiet)
    judge(found)


def main(sites: int) -> None:
    """Compare until so many sites were quiet, and print the verdicts."""
    found: list[Comparison] = []
    seeds = count()
    while sum(each.verdict != "not quiet" for each in found) < sites:
        each = compare(next(seeds))
        found += [] if each is None else [each]
    kinds = ((each.verdict, "estimate" if each.estimate else "exact", _fate(each)) for each in found)
    for (verdict, kind, fate), number in sorted(Counter(kinds).items()):
        print(f"{number:6} {verdict}, {kind}, told that it {fate}")
    judge(found)


def _fate(each: Comparison) -> str:
    return "starts" if each.starts else "is refused" if each.told.startswith("refused") else "waits"


if __name__ == "__main__":
    main(int(sys.argv[1]))
