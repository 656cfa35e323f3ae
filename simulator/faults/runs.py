"""Runs of fault worlds, one for each seed, with their verdicts and a report of each that fails.

A world has two parts. While its faults last, safety is judged at every instant (`checks`). After the faults liveness
is demanded: every app that can finish does, and leaves nothing behind, within bounds of time, messages and rounds
that follow from its work and its size. An app that cannot finish is named with the reason.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from arbiter.core.arbiter import Batch
from arbiter.core.effects import RoundRecord
from arbiter.core.registry import POLICIES
from arbiter.core.seam import Traits
from arbiter.core.state.model import App
from protocol.core import Received, Send
from protocol.garbage import seldom_collected
from protocol.gpu_kinds import counted, suits, wishes_kind
from protocol.journal import JournalError
from protocol.messages import AppReport, Holdings, NodeId, NodePlan, NodeReport, Requirements
from simulator.faults.checks import Checks, Violation, unsettled
from simulator.faults.injector import FaultInjector, Network
from simulator.faults.scenario import Options, draw
from simulator.world import Actor, SimApp, Stuck, World

#: Seconds after the faults in which timeouts and beats must notice the losses and make up for them.
RECOVERY_S = 300.0
#: Allowed time as a multiple of that of all apps one after the other, each on its smallest gang, placed at its worst.
SLACK = 4.0
#: Messages of each participant per second, at most, after the faults; beats included.
MESSAGES_RATE_MAX = 6.0
#: Seconds added to the time a world takes: all participants restate everything when all links are mended at once.
FLURRY_S = 30.0
#: The most events at one instant: an instant that never ends should be found out soon.
INSTANT_MAX = 10_000
#: Lines kept of a failing world, and characters of a line.
LINES_TOLD = 40
LINE_CHARS_MAX = 600
#: In one world of so many each journal is replayed from its very first event at the end, a fifth of a world's time.
REPLAYED_EVERY = 3
#: Worlds that one process is given at a time.
BATCH = 20

Tell = Callable[[str], None]
Mutant = Callable[[], AbstractContextManager[None]]

_IDS = re.compile(r"app\d+-\d+(?:\.\d+)?(?:-a\d+)?(?:\.\d+)?|n\d+-g\d+|\bn\d+\b")


class Bounds(Struct, frozen=True):
    """The bounds of a world after its faults: seconds, and messages and rounds per second."""

    seconds: float
    messages_rate: float  #: per second
    rounds_rate: float  #: per second

    def messages(self, seconds: float) -> float:
        """Return how many messages are allowed in `seconds`."""
        return self.messages_rate * (seconds + FLURRY_S)

    def rounds(self, seconds: float) -> float:
        """Return how many rounds are allowed in `seconds`."""
        return self.rounds_rate * (seconds + FLURRY_S)


class WorldVerdict(Struct, frozen=True):
    """The verdict on one world. `wrong` is empty if it passed; otherwise `lines` are its last events that matter.

    `seconds`, `messages` and `rounds` count from the end of the faults on, `waiting` are apps that cannot finish, each
    with why.
    """

    seed: int
    wrong: str
    objects: tuple[str, ...]
    at: float
    calm_at: float
    bounds: Bounds
    seconds: float
    messages: int
    rounds: int
    events: int
    restarts: int
    deposed: int  #: former leaders whose commit was refused beside the next one
    outcomes: dict[str, int]  #: apps by the state of their record
    waiting: dict[str, str]
    cpu_s: float
    lines: tuple[str, ...] = ()
    policy: str = ""  #: the only one in force, if one was asked for

    @property
    def command(self) -> str:
        """The command that repeats it and prints every event."""
        under = f" --policy {self.policy}" if self.policy else ""
        return f"gpu-arbiter worlds --seed {self.seed} --count 1{under} --trace"


def run_worlds(seeds: Sequence[int], *, jobs: int = 1, policy: str = "") -> Iterator[WorldVerdict]:
    """Yield the verdict on the world of each seed, in their order, from so many processes; see `run_world`."""
    run = partial(run_world, policy=policy)
    if jobs == 1:
        yield from map(run, seeds)
        return
    with ProcessPoolExecutor(max_workers=jobs) as pool:
        yield from pool.map(run, seeds, chunksize=BATCH)


def run_world(seed: int, *, policy: str = "", tell: Tell | None = None, mutant: Mutant = nullcontext) -> WorldVerdict:
    """Return the verdict on the world of `seed`, under one `policy` if it is named.

    `tell` gets a line of every event, and `mutant` is in force meanwhile.

    Without `tell` no lines are made at first, which is faster; a world that fails is run again for its last lines.
    """
    with mutant(), seldom_collected():
        verdict = _Run(draw(seed, policy=policy), tell).verdict()
        if verdict.wrong and tell is None:
            lines: deque[str] = deque(maxlen=LINES_TOLD)
            about = _family(verdict.objects)

            def remember(line: str) -> None:
                if not about or any(each in line for each in about):
                    lines.append(line)

            _Run(draw(seed, policy=policy), remember).verdict()
            verdict = replace(verdict, lines=tuple(lines))
    return replace(verdict, policy=policy)


def _family(objects: Sequence[str]) -> set[str]:
    """Return `objects` and the apps that they are of."""
    return {*objects} | {found[0] for each in objects if (found := re.match(r"app\d+-\d+", each))}


class _Run:
    """One world and its judgement."""

    def __init__(self, options: Options, tell: Tell | None) -> None:
        self.options = options
        self.began_s = time.process_time()
        self.checks = Checks()
        self.rounds = 0
        self.network = Network(options.network, options.seed)
        self.world = World(
            options.cluster,
            options.settings,
            options.costs,
            beat_s=options.beat_s,
            hello_s=options.hello_s,
            route=self.network,
            traits=dict(options.traits),
            talks=options.settings.sharing != "exclusive",
            check=self.checks,
            site=options.site,
        )
        self.world.on_round = self._count
        self.world.instant_max = INSTANT_MAX
        told = [] if tell is None else [_Teller(self.world, tell)]
        self.injector = FaultInjector(self.world, options, self.network, told=[*told, self._judge])
        self.injector.on_loss = self.checks.forget
        self.injector.on_commit = partial(self.checks.judge_commit, self.world)
        self.world.on_arbiter = partial(self.checks.judge_leader, self.world)
        for teller in told:
            self.injector.on_aside = teller.tell_former
        self.checks.known_by = options.calm_at + RECOVERY_S
        self.waiting: dict[str, str] = {}
        self.calm = (0, 0)  #: messages and rounds at the end of the faults

    def _judge(self, actor: Actor, event: Any, effects: Sequence[Any]) -> None:
        if actor is self.world.arbiter:
            self.checks.judge_sales(actor.core.state, event, effects)
            self.checks.judge_drains(actor.core.state)
            self.checks.judge_holds(actor.core.state)
            self.checks.judge_kinds(self.world)
            self.checks.judge_adoption(actor.core.state)
            self.checks.judge_effects(self.world, effects)
        elif actor.party.role == "node":
            self.checks.judge_obedience(self.world.nodes[NodeId(actor.party.id)], event, effects)

    def _count(self, record: RoundRecord) -> None:
        self.rounds += 1

    def verdict(self) -> WorldVerdict:
        """Run it and return the verdict."""
        wrong = ""
        objects: tuple[str, ...] = ()
        try:
            self._run()
        except Violation as violation:
            wrong, objects = str(violation), violation.objects
        except (AssertionError, LookupError, ValueError, TypeError, Stuck, JournalError) as error:
            # A core's own assertions count as well as the checks.
            wrong = f"{type(error).__name__}: {error}"
            objects = tuple(dict.fromkeys(_IDS.findall(wrong)))
        options, world = self.options, self.world
        records = [sim_app.actor.core.state.records.get(sim_app.id) for sim_app in world.apps.values()]
        outcomes = [record.state if record is not None else "unknown" for record in records]
        return WorldVerdict(
            seed=options.seed,
            wrong=wrong,
            objects=objects,
            at=world.now,
            calm_at=options.calm_at,
            bounds=self._bounds(),
            seconds=max(0.0, world.now - options.calm_at),
            messages=world.messages - self.calm[0],
            rounds=self.rounds - self.calm[1],
            events=world.events,
            restarts=self.injector.restarts,
            deposed=self.injector.deposed,
            outcomes={state: outcomes.count(state) for state in sorted(set(outcomes))},
            waiting=self.waiting,
            cpu_s=time.process_time() - self.began_s,
        )

    def _run(self) -> None:
        world, options = self.world, self.options
        world.run(until=options.calm_at)
        self.checks.judge_whole(world)
        self.calm = (world.messages, self.rounds)
        world.run(until=options.calm_at + self._bounds().seconds, done=self._done)
        self._judge_liveness()
        self.checks.judge_whole(world)
        if self.injector.standby is not None:
            self.injector.standby.agree(world.arbiter.core)
        if options.seed % REPLAYED_EVERY == 0:
            for party in self.injector.records:
                self.injector.restored(party, from_zero=True)

    # --- liveness ---------------------------------------------------------------------------------------------------

    def _bounds(self) -> Bounds:
        """Return this world's bounds, from its work and its size."""
        options = self.options
        works = [len(app.spec.numbers) * app.work_s / app.spec.gang * 1.6 for app in options.apps]
        change_s = options.costs.change_s * 5
        # Where changing hands takes longer than a lease, little of each lease is work.
        slowest = max((traits.slow for _, traits in options.traits), default=1.0)
        waste = max(1.0, options.costs.change_s * slowest / options.settings.lease_s)
        seconds = RECOVERY_S + SLACK * waste * sum(work_s + change_s for work_s in works)
        participants = 1 + len(options.cluster.nodes) + len(options.apps)
        return Bounds(seconds, MESSAGES_RATE_MAX * participants, 1.0 / options.settings.round_pause_s)

    def _done(self) -> bool:
        return all(map(self._is_over, self.world.apps.values())) and not unsettled(self.world, self.injector.vanished)

    def _is_over(self, sim_app: SimApp) -> bool:
        """Whether an app is over, or cannot finish."""
        return sim_app.over_at is not None or bool(self._obstacle(sim_app))

    def _obstacle(self, sim_app: SimApp) -> str:
        """Return the reason why an app cannot finish, or an empty string."""
        if sim_app.actor.party in self.injector.vanished:
            return "its agent has vanished"
        if not self._fits(sim_app):
            room, needs = _room(self.world, sim_app), counted(sim_app.spec.requirements, sim_app.spec.gang)
            return f"its jobs need {needs} in one place, and {room} are left in the largest"
        return self._first_in_line(sim_app)

    def _fits(self, sim_app: SimApp) -> bool:
        return sim_app.spec.gang <= _room(self.world, sim_app)

    def _first_in_line(self, sim_app: SimApp) -> str:
        """Name the app behind which a strict first-in, first-out order keeps an app for ever, or return ``""``."""
        traits = POLICIES[self.injector.settings.policy].kind.traits
        if traits.strict == "no":
            return ""
        apps = self.world.arbiter.core.state.apps
        before = [
            other
            for other in self.world.apps.values()
            if other.over_at is None and other.id in apps and not self._fits(other) and sim_app.id in apps
            if _place_in_line(traits, apps[other.id]) < _place_in_line(traits, apps[sim_app.id])
            if traits.strict == "all" or apps[other.id].tenant == apps[sim_app.id].tenant
        ]
        # One that asks for a kind of GPUs keeps those from it, and no others; a parked job can go on on its own only.
        kinds = [other.spec.requirements for other in before if wishes_kind(other.spec.requirements)]
        apart = len(kinds) == len(before) and sim_app.spec.gang <= _room(self.world, sim_app, kinds)
        if not before or (apart and not self._is_parked_on(apps[sim_app.id], kinds)):
            return ""
        return f"strict order keeps it behind {before[0].id}, which does not fit"

    def _is_parked_on(self, app: App, kinds: Sequence[Requirements]) -> bool:
        """Whether a job of an app is parked on GPUs of which some others ask for the kind."""
        gpus = self.world.arbiter.core.state.gpus
        parked = {gpus[gpu].node for job in app.jobs if job.suspended for gpu in job.gpus if gpu in gpus}
        specs = [node.spec for node in self.world.nodes.values() if node.id in parked]
        return any(suits(kind, spec.gpu_type, spec.memory_bytes) for spec in specs for kind in kinds)

    def _judge_liveness(self) -> None:
        world = self.world
        for sim_app in world.apps.values():
            owner = sim_app.actor.party.id
            if sim_app.over_at is None:
                why = self._obstacle(sim_app)
                if not why:
                    story = " | ".join(chapter.what for chapter in world.arbiter.core.story(sim_app.id)[-3:])
                    took = f"{world.now - self.options.calm_at:.0f} s after the faults"
                    raise Violation(f"{sim_app.id} is not over {took}; the arbiter's last words: {story}", sim_app.id)
                self.waiting[sim_app.id] = why
                continue
            record = sim_app.actor.core.state.records[sim_app.id]
            if record.state == "failed" and not record.refused and not self.injector.harmed[owner]:
                raise Violation(f"{sim_app.id} failed and no fault harmed it: {record.reason}", sim_app.id)
            if record.state == "cancelled" and owner not in self.injector.cancelled:
                raise Violation(f"{sim_app.id} was cancelled, and its user did not cancel it", sim_app.id)
        left = unsettled(world, self.injector.vanished)
        for app, found in left.items():
            raise Violation(f"{app} is over, but {'; '.join(found)}", app, *_IDS.findall(" ".join(found)))
        self._judge_rates()

    def _judge_rates(self) -> None:
        world, bounds = self.world, self._bounds()
        seconds = world.now - self.options.calm_at
        for noun, count, allowed in (
            ("messages", world.messages - self.calm[0], bounds.messages(seconds)),
            ("rounds", self.rounds - self.calm[1], bounds.rounds(seconds)),
        ):
            if count > allowed:
                raise Violation(f"{count} {noun} in {seconds:.0f} s after the faults, and {allowed:.0f} are allowed")


