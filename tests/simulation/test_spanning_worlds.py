"""Fault worlds of gangs on several nodes: their parts leave their GPUs after the same mini-batch.

Where GPUs are shared, such gangs have theirs to themselves, and neither they nor the others wait for ever.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from app_agent.core.spec import wishing
from arbiter.core.leases import joint_stops
from protocol.messages import JobId
from protocol.worker import Order
from simulator.faults.runs import _Run
from simulator.faults.scenario import AppOptions, NetworkOptions, Options, _hold, draw
from simulator.workers import Worker
from tests.support.effort import examples
from tests.support.wishes import replace

HOLDS = 12
POLICIES = ("fifo", "las", "drf", "srsf", "gandiva-placement")
Told = Counter[str]


def only_gangs(seed: int) -> Options | None:
    """Return the world of a seed with GPUs that no jobs share, whose apps are gangs; None if it has one node."""
    options = draw(seed, policy=POLICIES[seed % len(POLICIES)])
    if not has_room(options):
        return None
    dice = Random(f"gangs {seed}")
    settings = replace(options.settings, sharing="exclusive")
    apps = tuple(as_gang(dice, options, app) for app in options.apps)
    options = replace(options, apps=apps, settings=settings)
    holds = [_hold(dice, options) for _ in range(HOLDS)]
    others = [fault for fault in options.faults if fault.kind != "sharing"]
    return replace(options, faults=tuple(sorted((*others, *holds), key=lambda fault: fault.at)))


def gangs_among_guests(seed: int) -> Options | None:
    """Return the world of a seed with GPUs that jobs share; every other app is a gang. None if it has one node."""
    options = draw(seed)
    if options.settings.sharing == "exclusive" or not has_room(options):
        return None
    dice = Random(f"gangs {seed}")
    apps = [as_gang(dice, options, app) if place % 2 else app for place, app in enumerate(options.apps)]
    holds = [_hold(dice, options) for _ in range(HOLDS)]
    faults = sorted((*options.faults, *holds), key=lambda fault: fault.at)
    return replace(options, apps=tuple(apps), faults=tuple(faults))


def has_room(options: Options) -> bool:
    return options.cluster.gpus_of_largest_node < options.cluster.gpus


def as_gang(dice: Random, options: Options, app: AppOptions) -> AppOptions:
    gang = dice.randint(2, min(options.cluster.gpus, options.cluster.gpus_of_largest_node + 1))
    spec = replace(app.spec, gang=gang, sizes=(), gpus_max=0, level_max="cluster")
    return replace(app, spec=wishing(spec, spans=True, gpu_types=()))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    """Counts the ends of joint stops, and the parts that were told to leave at no step in common with the others."""
    counted: Told = Counter()
    obey, tell = Worker.obey, joint_stops._tell

    def obeys(worker: Worker, order: Order) -> None:
        parts = worker.training.parts.values()
        trains = len(parts) > 1 and all(part.phase == "running" for part in parts)
        trains = trains and worker._steps() - 1 > worker.training.start_step
        if order.do in ("leave", "suspend") and trains:
            counted["jointly" if order.at_step >= 0 else "alone"] += 1
        obey(worker, order)

    def tells(turn: joint_stops.Turn, job: JobId, what: str) -> None:
        counted["begun" if what.startswith("is to") else "silent" if "by itself" in what else "agreed"] += 1
        tell(turn, job, what)

    monkeypatch.setattr(Worker, "obey", obeys)
    monkeypatch.setattr(joint_stops, "_tell", tells)
    return counted


@pytest.mark.full
def test_on_a_good_network_no_part_leaves_at_another_step_than_the_others(told: Told) -> None:
    """Also under clocks that are fast or slow, and slow nodes."""
    network = NetworkOptions(loss=0.0, repeat=0.0, delay_s=0.05, ordered=True, kept=True)
    for seed in range(examples(120)):
        options = only_gangs(seed)
        if options is not None:
            drains = tuple(fault for fault in options.faults if fault.kind in ("drain", "hold", "cancel"))
            run = _Run(replace(options, network=network, faults=drains), None)
            assert run.verdict().wrong == "", seed
    assert told["agreed"] >= 5, told
    assert (told["silent"], told["alone"]) == (0, 0), told


def test_nothing_unsafe_happens_and_all_that_can_finish_do_so_whatever_goes_wrong_in_the_middle(told: Told) -> None:
    for seed in range(examples(120)):
        options = only_gangs(seed)
        if options is not None:
            assert _Run(options, None).verdict().wrong == "", seed
    assert told["agreed"] >= 5, told
    assert told["jointly"] > told["alone"], told


@pytest.mark.full
def test_gangs_and_guests_on_shared_gpus_all_have_their_turn_whatever_goes_wrong(told: Told) -> None:
    for seed in range(examples(120)):
        options = gangs_among_guests(seed)
        if options is not None:
            assert _Run(options, None).verdict().wrong == "", seed
    assert told["agreed"] >= 3, told
    assert told["jointly"] > told["alone"], told
