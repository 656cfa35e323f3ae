"""Views of apps are kept from round to round: they are those of a fresh look, whatever has happened meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from arbiter.core.arbiter import Arbiter
from arbiter.core.rounds import seats, views
from arbiter.core.state.index import Index
from arbiter.core.turn import Turn
from simulator.experiment import Experiment, inputs_of, settings_of
from simulator.run import Simulation
from simulator.world import Actor, quiet

#: Events between two looks: a stale view must have time to grow stale.
EVERY = 2


def look(arbiter: Arbiter, index: Index) -> views.Looks:
    turn = Turn(arbiter.state, arbiter.state.now, index)
    return views.looks(turn, seats.shown(turn))


class Compared(Simulation):
    """A simulation that compares what a round would see with what it would see had nothing been kept."""

    looked = 0

    def _watch(self, actor: Actor, event: object, effects: Sequence[object]) -> bool:
        arbiter = actor.core
        if isinstance(arbiter, Arbiter) and self.world.events % EVERY == 0:
            kept, fresh = look(arbiter, arbiter._index), look(arbiter, Index(arbiter.state))
            assert kept == fresh
            self.looked += bool(kept.apps)
        return super()._watch(actor, event, effects)


@pytest.mark.parametrize(
    ("policy", "knobs"),
    [
        ("las", {}),
        ("fifo", {"sharing": "timeslice", "seats": "3"}),
        ("gandiva", {"sharing": "pack"}),
    ],
    ids=str,
)
def test_what_a_round_sees_of_apps_is_what_a_fresh_look_sees(policy: str, knobs: dict[str, str]) -> None:
    trace = "themis:1?apps=10&scale=0.02"
    experiment = Experiment(trace, "2x4", policy, seed=1, knobs=tuple(knobs.items()))
    workload, cluster, costs, profiles = inputs_of(experiment)
    run = Compared(workload, cluster, quiet(settings_of(experiment)), costs, profiles)
    run.run()
    assert run.looked > 15
