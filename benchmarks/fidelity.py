"""The demo live against the same six apps in the world: ``python benchmarks/fidelity.py [--json] [--quick]``.

Each live run is that of ``gpu-arbiter demo``: real training in real processes, two nodes of four simulated GPUs. Its
arbiter's and node agents' cores are listened to, and what they heard says what nodes really took: from a start to
the first mini-batch, for saving, parking, leaving, deciding, for a message. The world then runs the same six specs
under the same settings with the medians of these figures (starts and saves by lot from those measured), the app's own
step times and the accuracies that its trials reported. It is listened to in the same way, and its JCTs are read off
the same state of the same arbiter.

What the world does not know is added piece by piece, which names the cause of what is left:

- ``greeting``: a worker greets long before its first mini-batch and can be ended, later parked, while it still starts;
  and a script that never heard of us cannot save;
- ``leaving``: a process needs time to end after its last mini-batch;
- ``crowd``: processes that start at the same time share the processors, and start the slower for it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

from msgspec import Struct, to_builtins
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import simulator.world
from app_agent.core.host import AppHost, Submit
from app_agent.core.spec import AppSpec
from arbiter.core.arbiter import Arbiter, Batch
from arbiter.core.effects import Decide, Decided
from arbiter.core.state.model import Settled
from launch import demo
from node_agent.core.agent import NodeAgent
from node_agent.core.events import (
    LocalEffect,
    OrderWorker,
    Sampled,
    SignalWorker,
    StartWorker,
    TakeSample,
    WorkerGone,
    WorkerSaid,
)
from protocol.core import Connected, Received, Send
from protocol.messages import JobId, NodeId, NodeReport, OwnerId, Party, TaskId
from protocol.worker import PROTO, Finished, Hello, Order, Progress, Resumed, Suspended
from simulator.cluster import GIB, Cluster, NodeSpec
from simulator.costs import Costs
from simulator.jobs import JobFacts
from simulator.nodes import SimNode
from simulator.workers import OwnNode, Worker
from simulator.world import Actor, SimApp, World

GOAL_MAKESPAN, GOAL_JCT = 0.10, 0.20
#: A worker says how far it is so often.
TELL_S = 0.25
#: How long node agents wait for a hello: what `NodeConfig` has.
HELLO_S = 15.0
#: Whose the demo's apps are.
OWNER = OwnerId("demo")
#: Nodes enrol before the first app comes.
ENROL_S = 2.0
#: How soon the world sees that a process ended while it started; shares are sums of floats.
LOOK_S, ROUNDING = 0.1, 1e-9
#: Longer than any world lasts.
NEVER_S = 1e6
#: A world that is not over by then never will be.
WORLD_S = 1000.0
#: What the world is given beyond its costs, one after the other.
VARIANTS: tuple[tuple[str, ...], ...] = ((), ("greeting",), ("greeting", "leaving"), ("greeting", "leaving", "crowd"))


# --- listening --------------------------------------------------------------------------------------------------------


class Heard(Struct, frozen=True):
    """One call of a core: when, whose, what happened and what it said and did."""

    at: float
    core: Any
    event: Any
    effects: tuple[Any, ...]


@contextmanager
def listening() -> Iterator[list[Heard]]:
    """Note every event of every arbiter and node agent of this process, live or simulated, and what came of it."""
    heard: list[Heard] = []

    def noting(handle: Callable[..., Sequence[Any]]) -> Callable[..., Sequence[Any]]:
        def noted(core: Any, event: Any, now: float) -> Sequence[Any]:
            effects = handle(core, event, now)
            heard.append(Heard(now, core, event, tuple(effects)))
            return effects

        return noted

    with (
        mock.patch.object(Arbiter, "handle", noting(Arbiter.handle)),
        mock.patch.object(NodeAgent, "handle", noting(NodeAgent.handle)),
    ):
        yield heard


class Attempt(Struct):
    """One process, as its node agent saw it; times in seconds of the arbiter's clock."""

    task: TaskId
    job: str
    gpus: int
    begun: float
    lines: list[tuple[float, int]] = []  #: mini-batches done, and when that was heard
    start_step: int = -1
    accuracies: dict[int, float] = {}  #: as reported with so many mini-batches done
    stops: list[float] = []  #: when it was told to park, parked, or went on
    suspend_s: list[float] = []
    resume_s: list[float] = []
    leave_at: float | None = None
    finished: float | None = None
    ended: float | None = None
    gone: float | None = None
    order_at: float = 0.0

    @property
    def running(self) -> list[tuple[float, int]]:
        """Seconds and mini-batches between any two of its lines without a stop in between."""
        return [
            (later - at, more - done)
            for (at, done), (later, more) in zip(self.lines, self.lines[1:], strict=False)
            if more > done and not any(at <= stop <= later for stop in self.stops)
        ]

    def start_s(self, step_s: float) -> float | None:
        """Return the time from its start to its first mini-batch; None if it was stopped before, or made none."""
        if not self.lines or any(stop < self.lines[0][0] for stop in self.stops):
            return None
        at, done = self.lines[0]
        return at - (done - self.start_step - 1) * step_s - self.begun


