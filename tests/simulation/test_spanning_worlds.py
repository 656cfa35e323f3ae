"""Fault worlds of nothing but gangs on several nodes: their parts leave their GPUs after the same mini-batch."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from app_agent.core.spec import wishing
from arbiter.core.leases import joint_stops
from protocol.messages import JobId
from protocol.worker import Order
from simulator.faults.runs import _Run
from simulator.faults.scenario import NetworkOptions, Options, _hold, draw
from simulator.workers import Worker
from tests.support.effort import examples
from tests.support.wishes import replace

HOLDS = 12
POLICIES = ("fifo", "las", "drf", "srsf", "gandiva-placement")
Told = Counter[str]


def only_gangs(seed: int) -> Options | None:
    """Return the world of a seed with GPUs that no jobs share, whose apps are gangs; None if it has one node."""
    options = draw(seed, policy=POLICIES[seed % len(POLICIES)])
    largest, gpus = options.cluster.gpus_of_largest_node, options.cluster.gpus
    if largest == gpus:
        return None
    dice, apps = Random(f"gangs {seed}"), []
    for app in options.apps:
        gang = dice.randint(2, min(gpus, largest + 1))
        spec = replace(app.spec, gang=gang, sizes=(), gpus_max=0, level_max="cluster")
        apps.append(replace(app, spec=wishing(spec, spans=True, gpu_types=())))
    settings = replace(options.settings, sharing="exclusive")
    options = replace(options, apps=tuple(apps), settings=settings)
    holds = [_hold(dice, options) for _ in range(HOLDS)]
    others = [fault for fault in options.faults if fault.kind != "sharing"]
    return replace(options, faults=tuple(sorted((*others, *holds), key=lambda fault: fault.at)))


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
