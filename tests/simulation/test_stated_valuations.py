"""Asked or not, the decision is the same: every view and bid that a policy sees, to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from arbiter.core.effects import Decide
from protocol.core import Send
from protocol.messages import Bid, Offer, Probe, ProbeReply
from simulator.experiment import Experiment, inputs_of, settings_of
from simulator.run import Simulation
from simulator.world import Actor, quiet

pytestmark = pytest.mark.usefixtures("compiled_auction")


class Watched(Simulation):
    """A simulation that keeps what its policy was shown, and counts the questions of rounds and their answers."""

    def __init__(self, experiment: Experiment, *, saves: bool) -> None:
        workload, cluster, costs, profiles = inputs_of(experiment)
        # A question takes time, in which the world goes on: what is asked at one instant is the same either way.
        costs = replace(costs, message_s=0.0, saves=saves)
        super().__init__(workload, cluster, quiet(settings_of(experiment)), costs, profiles)
        self.shown: list[Decide] = []
        self.told = 0

    def _watch(self, actor: Actor, event: object, effects: Sequence[object]) -> bool:
        for effect in effects:
            if isinstance(effect, Decide):
                self.shown.append(effect)
            self.told += isinstance(effect, Send) and isinstance(effect.message, Probe | ProbeReply | Offer | Bid)
        return super()._watch(actor, event, effects)


def run_of(trace: str, seed: int, *, ask_max: int, saves: bool = True, **knobs: str) -> Watched:
    """Run a drawn workload whose app agents are all asked, or none that has stated its valuation."""
    settings = (("ask_max", str(ask_max)), *knobs.items())
    run = Watched(Experiment(trace, "2x4", "themis", seed=seed, knobs=settings), saves=saves)
    run.run()
    return run


@pytest.mark.parametrize(
    ("workload", "knobs"),
    [
        ("1?apps=4", {}),
        ("1?apps=4&search=hyperband", {"lease_s": "1200"}),
        ("1?apps=4&search=curve", {"policy.themis.fairness_knob": "0.5"}),
        ("1?apps=6&search=all", {"round_pause_s": "30"}),
        ("2?apps=5&tenants=2", {"round_pause_s": "60"}),
        ("1?apps=5", {"sharing": "timeslice", "seats": "3"}),
        ("1?apps=4", {"sharing": "pack"}),
        ("1?apps=4", {"saves": False}),
        ("2?apps=5", {"saves": False, "sharing": "timeslice"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_policy_sees_the_same_whether_apps_are_asked_or_have_stated_their_valuation(
    workload: str, knobs: dict[str, Any], seed: int
) -> None:
    asked = run_of(f"themis:{workload}&scale=0.05", seed, ask_max=10_000, **knobs)
    stated = run_of(f"themis:{workload}&scale=0.05", seed, ask_max=0, **knobs)
    assert asked.told > 10 * max(1, stated.told)
    assert len(stated.shown) == len(asked.shown) > 3
    for one, other in zip(asked.shown, stated.shown, strict=True):
        assert one == other
    assert any(decide.bids for decide in stated.shown)