def attempts_of(heard: Sequence[Heard]) -> list[Attempt]:
    """Return all processes that were started, in the order of their starts."""
    attempts: dict[TaskId, Attempt] = {}
    for call in heard:
        if isinstance(call.event, WorkerSaid) and call.event.task in attempts:
            _hear(attempts[call.event.task], call.event.message, call.at)
        elif isinstance(call.event, WorkerGone) and call.event.task in attempts:
            attempts[call.event.task].gone = call.at
        for effect in call.effects:
            match effect:
                case StartWorker(task, _, job, _, gpus):
                    attempts[task] = Attempt(task, job, len(gpus), call.at)
                case OrderWorker(task, order) if order.do != "probe":
                    attempt = attempts[task]
                    attempt.order_at = call.at
                    attempt.stops.append(call.at)
                    if order.do == "leave" and attempt.leave_at is None:
                        attempt.leave_at = call.at
                case SignalWorker(task):
                    attempts[task].stops.append(call.at)
                    attempts[task].ended = call.at
    return list(attempts.values())


def _hear(attempt: Attempt, line: Any, at: float) -> None:
    match line:
        case Progress():
            attempt.start_step = line.start_step
            if line.step > line.start_step:
                attempt.lines.append((at, line.step + 1))
            if "accuracy" in line.metrics:
                attempt.accuracies[line.step + 1] = line.metrics["accuracy"]
        case Suspended():
            attempt.stops.append(at)
            attempt.suspend_s.append(line.seconds)
        case Resumed():
            attempt.stops.append(at)
            attempt.resume_s.append(at - attempt.order_at)
        case Finished() if attempt.finished is None:
            attempt.finished = at


def step_s_of(attempts: Sequence[Attempt]) -> float | None:
    """Return the mean time of a mini-batch while nothing was in its way."""
    pieces = [piece for attempt in attempts for piece in attempt.running]
    return sum(s for s, _ in pieces) / sum(n for _, n in pieces) if pieces else None


def savings_of(attempts: Sequence[Attempt]) -> list[float]:
    """Return how long each process took from the order to save and leave to its end; not who finished or was ended."""
    left = (each for each in attempts if each.ended is None and each.finished is None)
    return [each.gone - each.leave_at for each in left if each.gone and each.leave_at]


# --- what a run was ---------------------------------------------------------------------------------------------------


class Outcome(Struct, frozen=True):
    """What became of the six apps, by name; seconds. `idle_starts` are processes that made no mini-batch."""

    jct_s: dict[str, float]
    makespan_s: float
    rounds: int
    starts: int
    idle_starts: int


def outcome_of(heard: Sequence[Heard]) -> Outcome:
    """Return the JCTs as the arbiter knows them: from the first word of an app to its last."""
    core = next(call.core for call in heard if isinstance(call.core, Arbiter))
    apps = core.state.apps.values()
    ends = {app.name: app.state.at for app in apps if isinstance(app.state, Settled)}
    attempts = attempts_of(heard)
    return Outcome(
        jct_s={app.name: ends[app.name] - app.arrived_at for app in apps if app.name in ends},
        makespan_s=max(ends.values()) - min(app.arrived_at for app in apps),
        rounds=core.state.round,
        starts=len(attempts),
        idle_starts=sum(not attempt.lines for attempt in attempts),
    )


