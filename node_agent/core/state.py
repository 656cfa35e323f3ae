"""The state of a node agent's core, and the only ways in which a task changes.

The operations in the modules above are free functions over one `NodeState`: they change its tasks through the methods
here and append their effects. `NodeAgent.handle` sets the time before them and takes the effects after them.
"""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace

from node_agent.core.events import HealthLedger, NodeEffect, NodeFacts, WorkerNote
from node_agent.core.health import Health
from node_agent.core.model import TRANSITIONS, IllegalTransition, Lesson, MpsFault, Running, State, Task
from node_agent.core.proof import Gpus
from node_agent.core.sharing import Sharing
from node_agent.core.suspend_methods import SuspendMethods
from protocol.messages import GpuId, JobId, TaskId

STORY_MAX = 64
#: The lessons of so many jobs are remembered.
JOBS_MAX = 1000


class NodeState:
    """All that one node's agent knows; see `NodeAgent` for the parameters."""

    def __init__(
        self, facts: NodeFacts, fence: tuple[int, int], ledger: HealthLedger | None, site: str, *, leaves_site: bool
    ) -> None:
        self.facts = facts
        self.now = 0.0
        self.effects: list[NodeEffect] = []
        # The arbiter and its plans.
        self.incarnation = facts.incarnation
        #: The site that this node leaves, with its fence: should that site speak again, no older plan of it is obeyed.
        self.former = (site, fence) if leaves_site else None
        self.site, self.fence = ("", (0, 0)) if leaves_site else (site, fence)
        self.foreign_sites: set[str] = set()  #: sites whose plans were refused
        self.plans_refused = 0
        self.epoch_refused = 0  #: the newest of an arbiter whose journal has lost plans that were obeyed here
        self.leased: frozenset[GpuId] = frozenset()
        # Tasks and GPUs.
        self.tasks: dict[TaskId, Task] = {}
        self.health = Health(facts, ledger)
        self.gpus = Gpus(facts)
        self.methods = SuspendMethods(facts, self.gpus)
        self.sharing = Sharing(facts, self.gpus, self.methods)
        self.lessons: dict[JobId, Lesson] = {}  #: by job: what its attempts have shown here, the newest last
        #: An answer to an order of an earlier node agent must not be taken for one to an order of this one.
        self.order_seq = facts.incarnation % 2**20 * 2**32
        self.mps_faults: dict[TaskId, MpsFault] = {}
        self.mps_failed_at: dict[GpuId, float] = {}  #: when a client of MPS last failed on each device
        self.sample_asked = 0  #: the newest mark for which a measurement was asked
        # Reports.
        self.adopted = False
        self.report_seq = 0
        self.reported: tuple[object, ...] = ()  #: the significant part of the last report
        self.beat_at: float | None = None
        self.told_beat_s = 0.0  #: the arbiter's wish; 0: it has none
        self.unsaid = False  #: something may have changed since the last tick
        self.figures_at: float | None = None  #: when metrics that came after the last report are due
        # Memory.
        self.unrecorded = ""  #: why nothing can be written down at the moment
        self.notes: dict[TaskId, WorkerNote] = {}
        self.noted: dict[TaskId, Task] = {}  #: each task as it was when its note was last compared
        self.stories: dict[TaskId, deque[str]] = {}

    def in_order(self) -> tuple[Task, ...]:
        """Return every task, in order of its id."""
        return tuple(map(self.tasks.__getitem__, sorted(self.tasks)))

    def story(self, task: TaskId) -> tuple[str, ...]:
        """Return what happened to `task`, oldest first; empty if it is unknown."""
        return tuple(self.stories.get(task, ()))

    def tell(self, task_id: TaskId, what: str) -> None:
        """Add a line to the story of a task."""
        self.stories.setdefault(task_id, deque(maxlen=STORY_MAX)).append(f"{self.now:.3f} {what}")

    def note_driver_lost(self, job: JobId) -> None:
        """Remember that the driver has lost an attempt of a job."""
        for task in [task for task in self.tasks.values() if task.job == job]:
            self.learn(task.id, driver_lost=True)
        self._remember(job, replace(self.lessons.get(job, Lesson()), driver_lost=True))

    def note_kept(self, task: Task, method: str, kept: str) -> None:
        """Remember that a task has kept memory of its GPUs, as `kept` says, when it was suspended by a method."""
        if method not in task.facts.refused:
            self.learn(task.id, refused=(*task.facts.refused, method))
        self.learn(task.id, refusal=kept)
        known = self.lessons.get(task.job, Lesson())
        self._remember(task.job, replace(known, kept_by=known.kept_by | {method}, kept=kept))

    def forget_kept(self, job: JobId) -> None:
        """Forget that a job has kept memory: it has given it back in the end."""
        known = self.lessons.get(job)
        if known is not None and known.kept:
            self._remember(job, Lesson(driver_lost=known.driver_lost))

    def _remember(self, job: JobId, lesson: Lesson) -> None:
        self.lessons.pop(job, None)
        self.lessons[job] = lesson
        if len(self.lessons) > JOBS_MAX:
            del self.lessons[next(iter(self.lessons))]

    def next_order_seq(self) -> int:
        """Return the number of the next order."""
        self.order_seq += 1
        return self.order_seq

    def put(self, task: Task) -> None:
        """Replace a task, or add it."""
        self.tasks[task.id] = task

    def learn(self, task_id: TaskId, **facts: object) -> None:
        """Replace facts of a task, if it is known."""
        task = self.tasks.get(task_id)
        if task is not None:
            self.put(replace(task, facts=replace(task.facts, **facts)))

    def enter_state(self, task: Task, state: State, what: str) -> None:
        """Lead `task` into `state`, and tell its story that `what` happened.

        Raises
        ------
        IllegalTransition
            If the table does not allow it.
        """
        task = self.tasks[task.id]
        if type(state) not in TRANSITIONS[type(task.state)]:
            raise IllegalTransition(task.id, task.state, state, self.story(task.id))
        self.put(replace(task, state=state))
        self.count_time(task.id)
        self.tell(task.id, what)

    def enter_running(self, task: Task, what: str) -> None:
        """Lead `task` into `Running`: it trains from now on, and its rate may be measured."""
        self.enter_state(task, Running(), what)
        self.sharing.runs(task.id, self.tasks, self.now)

    def count_time(self, task_id: TaskId) -> None:
        """Begin to count the time of a task if it has its GPUs now, or end it if it has not."""
        task = self.tasks[task_id]
        cost = task.facts.cost.turned(task.age_s(self.now), on=task.has_gpus)
        if cost is not task.facts.cost:
            self.learn(task_id, cost=cost)

    def count_first(self, task_id: TaskId, since_first_s: float) -> None:
        """Count the time until the first mini-batch of a task, which was made so many seconds ago."""
        task = self.tasks[task_id]
        cost = task.facts.cost.begun(task.age_s(self.now), since_first_s)
        if cost is not task.facts.cost and not task.facts.first_missed:
            self.learn(task_id, cost=cost)

    def count_saved(self, task_id: TaskId, before: int) -> None:
        """Count what a task has saved, if that is more than the step `before`."""
        task = self.tasks[task_id]
        facts = task.facts
        if facts.saved_step > before:
            behind_s = max(0, facts.step - facts.saved_step) * facts.step_s
            self.learn(task_id, cost=facts.cost.saved(task.age_s(self.now), behind_s))