def _place_in_line(traits: Traits, app: App) -> tuple[int, int]:
    """Return an app's place in a strict order: an app that made room for an interactive one comes first."""
    return (-app.preempted_in if traits.serves_interactive else 0, app.arrival)


def _room(world: World, sim_app: SimApp, others: Sequence[Requirements] = ()) -> int:
    """Return the healthy and trusted GPUs of the largest place that one job of the app may lie in.

    They are of the kind that it asks for, and of none that `others` do.
    """
    sizes: dict[tuple[str, ...], int] = {}
    for node in world.nodes.values():
        kind = node.spec.gpu_type, node.spec.memory_bytes
        if not suits(sim_app.spec.requirements, *kind) or any(suits(other, *kind) for other in others):
            continue
        for gpu in node.gpus:
            if gpu.id not in node.sick and gpu.id not in node.ledger.quarantined:
                place = _place(sim_app, gpu.node, gpu.slot)
                sizes[place] = sizes.get(place, 0) + 1
    return max(sizes.values(), default=0)


def _place(sim_app: SimApp, node: str, slot: str) -> tuple[str, ...]:
    if sim_app.spec.spans:
        return ()
    return (node, slot) if sim_app.spec.level_max == "slot" else (node,)


# --- telling --------------------------------------------------------------------------------------------------------