class Measured(Struct, frozen=True):
    """What the nodes of a live run took; seconds, medians where nothing else is said.

    `starts` are the starts that came to a mini-batch: how many others were starting meanwhile, on an average, and how
    long it took; saving and leaving took `savings_s`, time and again. Ending takes `leaving_s` after the last
    mini-batch, `ending_s` after a signal. `hello_share` of a start is over when the worker greets, `able_share` when it
    can be parked. `step_s` and `curves` (the accuracy after so many mini-batches) are by job, the n-th app's m-th being
    ``n.m``.
    """

    costs: Costs
    first_decision_s: float
    hello_share: float
    able_share: float
    leaving_s: float
    ending_s: float
    savings_s: tuple[float, ...]
    starts: tuple[tuple[float, float], ...]
    submitted_s: dict[str, float]
    step_s: dict[str, float]
    curves: dict[str, dict[int, float]]
    nodes: dict[str, tuple[int, ...]]

    @property
    def crowd(self) -> tuple[float, float]:
        """A start's length alone, and what every other that starts at the same time adds to it."""
        return crowd_of(self.starts)

    def pace_s(self, others: float, *, crowd: bool) -> float:
        """Return the length of a start with so many others at the same time; without `crowd` they are no hindrance."""
        alone_s, more_s = self.crowd if crowd else (self.costs.start_s, 0.0)
        return alone_s + more_s * others

    def odds(self, *, crowd: bool) -> list[float]:
        """Return how many times as long as that each start took that was measured."""
        return [start_s / self.pace_s(others, crowd=crowd) for others, start_s in self.starts]


def measure(heard: Sequence[Heard]) -> Measured:
    """Return what the world has to know about a run that was listened to."""
    attempts = attempts_of(heard)
    overall_s = step_s_of(attempts)
    assert overall_s is not None, "no job made two mini-batches"
    jobs = sorted({attempt.job for attempt in attempts})
    by_job = {job: [attempt for attempt in attempts if attempt.job == job] for job in jobs}
    step_s = {job: step_s_of(by_job[job]) or overall_s for job in jobs}
    known = [(attempt, attempt.start_s(step_s[attempt.job])) for attempt in attempts]
    starts = [(attempt, start_s) for attempt, start_s in known if start_s is not None]
    fresh = [start_s for attempt, start_s in starts if attempt.start_step < 0]
    restored = [start_s for attempt, start_s in starts if attempt.start_step >= 0]
    start_s = _median(fresh)
    leaving = [attempt.gone - attempt.finished for attempt in attempts if attempt.gone and attempt.finished]
    saving = savings_of(attempts)
    first_s, *decisions_s = _decisions(heard)
    greeted = _greetings(heard)
    core = next(call.core for call in heard if isinstance(call.core, Arbiter))
    begun = min(app.arrived_at for app in core.state.apps.values())
    return Measured(
        costs=Costs(
            message_s=_median(_delays(heard)),
            decide_s=_median(decisions_s),
            sample_s=_median(_samples(heard)),
            start_s=start_s,
            restore_s=max(0.0, _median(restored) - start_s) if restored else 0.0,
            checkpoint_s=max(0.0, _median(saving) - overall_s / 2),
            suspend_s=_median([s for attempt in attempts for s in attempt.suspend_s]),
            resume_s=_median([s for attempt in attempts for s in attempt.resume_s]),
            boundaries=True,
        ),
        first_decision_s=first_s,
        hello_share=_share([at / start_s for attempt, start_s in starts for at in greeted.get(attempt.task, ())[:1]]),
        able_share=_share([at / start_s for attempt, start_s in starts for at in greeted.get(attempt.task, ())[1:]]),
        leaving_s=_median(leaving),
        ending_s=_median([attempt.gone - attempt.ended for attempt in attempts if attempt.gone and attempt.ended]),
        savings_s=tuple(max(0.0, saving_s - overall_s / 2) for saving_s in saving) or (0.0,),
        starts=tuple((_others(attempt, attempts), start_s) for attempt, start_s in starts),
        submitted_s={app.name: app.arrived_at - begun for app in core.state.apps.values()},
        step_s={_number(job): step_s[job] for job in jobs},
        curves={_number(job): {k: v for a in by_job[job] for k, v in a.accuracies.items()} for job in jobs},
        nodes=_nodes(heard),
    )


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _number(job: str) -> str:
    """Return n.m of ``owner-n.m``."""
    return job.rpartition("-")[2]


