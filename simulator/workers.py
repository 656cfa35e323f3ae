"""Imaginary workers: the process of one task on one node, which obeys orders and talks as real ones do.

A worker takes memory on its GPUs as real ones were measured to: its peak and its CUDA context while it runs, the
context and what it does not give back while it is parked, nothing while the driver has it checkpointed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Literal, Protocol

from msgspec import Struct
from msgspec.structs import replace

from node_agent.core.events import AdoptedWorker, LocalEvent, StartWorker, WorkerGone, WorkerNote, WorkerSaid
from protocol.messages import GpuId, NodeId, device_of
from protocol.worker import (
    EXIT_REQUEUE,
    PROTO,
    Finished,
    FromWorker,
    Hello,
    Late,
    Order,
    Progress,
    Ready,
    Refused,
    Resumed,
    Saved,
    Stacks,
    Suspended,
)
from simulator.costs import Costs
from simulator.jobs import CONTEXT_BYTES, JobAccount
from simulator.training import STEP_SLACK, At, Phase, SharedStorage, Training


class NodeTraits(Struct, frozen=True):
    """The traits of a node besides its GPUs.

    `host_bytes` is the memory for parked workers (0: without limit), `driver` whether the driver can checkpoint
    processes; by the odds `driver_refuses` it cannot this time, by `driver_loses` the process is lost for good.
    """

    host_bytes: int = 0
    driver: bool = False
    driver_refuses: float = 0.0
    driver_loses: float = 0.0
    move_refuses: float = 0.0  #: the odds for a resumption that is a move
    mps: bool = False  #: its GPUs have MPS
    slow: float = 1.0  #: every act takes so many times as long


PLAIN = NodeTraits()


class OwnNode(Protocol):
    """The node that a worker is on, as the worker sees it.

    `now` is the world's time, `at` runs a function after a time, `later` after a time that grows with the node's
    slowness. `post` takes an event for the node agent, `taken` says whether the arbiter has taken one of these seats
    from its app.
    """

    id: NodeId
    costs: Costs
    traits: NodeTraits
    storage: SharedStorage
    incarnation: int
    talks: bool
    dice: Random
    now: Callable[[], float]
    at: At
    post: Callable[[LocalEvent], None]
    taken: Callable[[Sequence[GpuId]], bool]

    @property
    def by_device(self) -> Mapping[GpuId, list[Worker]]:
        """The workers on each device, parked or not."""
        ...

    def call_later(self, seconds: float, then: Callable[[], None]) -> None:
        """Run `then` so many seconds from now, at this node's speed."""
        ...


