"""What errors of NVML about one GPU cost: nothing if they are short, and the lease of that GPU alone if they last.

The real nvidia-ml-py reads a played driver; what it says goes through the core of a node agent to that of an arbiter,
and back, under one clock of the test.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from pathlib import Path

import pynvml
import pytest

from arbiter.core.arbiter import Effect
from arbiter.core.state.model import Leased
from node_agent.core.events import (
    Adopted,
    CheckpointProcess,
    NodeEffect,
    OrderWorker,
    Sampled,
    SignalWorker,
    StartWorker,
    WorkerStarted,
)
from node_agent.core.proof import TOLERATED_S
from node_agent.devices import gpm
from node_agent.devices.nvml import NvmlBackend
from node_agent.devices.sampling import measure
from protocol.core import Received, Send
from protocol.messages import ARBITER, GpuId, NodePlan, NodeReport, Party, TaskId
from tests.support.arbiter_site import Site, wish
from tests.support.node_harness import GIB, NODE, Bench, hello, progress
from tests.support.stand_in import StandIn, cards

GPUS, SICK = 3, 1
SAMPLE_S, APP_BEAT_S = 0.5, 5.0
APPS = [f"a{number}-1" for number in range(GPUS)]
#: It has no GPU, and would get that of a lease that is lost.
WAITING = "late-1"
#: Some of the functions of NVML that a look at a GPU calls.
MEMORY, PROCESSES = "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetComputeRunningProcesses_v3"
SETTINGS = "nvmlDeviceGetMigMode", "nvmlDeviceGetComputeMode", "nvmlDeviceGetFieldValues"
#: Lost, reset required, unknown; an error without a name.
CODES = (15, 16, 999, 4711)


class Stage:
    """An arbiter and a node agent of three GPUs, each with a task of an app of its own; one app more waits."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = StandIn(folder, *cards(GPUS, gpm=1))
        self.library = self.driver.load(monkeypatch)
        self.site, self.bench = Site(), Bench(fresh=True, idle_bytes_max=GIB, parked_bytes_max=GIB)
        self.backend = NvmlBackend((), clock=lambda: self.site.now, look=["true"])
        self.tasks: dict[int, TaskId] = {}  #: by process
        self.acts: list[tuple[TaskId, str]] = []  #: whatever is done to a task
        self.plans: list[NodePlan] = []
        self.node_hears(self.bench.say(Adopted(())))
        self.run(1.0)
        for app in (*APPS, WAITING):
            self.arbiter_does(self.site.app(app))
        self.run(10.0)
        for app in APPS:
            self.arbiter_does(self.beat(app))
        self.run(2.0)
        assert sorted(task for task, _ in self.acts) == [f"{app}.0-a0" for app in APPS]
        self.acts.clear()
        self.before = self.holders()
        assert sorted(map(str, self.before)) == APPS

    def gpu(self, index: int) -> GpuId:
        return GpuId(self.driver.cards[index].uuid)

    def holders(self) -> list[str | None]:
        """The app of each GPU's lease; of a lease that was taken back it is no more."""
        states = [self.site.gpu_state(self.gpu(index)) for index in range(GPUS)]
        return [state.lease.app if isinstance(state, Leased) else None for state in states]

    def beat(self, app: str) -> list[Effect]:
        held = self.site.held(app)
        return self.site.app(app, jobs=[wish(app, 0, held)] if held else ())

    def run(self, seconds: float) -> None:
        """Let time pass: the node agent measures, tasks make steps, apps say that they are there."""
        for _ in range(round(seconds / SAMPLE_S)):
            self.arbiter_does(self.site.wait(SAMPLE_S))
            self.bench.now = self.site.now
            self.node_hears(self.bench.wait(0.0))
            self.node_hears(self.bench.say(Sampled(self.bench.mark, measure(self.backend, self.tasks.get))))
            for task in self.tasks.values():
                self.node_hears(self.bench.worker(task, progress(int(self.site.now), checkpoint=True)))
            if self.site.now % APP_BEAT_S < SAMPLE_S:
                for app in (*APPS, WAITING):
                    self.arbiter_does(self.beat(app))

    def looks(self) -> list[str]:
        """Return the functions of the library that a look calls: nvidia-ml-py keeps those that it has found."""
        pynvml._nvmlGetFunctionPointer_cache.clear()
        self.driver.xid(SICK, 43)  # an event, of which the driver is asked for the GPU; it asks for nothing
        self.run(2 * SAMPLE_S)
        return sorted(pynvml._nvmlGetFunctionPointer_cache)

    def arbiter_does(self, effects: Iterable[object]) -> None:
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, NodePlan):
                self.plans.append(effect.message)
                self.node_hears(self.bench.say(Received(ARBITER, effect.message)))

    def node_hears(self, effects: Iterable[NodeEffect]) -> None:
        for effect in list(effects):
            match effect:
                case Send(message=NodeReport() as report):
                    self.arbiter_does(self.site.hear(Party("node", NODE), report))
                case StartWorker(task=task, gpus=gpus):
                    self.acts.append((task, "start"))
                    self._start(task, gpus[0])
                case OrderWorker(task=task, order=order) if order.do != "sample":  # that reads its memory, no more
                    self.acts.append((task, order.do))
                    if order.do == "leave":
                        self._end(task)
                case SignalWorker(task=task, how=how):
                    self.acts.append((task, how))
                case CheckpointProcess(task=task, do=do):
                    self.acts.append((task, f"driver: {do}"))
                case _:
                    pass

    def _start(self, task: TaskId, gpu: GpuId) -> None:
        pid = 4000 + len(self.tasks)
        self.tasks[pid] = task
        index = next(index for index in range(GPUS) if self.gpu(index) == gpu)
        self.driver.change(index, processes=[(pid, 10_000, "compute")], used=10_100)
        self.node_hears(self.bench.say(WorkerStarted(task, pid)))
        for line in (hello(task, checkpoint=True), progress(1, checkpoint=True)):
            self.node_hears(self.bench.worker(task, line))

    def _end(self, task: TaskId) -> None:
        pid = next(pid for pid, each in self.tasks.items() if each == task)
        del self.tasks[pid]
        index = next(i for i, card in enumerate(self.driver.cards) if [one[0] for one in card.processes] == [pid])
        self.driver.change(index, processes=[], used=100)
        self.node_hears(self.bench.gone(task, 75))


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path / "driver", monkeypatch)