def _decisions(heard: Sequence[Heard]) -> list[float]:
    """Return how long each decision took, first to last."""
    asked = {effect.round: call.at for call in heard for effect in call.effects if isinstance(effect, Decide)}
    answers = [(call.event.round, call.at) for call in heard if isinstance(call.event, Decided)]
    return [at - asked[number] for number, at in answers if number in asked]


def _delays(heard: Sequence[Heard]) -> list[float]:
    """Return how long each node's reports were on their way."""
    said: dict[tuple[str, int], float] = {}
    for call in heard:
        for effect in call.effects:
            if isinstance(effect, Send) and isinstance(effect.message, NodeReport):
                said.setdefault((effect.message.node, effect.message.seq), call.at)
    arrived = _node_reports(heard)
    return [at - said[report.node, report.seq] for report, at in arrived if (report.node, report.seq) in said]


def _node_reports(heard: Sequence[Heard]) -> list[tuple[NodeReport, float]]:
    """Return the reports of nodes that arrived, and when."""
    return [
        (each.message, call.at)
        for call in heard
        for each in (call.event.messages if isinstance(call.event, Batch) else (call.event,))
        if isinstance(each, Received) and isinstance(each.message, NodeReport)
    ]


def _samples(heard: Sequence[Heard]) -> list[float]:
    """Return how long each measurement that a node agent asked for took."""
    asked: dict[tuple[int, int], float] = {}
    took: list[float] = []
    for call in heard:
        if isinstance(call.event, Sampled):
            key = (id(call.core), call.event.mark)
            if key in asked:
                took.append(call.at - asked.pop(key))
        for effect in call.effects:
            if isinstance(effect, TakeSample):
                asked[id(call.core), effect.mark] = call.at
    return took


def _greetings(heard: Sequence[Heard]) -> dict[TaskId, list[float]]:
    """Return by process the time from its start to its first hello, and to the first line that says it can park."""
    begun = {effect.task: call.at for call in heard for effect in call.effects if isinstance(effect, StartWorker)}
    times: dict[TaskId, list[float]] = {}
    for call in heard:
        if not isinstance(call.event, WorkerSaid) or call.event.task not in begun:
            continue
        known, line = times.setdefault(call.event.task, []), call.event.message
        wanted = isinstance(line, Hello) if not known else isinstance(line, Progress) and line.can_park
        if len(known) < 2 and wanted:
            known.append(call.at - begun[call.event.task])
    return times


def _share(parts: Sequence[float]) -> float:
    return min(1.0, _median(parts))


def _others(attempt: Attempt, attempts: Sequence[Attempt]) -> float:
    """Return how many other processes were starting while this one was, averaged over that time."""
    begun, started = _starting(attempt)
    shared_s = 0.0
    for other in attempts:
        if other is not attempt:
            other_begun, other_started = _starting(other)
            shared_s += max(0.0, min(started, other_started) - max(begun, other_begun))
    return shared_s / (started - begun)


def _starting(attempt: Attempt) -> tuple[float, float]:
    """Return when it began and when it had started or was ended before it had."""
    ends = [attempt.lines[0][0] if attempt.lines else None, attempt.gone]
    return attempt.begun, min((end for end in ends if end is not None), default=attempt.begun)


