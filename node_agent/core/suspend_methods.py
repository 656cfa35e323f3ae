"""The methods by which a task can give its GPUs up: those it has, has not refused, and host memory allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from node_agent.core.events import NodeFacts
from node_agent.core.model import Loading, Resuming, Running, Starting, Suspended, Suspending, Task
from node_agent.core.proof import Gpus

#: `leave`: by a checkpoint; `suspend`: parked by itself at a mini-batch boundary; `driver`: by the driver's checkpoint.
SuspendMethod = Literal["leave", "suspend", "driver"]

#: An order to vacate tries these in turn; a worker that has none of them is signalled.
VACATE_METHODS: dict[str, tuple[SuspendMethod, ...]] = {
    "auto": ("leave", "suspend", "driver"),
    "checkpoint": ("leave",),
    "suspend": ("suspend", "driver", "leave"),
}
#: Of a job on several nodes whose parts leave at one step, each has the method that all are told, and no other.
JOINT_METHODS: dict[str, tuple[SuspendMethod, ...]] = {"checkpoint": ("leave",), "suspend": ("suspend",)}
#: A worker at the end of its turn on a shared GPU tries these.
REST_METHODS: tuple[SuspendMethod, ...] = ("suspend", "driver")


class SuspendMethods:
    """The methods that the tasks of one node can use, given the host memory and the driver of the node."""

    def __init__(self, facts: NodeFacts, gpus: Gpus) -> None:
        self._facts = facts
        self._gpus = gpus

    def usable(self, task: Task, among: Sequence[SuspendMethod], tasks: Iterable[Task]) -> list[SuspendMethod]:
        """Return which methods `among` these a task has and has not refused; `tasks` are all of the node."""
        facts = task.facts
        if among is REST_METHODS and task.ranks.apart:
            return []  # a part of a job on several nodes takes no turns: its other parts would wait for it
        found = [do for do in among if do not in facts.refused]
        if "driver" in found and (facts.mps or task.ranks.apart):  # unverified; it suspends at no common step
            found.remove("driver")
        if "leave" in found and not facts.can_checkpoint:
            found.remove("leave")
        # A job that the driver has lost takes no turns by it. It is asked again where the job ends otherwise.
        if "driver" in found and facts.driver_lost and (among is REST_METHODS or "leave" in found):
            found.remove("driver")
        # Before its first mini-batch a task may park all of its GPUs' memory; without a save it loses only its start.
        spared = "leave" in found or task.ranks.apart
        unknown = self._is_of_unknown_size(task)
        unfit = spared and unknown and not self._has_room_for_all(task, tasks)
        early = unknown and among is REST_METHODS
        if "suspend" in found and (unfit or early or not (facts.can_park and self.has_host_memory(task, tasks))):
            found.remove("suspend")
        if "driver" in found and (unfit or not self._facts.driver or (early and not self._fits_as_it_is(task, tasks))):
            found.remove("driver")
        return found

    def is_helpless(self, task: Task, tasks: Iterable[Task]) -> bool:
        """Whether an order to leave would end a task by a signal: it has no method left that its user allows."""
        return not self.usable(task, VACATE_METHODS[task.preempt_by], tasks)

    def has_driver(self, task: Task) -> bool:
        """Whether the driver can suspend a task regardless of its script: it uses a GPU and was not refused before."""
        used = task.facts.on_gpu or (isinstance(task.state, Suspended) and task.state.by_driver)
        able = self._facts.driver and not task.facts.mps
        return able and used and "driver" not in task.facts.refused and not task.ranks.apart

    def can_rest(self, task: Task, tasks: Iterable[Task]) -> bool:
        """Whether a task that is on its GPUs can be suspended, now or within a moment."""
        if isinstance(task.state, Running):
            return bool(self.usable(task, REST_METHODS, tasks))
        return isinstance(task.state, Suspending)

    def why_fixed(self, task: Task) -> str:
        """Say why a task cannot be suspended."""
        if isinstance(task.state, Starting | Loading | Resuming):
            return "it is only starting"
        if task.ranks.apart:
            return "its job lies on several nodes, and takes no turns"
        why = self._why_not_parked(task)
        if task.facts.driver_lost and self._facts.driver and not task.facts.mps:
            return f"{why}; the driver is not asked, as it has lost an earlier attempt of this job"
        if task.facts.mps and self._facts.driver:
            return f"{why}; the driver is not asked, as it is a client of MPS, and no test has shown that this works"
        return why

    def _why_not_parked(self, task: Task) -> str:
        facts = task.facts
        if facts.refusal and {"suspend", "driver"} & set(facts.refused):
            return facts.refusal
        if facts.hello and not facts.can_park:
            return (
                "this script tells nothing of its steps: no optimizer of torch.optim has stepped yet, and nothing of "
                "app_agent.session was called"
            )
        if facts.hello and self._is_of_unknown_size(task):
            return "it has not made its first mini-batch yet"
        if facts.can_park:
            return f"host memory for parked jobs has no room for its {facts.state_bytes} bytes"
        if facts.mps or facts.driver_lost:
            return "it does not use the library"
        return "it does not use the library, and the driver cannot checkpoint processes here"

    def _is_of_unknown_size(self, task: Task) -> bool:
        """Whether a task has not said yet how much it would park; it does with its first mini-batch."""
        facts = task.facts
        fresh = facts.hello and facts.step <= facts.start_step and not (facts.state_bytes or facts.parked_bytes)
        return bool(self._facts.host_bytes) and fresh

    def has_host_memory(self, task: Task, tasks: Iterable[Task]) -> bool:
        """Whether the state of `task` can be parked beside that of all others."""
        if not self._facts.host_bytes:
            return True
        # After a restart of the node agent the size that it parked last is known before the size of its state now.
        return self._has_room(max(task.facts.state_bytes, task.facts.parked_bytes), task, tasks)

    def _fits_as_it_is(self, task: Task, tasks: Iterable[Task]) -> bool:
        """Whether the driver can move what a task has now: one that has run for a while and tells of no steps."""
        used = self._gpus.used_bytes(task.devices)
        return task.facts.on_gpu and task.facts.sampled and self._has_room(used, task, tasks)

    def _has_room_for_all(self, task: Task, tasks: Iterable[Task]) -> bool:
        """Whether the whole memory of the GPUs of `task` could be parked."""
        return self._has_room(sum(self._gpus.memory_bytes(device) for device in task.devices), task, tasks)

    def _has_room(self, size: int, task: Task, tasks: Iterable[Task]) -> bool:
        taken = sum(_host_bytes(each) for each in tasks if each.id != task.id and each.phase != "exited")
        return taken + size <= self._facts.host_bytes


def _host_bytes(task: Task) -> int:
    """Return how much host memory a task has for its state, or is about to have."""
    facts = task.facts
    parks = isinstance(task.state, Suspending | Suspended | Resuming)
    return max(facts.arena_asked, facts.parked_bytes, facts.state_bytes if parks else 0)