class Worker:
    """The process of one task on one node."""

    def __init__(self, start: StartWorker, training: Training, node: OwnNode, pid: int) -> None:
        self.task = start.task
        self.spec = start
        self.gpus = start.gpus  #: seats
        self.devices = tuple(dict.fromkeys(map(device_of, start.gpus)))
        self.training = training
        self.phase: Phase = "starting"
        self.note = WorkerNote()
        self.began_at = node.now()
        self.ended_at: float | None = None
        self.since = self.began_at  #: when its process began, or was last parked no more
        self.by_driver = False  #: suspended by the driver, or about to be
        self.lost = False  #: by the driver: it can never run again
        self.mps = False  #: it is a client of MPS
        self.mps_fault = ""  #: the evidence of a fault that has ended CUDA in it
        self.arena_bytes = 0
        self.leaving = False
        self.parking = Order("suspend", 0, 0)  #: the newest order to park
        self.pending: Order | None = None  #: an order for a mini-batch to come
        self.hangs = False
        self.gone: WorkerGone | None = None  #: how it ended, for a node agent that was not there
        self.pid = pid
        self.node = node

    @property
    def memory_bytes(self) -> int:
        """The memory that it takes of each of its GPUs."""
        if self.phase == "gone" or (self.phase == "parked" and self.by_driver):
            return 0
        facts = self.training.facts
        return CONTEXT_BYTES + (facts.keeps_bytes if self.phase == "parked" else facts.peak_bytes)

    @property
    def shown_bytes(self) -> int:
        """The part of that with which the driver shows its process."""
        hidden = self.phase == "parked" and self.memory_bytes and self.training.facts.hidden
        return CONTEXT_BYTES if hidden else self.memory_bytes

    @property
    def account(self) -> JobAccount:
        """The account of its job."""
        return self.node.storage.account(self.training.job)

    def sharing(self, device: GpuId) -> Sequence[Worker]:
        """Return all workers on that device of its node."""
        return self.node.by_device[device]

    def adopted(self) -> AdoptedWorker:
        """Return its description for a new node agent."""
        spec, note = self.spec, self.note
        lived_s = (self.node.now() if self.ended_at is None else self.ended_at) - self.began_at
        if note.by_driver or self.by_driver:
            parked = self.phase == "parked"
            note = replace(note, suspended=parked, by_driver=parked and self.by_driver)
        return AdoptedWorker(spec.task, spec.app, spec.job, spec.attempt, spec.gpus, note, lived_s, self.mps)

    # --- its words ----------------------------------------------------------------------------------------------------

    def greet(self) -> None:
        """Say hello once it has started, and train."""
        if self.phase != "starting":
            return
        if self.mps_fault:
            self.lose(WorkerGone(self.task, exit_code=1, tail="imaginary CUDA error"))
            return
        self.phase = "running"
        self.say_hello()
        self.training.go_on()
        self._show_memory()

    def _show_memory(self) -> None:
        """Report its memory after its first mini-batch, as real ones do."""
        training = self.training
        if self.node.talks and self._steps() - 1 <= training.start_step:
            wait_s = training.facts.step_s / training.speed * (1.0 + STEP_SLACK)
            self.node.at(wait_s, self._speak)

    def _speak(self) -> None:
        if self.phase == "running":
            self.say_progress(self._steps(), {})

    def say_hello(self) -> None:
        """Say hello: its task, its pid and its progress."""
        training = self.training
        standing: Literal["running", "held"] = "held" if self.task in training.holds else "running"
        state: Literal["running", "held", "suspended"] = "suspended" if self.phase == "parked" else standing
        step = self._steps() - 1
        begun = step > training.start_step  # before its first mini-batch a process does not know how much it has
        self.say(
            Hello(
                proto=PROTO,
                task=self.task,
                pid=self.pid,
                state=state,
                step=step,
                start_step=training.start_step,
                total_steps=training.facts.steps,
                can_park=training.facts.can_park,
                can_checkpoint=training.facts.can_checkpoint,
                state_bytes=training.facts.state_bytes if begun else 0,
                metrics=training.facts.reported(training.start_step + 2, step + 1),
            ),
        )

    def say_progress(self, step: int, metrics: dict[str, float], seq: int = 0) -> None:
        """Say how many mini-batches are done, unasked or in answer to the order `seq`."""
        training = self.training
        facts = training.facts
        self.say(
            Progress(
                step=step - 1,
                step_s=facts.step_s / (training.rate or training.speed),
                start_step=training.start_step,
                total_steps=facts.steps,
                can_park=facts.can_park,
                can_checkpoint=facts.can_checkpoint,
                saved_step=-1,
                metrics=metrics,
                state_bytes=facts.state_bytes,
                arena_bytes=self.arena_bytes,
                peak_bytes=facts.peak_bytes,
                trough_bytes=facts.state_bytes,
                seq=seq,
            )
        )

    def say(self, line: FromWorker) -> None:
        """Say a line to the node agent, unless the process hangs."""
        if not self.hangs:
            self.node.post(WorkerSaid(self.task, line))

    def _steps(self) -> int:
        return self.training.steps(self.node.now())

    # --- orders -------------------------------------------------------------------------------------------------------

    def obey(self, order: Order) -> None:
        """Carry out an order, if the process can hear it."""
        if self.hangs or self.by_driver or self.phase in ("starting", "gone"):
            return
        if order.do in ("hold", "leave", "suspend", "resume"):
            self.pending = None
        if order.at_step >= 0 and (self._is_late(order) or not self._is_there(order)):
            self._await_step(order)
            return
        match order.do:
            case "hold":
                self._await_step(order)
            case "leave" | "save":
                self.save(order, leaving=order.do == "leave")
            case "suspend":
                self._park(order)
            case "resume":
                self._resume(order)
            case "probe":
                self.say(Stacks(order.seq, "imaginary"))
            case "arena" | "cap" | "tell":
                self._answer(order)
            case "trough":
                self._come_to_trough(order)

    def _is_there(self, order: Order) -> bool:
        """Whether it stands after the very mini-batch that an order names; without boundaries it does anywhere."""
        if not self.node.costs.boundaries:
            return True
        return self._steps() - 1 == order.at_step and (self.training.since is None or self.phase == "parked")

    def _is_late(self, order: Order) -> bool:
        return self._steps() - 1 >= order.at_step and not self._is_there(order)

    def _await_step(self, order: Order) -> None:
        """Say whether an order comes in time for the mini-batch that it names, and stand after that."""
        step, holds = self._steps() - 1, order.do == "hold"
        if self.phase != "running":
            self.say(Refused(order.seq, "suspended; resume it first"))
        elif self._is_late(order):
            self.say(Late(order.seq, step) if holds else Refused(order.seq, f"step {order.at_step} is over"))
        else:
            self.pending = None if holds else order
            if not self.node.costs.boundaries:
                self.training.stand()
            self.training.hold(self.task, order.at_step if self.node.costs.boundaries else step)
            if holds:
                self.say(Ready(order.seq, step))

    def reach_hold(self) -> None:
        """Stand after the mini-batch at which it was told to; obey what was ordered for it."""
        if self.pending is not None and self._is_there(self.pending):
            order, self.pending = self.pending, None
            self.obey(order)

    def _answer(self, order: Order) -> None:
        """Obey at once: have host memory ready, keep within a part of the GPU, say how far it is."""
        facts = self.training.facts
        if order.do == "arena":
            self.arena_bytes = order.bytes
        if order.do == "cap" and 0 < order.bytes < facts.peak_bytes:
            self.lose(WorkerGone(self.task, exit_code=1, tail="imaginary CUDA out of memory"))
            return
        steps = self._steps()
        self.say_progress(steps, facts.metrics_at(steps), order.seq)

    def _come_to_trough(self, order: Order) -> None:
        """Answer at the end of the mini-batch, where the driver is to suspend it."""
        training, node = self.training, self.node

        def answer() -> None:
            if self.phase == "running":
                self.say_progress(self._steps(), {}, order.seq)

        node.call_later(training.boundary_s(node.now()) if node.costs.boundaries else 0.0, answer)

    def save(self, order: Order, *, leaving: bool) -> None:
        """Save a checkpoint at the end of the mini-batch; then leave, if told so."""
        training, node = self.training, self.node
        if self.mps_fault:
            return  # its next kernel ends it
        if not training.facts.can_checkpoint:
            self.say(Refused(order.seq, "the script gave no save function"))
            return
        if self.phase not in ("running", "parked") or self.leaving:
            return
        self.leaving = leaving
        training.taken = training.taken or (leaving and node.taken(self.gpus))
        wait_s = training.boundary_s(node.now()) if node.costs.boundaries and not training.halted else 0.0

        def stand() -> None:
            if self.phase not in ("running", "parked"):
                return
            if leaving:
                self.phase = "saving"
                training.halt()
            own_s = training.facts.leave_s if leaving else None
            node.call_later(node.costs.checkpoint_s if own_s is None else own_s, saved)

        def saved() -> None:
            if self.phase == "gone":
                return
            node.storage.save(training, training.progress_s(node.now()))
            self.say(Saved(order.seq, self._steps() - 1, "imaginary", node.costs.checkpoint_s, leaving))
            if leaving:
                self.lose(WorkerGone(self.task, exit_code=EXIT_REQUEUE))

        node.call_later(wait_s, stand)

    def _park(self, order: Order) -> None:
        training, node = self.training, self.node

        def answer() -> None:
            step = self._steps() - 1
            self.say(Suspended(self.parking.seq, step, training.facts.state_bytes, 0, node.costs.suspend_s))

        def parked() -> None:
            if self.phase == "parking":
                self.rest()
                answer()

        if training.facts.balks or not training.facts.can_park:
            self.say(Refused(order.seq, "a CUDA graph is alive, and parking moves the memory that it reads"))
            return
        self.parking = order  # a younger order is answered in the place of an older one
        if self.phase == "parked":
            answer()
        if self.phase != "running":
            return
        self.phase = "parking"
        wait_s = training.boundary_s(node.now()) if node.costs.boundaries else 0.0
        training.stand()
        node.call_later(wait_s + node.costs.suspend_s, parked)

    def _resume(self, order: Order) -> None:
        self.training.holds.pop(self.task, None)
        if self.phase == "running":
            self.say(Resumed(order.seq, self._steps() - 1, 0.0))
            self.training.hold(self.task, None)
        if self.phase != "parked":
            return
        self.phase = "resuming"
        self.since = self.node.now()

        def resumed() -> None:
            if self.phase != "resuming":
                return
            if self.mps_fault:
                self.lose(WorkerGone(self.task, exit_code=1, tail="imaginary CUDA error"))
                return
            self.phase = "running"
            self.say(Resumed(order.seq, self._steps() - 1, self.node.costs.resume_s))
            self.training.go_on()
            self._show_memory()

        self.node.call_later(self.node.costs.resume_s, resumed)

    def rest(self) -> None:
        """Become parked."""
        self.phase = "parked"
        self.account.suspensions += 1
        self.account.held_gpu_s += (self.node.now() - self.since) * len(self.gpus)

    def move(self, moves: Mapping[GpuId, GpuId]) -> None:
        """Be on other devices from now on, where `moves` says so."""
        for device in self.devices:
            self.node.by_device[device].remove(self)
        self.devices = tuple([moves.get(device, device) for device in self.devices])
        for device in self.devices:
            self.node.by_device[device].append(self)

    # --- ends ---------------------------------------------------------------------------------------------------------

    def signal(self, how: Literal["terminate", "kill"]) -> None:
        """Get a signal; a worker that hangs, or that the driver has suspended, hears only SIGKILL."""
        if how == "terminate" and (self.hangs or self.by_driver):
            return
        self.lose(WorkerGone(self.task, signal=9 if how == "kill" else 15))

    def finish(self, metrics: dict[str, float]) -> None:
        """Say that the work is done, and end."""
        self.say(Finished(self.training.facts.steps - 1, metrics))
        self.lose(WorkerGone(self.task, exit_code=0))
        self.gone = WorkerGone(self.task, exit_code=0, finished=metrics)  # a later node agent finds that written

    def lose(self, how: WorkerGone) -> None:
        """End, and have the node agent hear it."""
        if self.phase != "gone":
            if how.exit_code != 0:
                how = replace(how, mps_fault=self.mps_fault)
            self.end(how)
            self.node.post(how)

    def hang(self, *, standing: bool) -> None:
        """Say and hear nothing any more, SIGKILL aside; and stand still, or go on with the training."""
        if self.phase != "gone":
            self.hangs = True
            if standing:
                self.training.halt()

    def end(self, how: WorkerGone) -> None:
        """End without a word; the work of its attempt since the last checkpoint is lost."""
        if self.phase == "gone":
            return
        now = self.node.now()
        self.training.halt()
        if self.phase != "parked":
            self.account.held_gpu_s += (now - self.since) * len(self.gpus)
        self.phase = "gone"
        self.gone = how
        self.ended_at = now
        for device in self.devices:
            self.node.by_device[device].remove(self)
        self.training.lose_part(self.task)