class _Teller:
    """Writes events as lines."""

    def __init__(self, world: World, tell: Tell) -> None:
        self._world = world
        self._tell = tell

    def __call__(self, actor: Actor, event: Any, effects: Sequence[Any]) -> None:
        done = "; ".join(_brief(effect) for effect in effects)
        line = f"{self._world.now:9.3f} {actor.party.user}: {_brief(event)}" + (f" => {done}" if done else "")
        self._tell(line)

    def tell_former(self, former: Actor, event: Any) -> None:
        """Tell what a former leader has handled, of which nothing is performed, or that it is deposed."""
        what = f"stands by: {event}" if isinstance(event, JournalError) else _brief(event)
        self._tell(f"{self._world.now:9.3f} former {former.party.user}: {what}")


def _brief(thing: Any) -> str:
    """Return an event, effect or message in few words."""
    match thing:
        case Received(sender, message):
            return f"{sender.user} said {_brief(message)}"
        case Batch(messages):
            return " & ".join(map(_brief, messages))
        case Send(to, message):
            return f"to {to.user} {_brief(message)}"
        case NodePlan():
            leases = " ".join(f"{term.gpu}:{term.lease}" for term in thing.leases)
            orders = " ".join(f"{order.task}:{order.want}" for order in thing.tasks)
            return f"plan({thing.epoch}.{thing.seq} {leases} | {orders})"
        case NodeReport():
            gpus = " ".join(gpu.gpu + ("" if gpu.empty else "*") + ("" if gpu.healthy else "!") for gpu in thing.gpus)
            tasks = " ".join(f"{task.task}:{task.phase}:{task.outcome or task.step}" for task in thing.tasks)
            return f"report(#{thing.incarnation}.{thing.seq} on {thing.epoch}.{thing.plan_seq} {gpus} | {tasks})"
        case AppReport():
            jobs = " ".join(f"{wish.job}-a{wish.attempt}@{'+'.join(wish.gpus) or '-'}" for wish in thing.jobs)
            back = f" gives back {' '.join(thing.releases)}" if thing.releases else ""
            return f"wish({thing.app} #{thing.seq} {thing.state} up to {thing.demand_max}: {jobs}{back})"
        case Holdings():
            leases = " ".join(f"{term.gpu}{'-' if term.leaving else ''}" for term in thing.leases)
            tasks = " ".join(f"{task.task}:{task.phase}:{task.outcome or task.step}" for task in thing.tasks)
            return f"holdings({thing.app} {thing.epoch}.{thing.seq} acked {thing.acked} {leases} | {tasks})"
        case _:
            text = repr(thing)
            return text if len(text) <= LINE_CHARS_MAX else text[:LINE_CHARS_MAX] + "..."


