"""Imaginary MPS: kernels that overlap, and fault worlds in which the fatal fault of one client ends all on its GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from random import Random

import pytest
from msgspec.structs import replace

from node_agent.core.health import Health
from protocol.messages import JobId
from simulator.costs import NONE
from simulator.faults.runs import _Run
from simulator.faults.scenario import Fault, Options, _nodes, draw
from simulator.figures.results import summary
from simulator.profiles import FILLS, Profiles, built_in
from simulator.workers import Worker
from tests.simulation.test_sharing_runs import job, run
from tests.support.effort import examples

FAULTS = 12


def full_of_clients(seed: int) -> Options | None:
    """Return the world of a seed with MPS on all GPUs and many faults of its clients; None if no GPU is shared."""
    options = draw(seed)
    if options.settings.sharing == "exclusive":
        return None
    dice = Random(f"clients {seed}")
    traits = tuple((node, replace(each, mps=True)) for node, each in options.traits)
    times = (dice.uniform(1.0, options.calm_at) for _ in range(FAULTS))
    faults = [Fault(at, "mps", dice.choice(_nodes(options)), number=dice.randrange(8)) for at in times]
    faults = sorted((*options.faults, *faults), key=lambda fault: fault.at)
    return replace(options, traits=traits, faults=tuple(faults))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the jobs that are denied MPS after a fault, and the processes that such a fault ended."""
    counted: Counter[str] = Counter()
    deny, end = Health.deny_mps, Worker.end

    def denies(health: Health, jobs: Iterable[JobId], now: float) -> None:
        jobs = set(jobs)
        counted["denied"] += len(jobs)
        deny(health, jobs, now)

    def ends(worker: Worker, how: object) -> None:
        counted["ended"] += bool(worker.mps_fault) and worker.phase != "gone"
        end(worker, how)  # type: ignore[arg-type]

    monkeypatch.setattr(Health, "deny_mps", denies)
    monkeypatch.setattr(Worker, "end", ends)
    return counted


@pytest.mark.full  # clients and their faults are in the worlds of `make worlds`, too
def test_all_clients_of_a_fault_end_start_again_and_are_no_clients_there_any_more(seen: Counter[str]) -> None:
    for seed in range(examples(120)):
        options = full_of_clients(seed)
        if options is not None:
            assert _Run(options, None).verdict().wrong == "", seed
    assert seen["denied"] >= 10, seen
    assert seen["ended"] >= seen["denied"], seen


def test_under_mps_a_pair_does_more_as_its_kernels_overlap() -> None:
    profiles = Profiles({}, {"a": 0.75, "b": 0.75}, {("c", "d"): (0.6, 0.7)})
    assert profiles.interference("a", "b") == (1 / 1.5, 1 / 1.5)
    assert profiles.interference("a", "b", mps=True) == (1 / (1.5 * FILLS), 1 / (1.5 * FILLS))
    assert profiles.interference("c", "d", mps=True) == (0.6, 0.7), "as measured, however that was"
    apps = [job(name, 0.0, 600.0, model="lm") for name in "ab"]
    plain, mps = (summary(run(apps, "pack", costs=replace(NONE, mps=on), profiles=built_in())) for on in (False, True))
    assert plain["packed_s"] > 0.0
    assert mps["makespan_s"] < 0.95 * plain["makespan_s"]
    gangs = [job(name, 0.0, 600.0, gpus=2, model="lm") for name in "ab"]
    plain, mps = (summary(run(gangs, "pack", cluster="1x2", costs=replace(NONE, mps=on))) for on in (False, True))
    assert mps["makespan_s"] == plain["makespan_s"], "a job on several GPUs is no client"