def is_about_a_gpu(function: str) -> bool:
    return function.startswith("nvmlDevice") or function == "nvmlGpmSampleGet"


@pytest.mark.parametrize(
    ("seconds", "codes"),
    [
        (2.5, (15, 999)),
        pytest.param(2.5, CODES, marks=pytest.mark.full),
        pytest.param(1.0, CODES, marks=pytest.mark.full),
    ],
)
def test_a_short_error_of_any_function_that_a_look_calls_costs_no_lease_moves_none_and_no_task_is_told_anything(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, seconds: float, codes: tuple[int, ...]
) -> None:
    monkeypatch.setattr(gpm, "AGAIN_S", SAMPLE_S)  # monitors that erred are left alone for so long
    functions = stage.looks()
    assert {MEMORY, PROCESSES, *SETTINGS, "nvmlEventSetWait_v2", "nvmlGpmSampleGet"} <= set(functions)
    for case in itertools.product(functions, codes):
        function, code = case
        plans, erred = len(stage.plans), stage.library.times_erred()
        stage.driver.fault("error", function, SICK if is_about_a_gpu(function) else "*", code)
        stage.driver.xid(SICK, 43)
        for _ in range(math.ceil(seconds / SAMPLE_S)):
            stage.run(SAMPLE_S)
            assert stage.holders() == stage.before, case
        assert stage.library.times_erred() > erred or not is_about_a_gpu(function), case
        stage.driver.heal()
        stage.run(SAMPLE_S)
        assert stage.holders() == stage.before, case
        assert stage.acts == [], case
        assert {order.want for plan in stage.plans[plans:] for order in plan.tasks} <= {"run"}, case


@pytest.mark.parametrize("function", [MEMORY, PROCESSES, *SETTINGS])
def test_an_error_that_lasts_costs_the_lease_of_its_gpu_and_no_other(stage: Stage, function: str) -> None:
    stage.driver.fault("error", function, SICK, 999)
    stage.run(TOLERATED_S)
    assert (stage.holders(), stage.acts) == (stage.before, [])
    stage.run(4 * SAMPLE_S)
    without = list(stage.before)
    without[SICK] = None
    assert stage.holders() == without
    stage.run(10.0)
    assert stage.holders() == without, "and nobody gets it as long as it errs"
    assert stage.acts == [(TaskId(f"{stage.before[SICK]}.0-a0"), "leave")]
    stage.driver.heal()
    stage.run(5.0)
    assert stage.holders()[SICK] is not None
    assert [app for app in stage.holders() if app in without] == [app for app in without if app]
