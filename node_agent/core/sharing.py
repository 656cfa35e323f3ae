"""Which tasks that share GPUs have their turn now, and which two run together.

This module decides and remembers; it returns its instructions to workers. `slicing` has the turns, `packing` the pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from node_agent.core.events import NodeFacts
from node_agent.core.model import Exited, Loading, Running, Starting, Stopping, Suspended, Task, Vacating, Waiting
from node_agent.core.packing import Candidate, Packs, Pairing
from node_agent.core.proof import Gpus
from node_agent.core.slicing import Contender, Slices
from node_agent.core.suspend_methods import VACATE_METHODS, SuspendMethods
from protocol.messages import GpuId, Measured, NodePlan, TaskId

Tasks = Mapping[TaskId, Task]

#: Mini-batches of an attempt from which on its rate is measured: the first hold its start, compilation included.
WARM_UP_STEPS = 3


class Instruction(Struct, frozen=True):
    """A line for a task's story, and an order to its worker if `do` names one."""

    task: TaskId
    text: str = ""
    do: Literal["", "tell", "cap"] = ""
    bytes: int = 0


class Sharing:
    """The sharing of one node's GPUs; inactive while plans give each job its GPUs to itself."""

    def __init__(self, facts: NodeFacts, gpus: Gpus, methods: SuspendMethods) -> None:
        self._facts, self._gpus, self._methods = facts, gpus, methods
        self.active = False
        self._packing = False
        self._quantum_s = 60.0
        self._slices = Slices(overhead_max=facts.slice_overhead_max)
        self.packs = Packs(steps=facts.pack_steps, gain_min=facts.pack_gain_min, context_bytes=facts.parked_bytes_max)
        self._on: frozenset[TaskId] = frozenset()
        self._measurable: frozenset[TaskId] = frozenset()  #: those whose rate can be measured now
        self._kept_out_until: dict[TaskId, float] = {}  #: parked tasks that cannot leave, and until when they try
        self._kept_out: frozenset[TaskId] = frozenset()  #: parked tasks that have given up to save and leave

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

    # --- answers ---------------------------------------------------------------------------------------------------

    def has_turn(self, task: Task) -> bool:
        """Whether `task` may be on its GPUs now; a parked one that keeps their memory keeps its turn: no other fits."""
        keeps = isinstance(task.state, Suspended) and task.state.kept
        return not self.active or bool(keeps) or task.id in self._on

    def returns(self, task: Task, tasks: Tasks) -> bool:
        """Whether a parked task is to save and leave, for which it needs its GPUs once more.

        One that has kept memory when it was parked does so if it can, whatever else it could be asked for. One of
        several processes that could not be resumed stays parked. One that is kept out of its GPUs for its grace period,
        by what turns do not change, gives that up.
        """
        return task.id not in self._kept_out and self._is_to_return(task, tasks)

    def _is_to_return(self, task: Task, tasks: Tasks) -> bool:
        state = task.state
        if not isinstance(state, Suspended) or task.want != "vacate" or task.given_up:
            return False
        if not (self.active or state.kept):
            return False
        if task.ranks.world > 1 and "resume" in task.facts.refused:  # it would have to train first
            return False
        methods = self._methods.usable(task, VACATE_METHODS[task.preempt_by], tasks.values())
        return not state.by_driver and "leave" in (methods if state.kept else methods[:1])

    def _note_kept_out(self, tasks: Tasks, now: float) -> None:
        """Note which parked tasks cannot save and leave, and which of them give that up."""
        leaving = [task for task in tasks.values() if self._is_to_return(task, tasks)]
        until = {
            task.id: self._kept_out_until.get(task.id, now + task.grace_s)
            for task in leaving
            if task.id not in self._kept_out and self._is_kept_out(task, tasks)
        }
        late = {task for task, end in until.items() if now >= end}
        self._kept_out = (self._kept_out & {task.id for task in leaving}) | late
        self._kept_out_until = {task: end for task, end in until.items() if task not in late}

    def _is_kept_out(self, task: Task, tasks: Tasks) -> bool:
        """Whether a neighbour cannot be suspended now, or a GPU of `task` has a fault or a foreign process."""
        return not all(self._gpus.can_be_used(device, tasks) for device in task.devices) or any(
            isinstance(each.state, Running | Stopping | Exited)
            and each.occupies
            and each.devices & task.devices
            and not self._methods.can_rest(each, tasks.values())
            for each in tasks.values()
        )

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
        return f"waits for its turn; now it is that of {', '.join(sorted(each.id for each in others)) or 'no task'}"

    def measured(self, task: Task, measured: Measured, tasks: Tasks) -> Measured:
        """Return the measured figures of a task, with its share of the turns and its partner added."""
        partner = self.packs.partner(task.id)
        kept = isinstance(task.state, Running) and not self._methods.can_rest(task, tasks.values())
        kept = kept and not task.ranks.apart
        found = self.packs.remark(task.id) or (f"cannot be suspended: {self._methods.why_fixed(task)}" if kept else "")
        return replace(
            measured,
            share=self._slices.share(task.id),
            packed_with=() if partner is None else (partner,),
            remark="; ".join(filter(None, (measured.remark, found))),
        )

    # --- news -------------------------------------------------------------------------------------------------------

    def found(self, tasks: Tasks) -> None:
        """Take in that tasks were found alive: an earlier incarnation let those on one device run together."""
        using = [task for task in tasks.values() if task.occupies]
        for one, other in combinations(using, 2):
            if one.devices & other.devices:
                self.packs.meet(one.id, other.id)

    def progressed(self, task: Task, step: int, now: float) -> None:
        """Take in the progress of a task that has its turn, once it has warmed up."""
        warm = step >= task.facts.start_step + WARM_UP_STEPS
        if self.active and warm and isinstance(task.state, Running):
            self.packs.progressed(task.id, task.job, step, now)

    def runs(self, task: TaskId, tasks: Tasks, now: float) -> None:
        """Note that a task trains from now on: its rate is counted from here, and that of its partner."""
        self.packs.resume(task)
        partner = self.packs.partner(task)
        if partner is not None and partner in tasks and isinstance(tasks[partner].state, Running):
            self.packs.rebase(task, now)

    # --- turns ------------------------------------------------------------------------------------------------------

    def take_turns(self, tasks: Tasks, now: float) -> list[Instruction]:
        """Decide which tasks have their turn and which run together; return the instructions that follow."""
        if not self.active:
            self._kept_out_until, self._kept_out = {}, frozenset()
            return []
        self._note_kept_out(tasks, now)
        wanting = {task.id: task for task in tasks.values() if _wants(task) or self.returns(task, tasks)}
        self.packs.forget([task.id for task in wanting.values() if task.want == "run"])
        instructions = [*self._judge_pairings(now), *self._part_uneven(wanting)] if self._packing else []
        self._on = self._slices.update(now, self._contenders(wanting, tasks), self._quantum_s)
        if self._packing:
            instructions += self._ask_figures(wanting, now)
            begun = self._begin_pairings(wanting, tasks, now)
            if begun:
                instructions += begun
                self._on = self._slices.update(now, self._contenders(wanting, tasks), self._quantum_s)
        return instructions

    def _contenders(self, wanting: Tasks, tasks: Tasks) -> list[Contender]:
        """Return the contenders for a turn; two tasks that run together are one."""
        units = {tuple(sorted({task, self.packs.partner(task) or task})) for task in wanting}
        return [self._contender([wanting[each] for each in unit], tasks) for unit in sorted(units)]

    def _contender(self, unit: Sequence[Task], tasks: Tasks) -> Contender:
        return Contender(
            tasks=tuple(task.id for task in unit),
            devices=frozenset[GpuId]().union(*(task.devices for task in unit)),
            priority=max(task.priority for task in unit),
            fixed=any(task.occupies and not self._methods.can_rest(task, tasks.values()) for task in unit),
            leaving=any(task.want == "vacate" for task in unit),
            fresh=all(isinstance(task.state, Waiting) for task in unit),
            active=any(task.occupies for task in unit),
            starting=any(isinstance(task.state, Starting | Loading) for task in unit),
            keeping=any(isinstance(task.state, Suspended) and bool(task.state.kept) for task in unit),
            cost_s=max(task.facts.suspend_s + task.facts.resume_s for task in unit),
        )

    # --- pairs ------------------------------------------------------------------------------------------------------

    def _judge_pairings(self, now: float) -> list[Instruction]:
        """Keep the pairs together that gain by it; let the others take turns again."""
        instructions = []
        for pairing, stays in self.packs.judge(now):
            one, other = pairing.tasks
            for task, partner in ((one, other), (other, one)):
                verdict = "stays with" if stays else "is parted from"
                why = f"together {pairing.gain:.2f} times the progress of turns"
                if pairing.drifted:
                    why = "their speed has changed since it was measured, and is measured again"
                text = f"{verdict} {partner} on its GPUs: {why}"
                instructions.append(Instruction(task, text, "" if stays else "cap"))
        return instructions

    def _ask_figures(self, wanting: Tasks, now: float) -> list[Instruction]:
        """Ask running tasks for the figures that are missing."""
        running = (task for task in wanting.values() if isinstance(task.state, Running) and task.id in self._on)
        self._measurable = frozenset(task.id for task in running if _packable(task))
        return [
            Instruction(task, do="tell")
            for task in sorted(self._measurable)
            if self.packs.ask(task, wanting[task].facts.step_s, now)
        ]

    def _begin_pairings(self, wanting: Tasks, tasks: Tasks, now: float) -> list[Instruction]:
        """Let two tasks run together that may gain by it, beside all others that are parked on their GPUs."""
        instructions = []
        ready = self._candidates(wanting)
        for devices, candidates in sorted(ready.items()):
            memory_bytes = min(self._for_two_bytes(device, tasks) for device in devices)
            pairing = self.packs.pair_to_try(candidates, memory_bytes, now)
            if pairing is not None:
                instructions += self._begin(pairing, candidates, memory_bytes)
        for gang, single, device in self._uneven(ready, wanting):
            memory_bytes = self._for_two_bytes(device, tasks)
            pairing = self.packs.pair_to_try((gang, single), memory_bytes, now, uneven=True)
            if pairing is not None:
                instructions += self._begin(pairing, (gang, single), memory_bytes)
        return instructions

    def _begin(self, pairing: Pairing, candidates: Sequence[Candidate], memory_bytes: int) -> list[Instruction]:
        one, other = (each for each in candidates if each.task in pairing.tasks)
        self.packs.begin(pairing)
        return [
            Instruction(
                each.task,
                f"tried together with {partner.task} on the same GPUs",
                "cap",
                self.packs.cap_bytes(each, partner, memory_bytes),
            )
            for each, partner in ((one, other), (other, one))
        ]

    def _uneven(
        self, ready: Mapping[tuple[GpuId, ...], list[Candidate]], wanting: Tasks
    ) -> list[tuple[Candidate, Candidate, GpuId]]:
        """Return the gangs that could run with a task of one of their GPUs, that task, and the GPU."""
        gangs = [(devices, gang) for devices, some in sorted(ready.items()) if len(devices) > 1 for gang in some]
        return [
            (gang, single, device)
            for devices, gang in gangs
            for device in devices
            for single in ready.get((device,), ())
            if not _others_elsewhere(wanting, wanting[gang.task], device)
        ]

    def _part_uneven(self, wanting: Tasks) -> list[Instruction]:
        """Part a gang and a task of one of its GPUs, now that another could use the others in the task's turns."""
        instructions = []
        for pair in self.packs.uneven():
            if not set(pair) <= wanting.keys():
                continue
            gang, single = sorted((wanting[task] for task in pair), key=lambda task: -len(task.devices))
            (device,) = single.devices
            if _others_elsewhere(wanting, gang, device):
                self.packs.part_for_now(gang.id)
                text = "takes turns again, as another task came to the gang's other GPUs"
                instructions += [Instruction(task, text, "cap") for task in pair]
        return instructions

    def _for_two_bytes(self, device: GpuId, tasks: Tasks) -> int:
        """Return the memory of a device that all its tasks but two leave while they are parked, and a server of MPS."""
        here = sum(device in task.devices and not isinstance(task.state, Exited) for task in tasks.values())
        others = here - 2 + self._gpus.has_server(device)
        return self._gpus.memory_bytes(device) - self.packs.contexts_bytes(others)

    def _candidates(self, wanting: Tasks) -> dict[tuple[GpuId, ...], list[Candidate]]:
        """Return, by their devices, the tasks that could run together there."""
        found: dict[tuple[GpuId, ...], list[Candidate]] = {}
        for task in sorted(wanting.values(), key=lambda each: each.id):
            ready = isinstance(task.state, Running | Suspended) and task.want == "run" and task.facts.connected
            if ready and _packable(task) and self.packs.partner(task.id) is None:
                told = (task.facts.load, task.facts.utilisation, 1.0)
                used = next(share for share in told if share is not None)
                running = isinstance(task.state, Running) and task.id in self._on
                candidate = Candidate(task.id, task.job, task.priority, task.gpu_peak_bytes, used, running)
                found.setdefault(tuple(sorted(task.devices)), []).append(candidate)
        return found


def _wants(task: Task) -> bool:
    return task.want == "run" and not isinstance(task.state, Exited | Stopping | Vacating)


def _others_elsewhere(wanting: Tasks, gang: Task, device: GpuId) -> bool:
    """Whether a task wants GPUs of a gang, and not that `device`."""
    return any(
        each.id != gang.id and each.devices & gang.devices and device not in each.devices for each in wanting.values()
    )


def _packable(task: Task) -> bool:
    """Whether a task has one process for each of its GPUs, or one for all of them, and no part on another node."""
    return task.ranks.world in (1, len(task.devices)) and not task.ranks.apart