def summary(verdicts: Sequence[WorldVerdict]) -> dict[str, Any]:
    """Return figures of many worlds; `used` are the largest shares of their bounds that worlds needed."""
    passed = [verdict for verdict in verdicts if not verdict.wrong]
    shares = [(each.seconds, each.messages, each.rounds, each.bounds) for each in passed]
    return {
        "worlds": len(verdicts),
        "passed": len(passed),
        "failed": [verdict.seed for verdict in verdicts if verdict.wrong],
        "events": sum(verdict.events for verdict in verdicts),
        "restarts": sum(verdict.restarts for verdict in verdicts),
        "deposed": sum(verdict.deposed for verdict in verdicts),
        "apps": dict(sorted(sum((Counter(verdict.outcomes) for verdict in verdicts), Counter[str]()).items())),
        "waiting": sum(len(verdict.waiting) for verdict in verdicts),
        "used": {
            "seconds": max((seconds / bounds.seconds for seconds, _, _, bounds in shares), default=0.0),
            "messages": max((count / bounds.messages(seconds) for seconds, count, _, bounds in shares), default=0.0),
            "rounds": max((count / bounds.rounds(seconds) for seconds, _, count, bounds in shares), default=0.0),
        },
        "cpu_s": sum(verdict.cpu_s for verdict in verdicts),
    }


def report(verdict: WorldVerdict) -> str:
    """Return the report on a world that failed."""
    head = f"world {verdict.seed} failed after {verdict.at:.3f} s: {verdict.wrong}"
    return "\n".join([head, *verdict.lines, f"again, with everything: {verdict.command}"])


def cores() -> int:
    """Return how many processes make sense here."""
    return max(1, len(os.sched_getaffinity(0)))
