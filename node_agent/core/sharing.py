"""Who of the tasks that share GPUs has its turn, and which two run together: turns and pairs, from what tasks are.

Decides and remembers; what it wants said to workers it returns. See `slicing` for turns and `packing` for pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from node_agent.core.events import NodeFacts
from node_agent.core.model import Exited, Running, Stopping, Suspended, Task, Vacating, Waiting
from node_agent.core.packing import Able, Packs
from node_agent.core.proof import Gpus
from node_agent.core.slicing import Sitter, Slices
from node_agent.core.suspend_methods import VACATE_METHODS, SuspendMethods
from protocol.messages import GpuId, Measured, NodePlan, TaskId

Tasks = Mapping[TaskId, Task]

#: Mini-batches of an attempt from which on its rate is measured: the first hold its start, compilation included.
WARM_UP_STEPS = 3


class Word(Struct, frozen=True):
    """Something for a task's story, and an order to its worker if `do` names one."""

    task: TaskId
    text: str = ""
    do: Literal["", "tell", "cap"] = ""
    bytes: int = 0


class Sharing:
    """The sharing of one node's GPUs; nothing happens here while plans say that jobs have GPUs to themselves."""

    def __init__(self, facts: NodeFacts, gpus: Gpus, methods: SuspendMethods) -> None:
        self._facts, self._gpus, self._methods = facts, gpus, methods
        self.active = False
        self._packing = False
        self._quantum_s = 60.0
        self._slices = Slices(overhead_max=facts.slice_overhead_max)
        self.packs = Packs(steps=facts.pack_steps, gain_min=facts.pack_gain_min, context_bytes=facts.parked_bytes_max)
        self._on: frozenset[TaskId] = frozenset()
        self._measurable: frozenset[TaskId] = frozenset()  #: those whose rate can be measured now

    def configure(self, plan: NodePlan) -> None:
        """Share as the newest plan says."""
        self.active = plan.sharing != "exclusive"
        self._packing = plan.sharing == "pack"
        if not self._packing:
            self.packs.stop()
        self._quantum_s = plan.quantum_s
        self._gpus.seat(min(plan.seats, self._facts.seats_max) if self.active else 1)

    def deadlines(self) -> tuple[float | None, ...]:
        """Return when turns end and figures are due."""
        figures = self.packs.deadline(self._measurable) if self._packing else None
        return (self._slices.deadline, figures) if self.active else ()

    # --- what follows from it ---------------------------------------------------------------------------------------

    def has_turn(self, task: Task) -> bool:
        """Whether `task` may be on its GPUs now; who keeps their memory though parked lets nobody else on them."""
        keeps = isinstance(task.state, Suspended) and task.state.kept
        return not self.active or bool(keeps) or task.id in self._on

    def returns(self, task: Task, tasks: Tasks) -> bool:
        """Whether a parked task is to save and leave, for which it needs its GPUs once more."""
        if not (self.active and isinstance(task.state, Suspended) and task.want == "vacate") or task.given_up:
            return False
        return not task.state.by_driver and self._methods.usable(task, VACATE_METHODS[task.preempt_by], tasks.values())[
            :1
        ] == ["leave"]

    def returning(self, tasks: Tasks) -> list[TaskId]:
        """Return the parked tasks that will use their GPUs once more, to save and leave."""
        return [task.id for task in tasks.values() if self.returns(task, tasks)] if self.active else []

    def obstacle(self, task: Task, tasks: Tasks) -> str:
        """Say why a task that has its leases may not use its GPUs now, or return an empty string."""
        if not self.has_turn(task):
            return self._why_rest(task, tasks)
        return self._gpus.obstacle_to(task, tasks, beside=self.packs.partner(task.id))

    def _why_rest(self, task: Task, tasks: Tasks) -> str:
        others = [each for each in tasks.values() if each.id in self._on and each.devices & task.devices]
        for each in others:
            if each.occupies and not self._methods.can_rest(each, tasks.values()):
                return f"{each.id} has its GPU and cannot be suspended: {self._methods.why_fixed(each)}"
        return f"waits for its turn; now it is that of {', '.join(sorted(each.id for each in others)) or 'nobody'}"

    def measured(self, task: Task, measured: Measured, tasks: Tasks) -> Measured:
        """Return what was measured of a task, with what sharing has to do with it."""
        partner = self.packs.partner(task.id)
        kept = isinstance(task.state, Running) and not self._methods.can_rest(task, tasks.values())
        found = self.packs.remark(task.id) or (f"cannot be suspended: {self._methods.why_fixed(task)}" if kept else "")
        return replace(
            measured,
            share=self._slices.share(task.id),
            packed_with=() if partner is None else (partner,),
            remark="; ".join(filter(None, (measured.remark, found))),
        )

    # --- news -------------------------------------------------------------------------------------------------------

    def found(self, tasks: Tasks) -> None:
        """Take in that tasks were found alive: those on one device, an earlier incarnation let run together."""
        using = [task for task in tasks.values() if task.occupies]
        for one, other in combinations(using, 2):
            if one.devices & other.devices:
                self.packs.meet(one.id, other.id)

    def progressed(self, task: Task, step: int, now: float) -> None:
        """Take in how far a task is that has its turn, once it has loaded what it needs and warmed up."""
        warm = step >= task.facts.start_step + WARM_UP_STEPS
        if self.active and warm and isinstance(task.state, Running):
            self.packs.progressed(task.id, step, now)

    def runs(self, task: TaskId, tasks: Tasks, now: float) -> None:
        """Note that a task trains from now on: its rate is counted from here, and that of who runs beside it."""
        self.packs.resume(task)
        partner = self.packs.partner(task)
        if partner is not None and partner in tasks and isinstance(tasks[partner].state, Running):
            self.packs.rebase(task, now)

    # --- turns ------------------------------------------------------------------------------------------------------

    def take_turns(self, tasks: Tasks, now: float) -> list[Word]:
        """Decide whose turn it is and which tasks run together; return what is to be said."""
        if not self.active:
            return []
        wanting = {task.id: task for task in tasks.values() if _wants(task) or self.returns(task, tasks)}
        self.packs.forget([task.id for task in wanting.values() if task.want == "run"])
        words = self._judge(now) if self._packing else []
        self._on = self._slices.update(now, self._sitters(wanting, tasks), self._quantum_s)
        if self._packing:
            words += self._measure(wanting, now)
            begun = self._try(wanting, tasks, now)
            if begun:
                words += begun
                self._on = self._slices.update(now, self._sitters(wanting, tasks), self._quantum_s)
        return words

    def _sitters(self, wanting: Tasks, tasks: Tasks) -> list[Sitter]:
        """Return who wants a turn; two tasks that run together are one."""
        units = {tuple(sorted({task, self.packs.partner(task) or task})) for task in wanting}
        return [self._sitter([wanting[each] for each in unit], tasks) for unit in sorted(units)]

    def _sitter(self, unit: Sequence[Task], tasks: Tasks) -> Sitter:
        return Sitter(
            tasks=tuple(task.id for task in unit),
            devices=frozenset[GpuId]().union(*(task.devices for task in unit)),
            priority=max(task.priority for task in unit),
            fixed=any(task.occupies and not self._methods.can_rest(task, tasks.values()) for task in unit),
            leaving=any(task.want == "vacate" for task in unit),
            fresh=all(isinstance(task.state, Waiting) for task in unit),
            active=any(task.occupies for task in unit),
            cost_s=max(task.facts.suspend_s + task.facts.resume_s for task in unit),
        )

    # --- pairs ------------------------------------------------------------------------------------------------------

    def _judge(self, now: float) -> list[Word]:
        """Keep together who gains by it; let the others take turns again."""
        words = []
        for trial, stays in self.packs.judge(now):
            one, other = trial.tasks
            for task, partner in ((one, other), (other, one)):
                verdict = "stays with" if stays else "is parted from"
                text = f"{verdict} {partner} on its GPU: together {trial.gain:.2f} times the progress of turns"
                words.append(Word(task, text, "" if stays else "cap"))
        return words

    def _measure(self, wanting: Tasks, now: float) -> list[Word]:
        """Ask for the figures that are missing."""
        running = (task for task in wanting.values() if isinstance(task.state, Running) and task.id in self._on)
        self._measurable = frozenset(task.id for task in running if _packable(task))
        return [
            Word(task, do="tell")
            for task in sorted(self._measurable)
            if self.packs.ask(task, wanting[task].facts.step_s, now)
        ]

    def _try(self, wanting: Tasks, tasks: Tasks, now: float) -> list[Word]:
        """Let two tasks run together that may gain by it, beside all others that are parked on their GPU."""
        words = []
        for device, able in sorted(self._able(wanting).items()):
            here = sum(device in task.devices and not isinstance(task.state, Exited) for task in tasks.values())
            memory_bytes = self._gpus.memory_bytes(device) - self.packs.contexts_bytes(here - 2)
            trial = self.packs.candidate(able, memory_bytes, now)
            if trial is not None:
                one, other = (each for each in able if each.task in trial.tasks)
                self.packs.begin(trial)
                for each, partner in ((one, other), (other, one)):
                    cap_bytes = self.packs.cap_bytes(each, partner, memory_bytes)
                    words.append(Word(each.task, f"tried together with {partner.task} on one GPU", "cap", cap_bytes))
        return words

    def _able(self, wanting: Tasks) -> dict[GpuId, list[Able]]:
        """Return, by device, the tasks that could run together there."""
        found: dict[GpuId, list[Able]] = {}
        for task in sorted(wanting.values(), key=lambda each: each.id):
            ready = isinstance(task.state, Running | Suspended) and task.want == "run" and task.facts.connected
            if ready and _packable(task) and self.packs.partner(task.id) is None:
                (device,) = task.devices
                used = 1.0 if task.facts.utilisation is None else task.facts.utilisation
                running = isinstance(task.state, Running) and task.id in self._on
                peak = task.facts.peak_bytes
                found.setdefault(device, []).append(Able(task.id, task.job, device, task.priority, peak, used, running))
        return {device: able for device, able in found.items() if len(able) > 1}


def _wants(task: Task) -> bool:
    return task.want == "run" and not isinstance(task.state, Exited | Stopping | Vacating)


def _packable(task: Task) -> bool:
    return task.ranks.world == 1 and len(task.devices) == 1