def crowd_of(starts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return length alone and addition per other, the line with the least squares; an addition below 0 is none."""
    if len({others for others, _ in starts}) < 2:
        return _median([start_s for _, start_s in starts]), 0.0
    line = statistics.linear_regression([others for others, _ in starts], [start_s for _, start_s in starts])
    if line.slope <= 0.0:
        return _median([start_s for _, start_s in starts]), 0.0
    return max(0.0, line.intercept), line.slope


def _nodes(heard: Sequence[Heard]) -> dict[str, tuple[int, ...]]:
    """Return the number of GPUs in each slot of each node."""
    nodes: dict[str, tuple[int, ...]] = {}
    for report, _ in _node_reports(heard):
        slots = [gpu.slot for gpu in report.gpus]
        nodes[report.node] = tuple(slots.count(slot) for slot in dict.fromkeys(slots))
    return dict(sorted(nodes.items()))


# --- the world --------------------------------------------------------------------------------------------------------


class Starting(Struct):
    """A process that starts: `share`, 0 to 1, of what there is to do is done, and `goals` are the shares to come.

    `weight` is how many times as long as others it takes.
    """

    worker: Worker
    weight: float
    goals: list[tuple[float, Callable[[], None]]]
    share: float = 0.0


class Starters:
    """The processes that are starting, on all nodes.

    Alone a start takes as long as `pace` says for none besides; with others, processors are shared and all are slower.
    """

    def __init__(self, pace: Callable[[int], float]) -> None:
        self._pace = pace
        self._booked_at = 0.0
        self._version = 0
        self._all: list[Starting] = []

    def add(self, worker: Worker, weight: float, goals: Sequence[tuple[float, Callable[[], None]]]) -> None:
        """Let one more start, and do what is in `goals` when it has made that share."""
        self._book(worker.node)
        self._all.append(Starting(worker, weight, sorted(goals, key=lambda goal: goal[0])))
        self._plan(worker.node)

    def _book(self, node: OwnNode) -> None:
        """Count the time since it was last counted, and leave out who has started or was ended."""
        now = node.now()
        for each in self._all:
            each.share += (now - self._booked_at) / self._whole_s(each)
        self._booked_at = now
        self._all = [each for each in self._all if each.goals and each.worker.phase == "starting"]

    def _whole_s(self, each: Starting) -> float:
        return self._pace(len(self._all) - 1) * each.weight

    def _plan(self, node: OwnNode) -> None:
        """Look again when one of them has made its next share, and often enough to see when one was ended."""
        self._version += 1
        version = self._version
        if self._all:
            left_s = min((each.goals[0][0] - each.share) * self._whole_s(each) for each in self._all)
            node.at(min(LOOK_S, max(0.0, left_s)), lambda: self._go_on(node, version))

    def _go_on(self, node: OwnNode, version: int) -> None:
        if version != self._version:
            return
        self._book(node)
        for each in self._all:
            while each.goals and each.goals[0][0] <= each.share + ROUNDING:
                each.goals.pop(0)[1]()
        self._book(node)
        self._plan(node)


class LikeWorker(Worker):
    """A process whose start and saves take as long as some did live, by lot."""

    node: Likeness

    def await_start(self) -> None:
        """Let the starters say when it has started; its costs would keep it starting for ever."""
        node, measured = self.node, self.node.measured
        hello = Hello(PROTO, self.task, self.pid, "running", -1, -1, 0, can_park=False, can_checkpoint=False)
        able = Progress(-1, 0.0, -1, 0, can_park=True, can_checkpoint=False, saved_step=-1)
        goals: list[tuple[float, Callable[[], None]]] = [(1.0, self.greet)]
        if "greeting" in node.likes:
            goals.append((measured.hello_share, lambda: self._say_early(hello)))
            if not _plain(self):  # which can be parked from its first mini-batch on
                goals.append((measured.able_share, lambda: self._say_early(able)))
        node.starters.add(self, node.lots.choice(measured.odds(crowd="crowd" in node.likes)), goals)

    def _say_early(self, line: Hello | Progress) -> None:
        if self.phase == "starting":
            self.say(line)

    def say(self, line: Any) -> None:
        """Say a line; the script that writes no checkpoints says so only where it is to be like that."""
        if "greeting" in self.node.likes and isinstance(line, Hello | Progress) and _plain(self):
            line = replace(line, can_checkpoint=False)
        super().say(line)

    def save(self, order: Order, *, leaving: bool) -> None:
        """Save, in a time that some save took live."""
        self.node.costs = replace(self.node.costs, checkpoint_s=self.node.lots.choice(self.node.measured.savings_s))
        super().save(order, leaving=leaving)

    def signal(self, how: Literal["terminate", "kill"]) -> None:
        """End by a signal, as late as live processes do."""
        if "leaving" in self.node.likes:
            self.node.call_later(self.node.measured.ending_s, lambda: super(LikeWorker, self).signal(how))
        else:
            super().signal(how)

    def finish(self, metrics: dict[str, float]) -> None:
        """Say that the work is done, and leave as late as live processes do."""
        if "leaving" not in self.node.likes:
            super().finish(metrics)
            return
        self.say(Finished(self.training.facts.steps - 1, metrics))
        self.node.call_later(self.node.measured.leaving_s, lambda: self._finish_now(metrics))

    def _finish_now(self, metrics: dict[str, float]) -> None:
        if self.phase != "gone":
            super().finish(metrics)


class Likeness(SimNode):
    """A node whose starts and saves take as long as some did live, by lot; it does what else `likes` names."""

    worker_type = LikeWorker
    likes: tuple[str, ...] = ()
    measured: Measured
    lots: random.Random
    starters: Starters  #: of all nodes

    def perform(self, effect: LocalEffect) -> None:
        """Carry out what the node agent asks for; a process that starts waits for the starters."""
        known = set(self.workers)
        super().perform(effect)
        if isinstance(effect, StartWorker) and effect.task not in known:
            worker = self.workers[effect.task]
            assert isinstance(worker, LikeWorker)
            worker.await_start()


class OneOwner(World):
    """A world whose apps are all of one owner, as the demo's are: lots go by names, so the names must be the same."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.facts: list[Sequence[JobFacts]] = []  #: of each app, in the order of submission

    def submit(self, name: str, spec: AppSpec, jobs: Sequence[JobFacts]) -> SimApp:
        """Have the one app agent take in a further app."""
        self.facts.append(jobs)
        if OWNER not in self.apps:
            actor = self._enrol(Actor(Party("app", OWNER), AppHost(OWNER, tenant=spec.tenant, beat_s=self.beat_s)))
            self.apps[OWNER] = SimApp(OWNER, spec, (), actor, self.now)
            self.tell(actor.party, Connected())
        self.tell(self.apps[OWNER].actor.party, Submit(name, spec))
        return self.apps[OWNER]

    def _facts_of(self, job: JobId) -> JobFacts:
        app, _, number = _number(job).partition(".")
        return self.facts[int(app) - 1][int(number)]


def _plain(worker: Worker) -> bool:
    """Return whether this runs the script that writes no checkpoints."""
    return any(word.endswith("plain.py") for word in worker.spec.launch.command)


def simulate(options: demo.Options, measured: Measured, traits: tuple[str, ...] = (), seed: int = 0) -> list[Heard]:
    """Run the demo's apps in the world; `seed` decides whose is which of the measured starts. Return what was heard."""
    shared = {"likes": traits, "measured": measured, "lots": random.Random(seed)}
    shared["starters"] = Starters(lambda others: measured.pace_s(others, crowd="crowd" in traits))
    settings = demo.settings(options.lease_s)
    with listening() as heard, mock.patch.object(simulator.world, "SimNode", type("Likeness", (Likeness,), shared)):
        # Starters end a start, not the costs.
        costs = replace(measured.costs, start_s=NEVER_S, restore_s=0.0)
        first = replace(costs, decide_s=measured.first_decision_s)
        world = OneOwner(_cluster(measured), settings, first, beat_s=settings.beat_s, hello_s=HELLO_S)

        def decided(_: object) -> None:
            world.costs = costs  # the first decision alone waits for the solver's process

        world.on_round = decided
        world.run(until=ENROL_S)
        specs = demo.apps(options, Path("/"), Path("/"))
        for number, spec in enumerate(specs, 1):
            jobs = facts_of(number, spec, options, measured)
            at = ENROL_S + measured.submitted_s[spec.name]
            world.call_at(at, lambda spec=spec, jobs=jobs: world.submit(spec.name, spec, jobs))
        world.run(done=lambda: _settled(world) == len(specs) or world.now > WORLD_S)
    return heard


def _settled(world: World) -> int:
    """Return how many apps the arbiter knows to be over."""
    return sum(isinstance(app.state, Settled) for app in world.arbiter.core.state.apps.values())


def _cluster(measured: Measured) -> Cluster:
    nodes = tuple(NodeSpec(NodeId(n), "default", slots, "simulated", 16 * GIB) for n, slots in measured.nodes.items())
    return Cluster("demo", nodes)


def facts_of(number: int, spec: AppSpec, options: demo.Options, measured: Measured) -> list[JobFacts]:
    """Return the truth about the jobs of the demo's app of that number: its steps' time and its trials' accuracies."""
    return [_facts(f"{number}.{job}", spec, options, measured) for job in range(len(spec.trials))]


def _facts(job: str, spec: AppSpec, options: demo.Options, measured: Measured) -> JobFacts:
    step_s = measured.step_s.get(job, statistics.median(measured.step_s.values()))
    every = max(1, round(TELL_S / step_s))
    curve = measured.curves.get(job, {})

    def accuracy(step: int) -> float:
        return next((curve[at] for at in sorted(curve, reverse=True) if at <= step), 0.0)

    return JobFacts(
        work_s=options.steps * step_s * spec.gang,
        steps=options.steps,
        demand_max=spec.gang,
        slowdown=lambda gpus, level: 1.0,  # noqa: ARG005 - paced alike wherever it runs
        reports=tuple((step, accuracy(step)) for step in range(every, options.steps, every)),
        metric=spec.metric,
    )


# --- side by side -----------------------------------------------------------------------------------------------------


class Run(Struct, frozen=True):
    """One live run: what it was, what was measured, and the load averages (1 minute) before and after it."""

    outcome: Outcome
    measured: Measured
    load: tuple[float, float]


def live(options: demo.Options) -> Run:
    """Run the demo as ``gpu-arbiter demo`` does, and listen."""
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as out, listening() as heard:
        result = demo.run(replace(options, out=Path(out), quiet=True))
        if result.unfinished:
            raise SystemExit(f"{', '.join(result.unfinished)} did not finish; run it again on a calmer machine")
    return Run(outcome_of(heard), measure(heard), (before, os.getloadavg()[0]))


def compare(options: demo.Options, runs: Sequence[Run], worlds: int) -> dict[str, Any]:
    """Return the ``fidelity/v1`` document: each live run's costs in `worlds` worlds for each set of traits."""
    variants = []
    for traits in VARIANTS:
        done = [outcome_of(simulate(options, run.measured, traits, seed)) for run in runs for seed in range(worlds)]
        variants.append({"traits": traits} | side_by_side([run.outcome for run in runs], done))
    return {
        "schema": "fidelity/v1",
        "lease_s": options.lease_s,
        "cpus": os.cpu_count(),
        "live_runs": [_live_row(run) for run in runs],
        "worlds_per_run": worlds,
        "goals": {"makespan": GOAL_MAKESPAN, "jct": GOAL_JCT},
        "variants": variants,
        "met": variants[0]["met"],
        "met_with_named_causes": variants[-1]["met"],
    }


def side_by_side(lived: Sequence[Outcome], imagined: Sequence[Outcome]) -> dict[str, Any]:
    """Return for the makespan and each app's JCT mean, least and greatest value of both, and the means' difference.

    `error` is the standard error of the live mean, as a part of it: so far the mean of as many other runs may lie off.
    """
    makespan = _pair([each.makespan_s for each in lived], [each.makespan_s for each in imagined])
    apps = {
        name: _pair([each.jct_s[name] for each in lived], [each.jct_s[name] for each in imagined])
        for name in lived[0].jct_s
    }
    met = abs(makespan["difference"]) <= GOAL_MAKESPAN
    return {
        "makespan": makespan,
        "apps": apps,
        "starts": _pair([each.starts for each in lived], [each.starts for each in imagined]),
        "idle_starts": _pair([each.idle_starts for each in lived], [each.idle_starts for each in imagined]),
        "met": met and all(abs(app["difference"]) <= GOAL_JCT for app in apps.values()),
    }


def _pair(lived: Sequence[float], imagined: Sequence[float]) -> dict[str, Any]:
    mean, likeness = statistics.fmean(lived), statistics.fmean(imagined)
    return {
        "live": [round(value, 2) for value in (mean, min(lived), max(lived))],
        "simulated": [round(value, 2) for value in (likeness, min(imagined), max(imagined))],
        "difference": round(likeness / mean - 1.0, 4) if mean else 0.0,
        "error": round(statistics.stdev(lived) / len(lived) ** 0.5 / mean, 4) if len(lived) > 1 and mean else None,
    }


def _live_row(run: Run) -> dict[str, Any]:
    measured = run.measured
    alone_s, more_s = measured.crowd
    return {
        "load": [round(load, 1) for load in run.load],
        "makespan_s": round(run.outcome.makespan_s, 2),
        "jct_s": {name: round(jct_s, 2) for name, jct_s in run.outcome.jct_s.items()},
        "rounds": run.outcome.rounds,
        "starts": run.outcome.starts,
        "idle_starts": run.outcome.idle_starts,
        "step_s": round(statistics.fmean(measured.step_s.values()), 5),
        "costs": {
            name: value if isinstance(value, bool) else round(value, 5)
            for name, value in to_builtins(measured.costs).items()
        },
        "first_decision_s": round(measured.first_decision_s, 3),
        "leaving_s": round(measured.leaving_s, 3),
        "ending_s": round(measured.ending_s, 3),
        "hello_share": round(measured.hello_share, 3),
        "able_share": round(measured.able_share, 3),
        "start_alone_s": round(alone_s, 2),
        "start_more_s_per_other": round(more_s, 2),
        "starts_others_and_s": [[round(others, 2), round(start_s, 2)] for others, start_s in measured.starts],
    }


def show(document: dict[str, Any]) -> None:
    """Print the document as tables."""
    for run in document["live_runs"]:
        costs = run["costs"]
        print(
            f"live, load {run['load'][0]} to {run['load'][1]}: "
            f"makespan {run['makespan_s']:.1f} s, {run['starts']} starts, "
            f"a start {costs['start_s']:.1f} s ({run['start_alone_s']:.1f} alone + {run['start_more_s_per_other']:.1f} "
            f"per other), saving and leaving {costs['checkpoint_s']:.1f} s, ending {run['leaving_s']:.1f} s"
        )
    for variant in document["variants"]:
        print(f"\nthe world {'as it is' if not variant['traits'] else 'with ' + ', '.join(variant['traits'])}")
        print(f"{'':<12}{'live (least, greatest)':>26}{'error':>8}{'simulated':>26}{'difference':>12}")
        rows = {"makespan": variant["makespan"]} | variant["apps"] | {"starts": variant["starts"]}
        for name, row in rows.items():
            error = "" if row["error"] is None else f"{row['error']:.0%}"
            print(
                f"{name:<12}{_cell(row['live']):>26}{error:>8}{_cell(row['simulated']):>26}{row['difference']:>+12.1%}"
            )
        print("within the goals" if variant["met"] else "NOT within the goals")


def _cell(values: Sequence[float]) -> str:
    return f"{values[0]:.1f} ({values[1]:.1f}, {values[2]:.1f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--quick", action="store_true", help="one live run")
    parser.add_argument("--runs", type=int, default=5, help="live runs, about a minute each (5)")
    parser.add_argument("--worlds", type=int, default=10, help="worlds per live run and set of traits (10)")
    parser.add_argument("--lease-s", type=float, default=6.0, help="length of a lease (6)")
    arguments = parser.parse_args()
    if min(arguments.runs, arguments.worlds) < 1 or arguments.lease_s < 3.0:
        parser.error("--runs and --worlds take 1 or more, --lease-s 3 or more")
    options = demo.Options(lease_s=arguments.lease_s, timeout_s=300.0)
    runs = [live(options) for _ in range(1 if arguments.quick else arguments.runs)]
    document = compare(options, runs, arguments.worlds)
    if arguments.json:
        print(json.dumps(document))
    else:
        show(document)
    return 0 if document["met_with_named_causes"] else 1


if __name__ == "__main__":
    sys.exit(main())
