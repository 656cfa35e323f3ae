"""The state of a training process: its counters, its orders and answers, its memory.

The training thread writes the counters and obeys `order` (`boundary`); the helper thread reads the counters and sets
`order` (`orders`). Everything but the counters changes under `changed`, which the training thread takes only when it is
`due` to look.

To stop after the same mini-batch, the processes of one task are first told to `hold` at a step ahead. The helper thread
answers at once and must be right: it sets `order` and `due`, then reads `step`. The training thread writes `step`, then
reads `due`. So a step that is not over when the helper looks will find the order; of one that is over, `late` is said,
and the order is taken back before the training thread, which may have seen it, gets the lock.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from .agent_link import AgentLink, Line
from .checkpoints import Root
from .process_memory import Reading

TEXT_CHARS_MAX = 8000
#: `step_s` is a mean over so many beats in which steps were made, five seconds of a quick loop.
BEATS_OF_STEP_TIME = 20
#: Of so many orders the answers are kept, to be given again.
ANSWERS_KEPT = 16


class Order:
    """One order of the node agent. With `at_step` -1 it is for the next boundary."""

    __slots__ = ("at_step", "bytes", "do", "gen", "seq")

    def __init__(self, do: str, gen: int, seq: int, at_step: int = -1, size: int = 0) -> None:
        self.do, self.gen, self.seq, self.at_step, self.bytes = do, gen, seq, at_step, size

    @property
    def key(self) -> tuple[int, int]:
        """The key by which orders are compared."""
        return self.gen, self.seq

    @property
    def name(self) -> str:
        """The name of what all ranks of a task do by this order."""
        return f"g{self.gen}-q{self.seq}"


class Identity:
    """Which process this is: `rank` of `world` training processes that attempt `attempt` of the job has on this node.

    `task` is the id of that attempt on this node. `team` is its rank among the training processes on all nodes, and
    their number.
    """

    __slots__ = ("attempt", "rank", "task", "team", "world")

    def __init__(
        self, task: str, attempt: int, rank: int = 0, world: int = 1, team: tuple[int, int] | None = None
    ) -> None:
        self.task, self.attempt, self.rank, self.world = task, attempt, rank, world
        self.team = team or (rank, world)


class TrainingState:
    """All that the training thread and the helper thread share."""

    def __init__(self, identity: Identity, roots: list[Root]) -> None:
        self.task, self.attempt = identity.task, identity.attempt
        self.rank, self.world, self.team = identity.rank, identity.world, identity.team
        self.roots = roots
        self.durable: Path | None = roots[-1].path if roots else None
        self.pid = os.getpid()
        self.link: AgentLink  #: set by the training process
        # The counters: written at each boundary.
        self.step = self.start_step = self.saved_step = -1
        self.boundaries = self.samples = 0
        self.training_s = 0.0
        self.mark = time.perf_counter()
        self.explicit = False
        self.order: Order | None = None
        self.due = False  #: whether the training thread is to look closer at its next boundary
        # The script's abilities, and where it stands.
        self.total_steps = 0
        self.can_park = self.can_checkpoint = False
        self.stopped = self.held = self.leaving = self.finished = self.finish_recorded = False
        self.parked = False  #: from before memory is parked until it is back
        self.interrupt: Callable[[], object] | None = None  #: has the training thread save and leave wherever it is
        self.exit_status: object = None
        self.metrics: dict[str, float] = {}
        self.metrics_wanted = True
        # Memory, in bytes.
        self.survey_wanted = self.surveyed = False
        self.devices: tuple[int, ...] = ()
        self.state_bytes = self.trough_bytes = self.peak_bytes = self.reserved_bytes = 0
        self.nccl_bytes = 0  #: of NCCL's communicators, which no tensor shows
        self.memory_due_s = math.inf  #: when to read it again, by `time.perf_counter`; never before the survey
        self.cap: int | None = None  #: a limit that is still to be put in force
        self.cache_unwanted = False  #: memory that the allocator keeps unused is to go at the next boundary
        self.trough: tuple[Callable[[], None], float] | None = None  #: says that this is one; until when it is wanted
        self.sampled = False  #: a thread reads the memory every 10 ms or so
        self.cycle_bytes = 0, 0  #: the least and the most of its newest window
        # Orders and answers.
        self.changed = threading.Condition()
        self.accepted = self.obeyed = (0, 0)
        self.answers: dict[tuple[int, int], Line] = {}  #: the last ones
        self.suspended_answer: Line = {}  #: the answer to every order to suspend while suspended
        # The last words.
        self.beats: deque[tuple[int, float]] = deque(maxlen=BEATS_OF_STEP_TIME)  #: (boundaries, training_s) at each
        self.told: Line = {}
        self.told_at = -math.inf

    @property
    def awaited(self) -> bool:
        """Whether anything is to be done at the next boundary."""
        wanted = self.survey_wanted or self.cache_unwanted or self.trough is not None
        return wanted or self.order is not None

    def note_memory(self, reading: Reading | None) -> None:
        """Keep a reading at a trough: the newest counts, but for the peak, which is that of all since the first."""
        if reading is not None:
            self.trough_bytes, self.reserved_bytes = reading.allocated, reading.reserved
            self.peak_bytes = max(self.peak_bytes, reading.peak)

    def reply(self, order: Order, line: Line) -> None:
        """Answer `order`, and keep the answer."""
        self.obeyed = order.key
        line = {**line, "seq": order.seq}
        self.answers[order.key] = line
        if len(self.answers) > ANSWERS_KEPT:
            del self.answers[next(iter(self.answers))]
        self.link.say(line)

    def settle(self, order: Order, line: Line) -> None:
        """Answer `order` and be done with it, unless a younger one has taken its place."""
        with self.changed:
            if self.order is order:
                self.order = None
                self.reply(order, line)

    def refuse(self, order: Order, reason: str) -> None:
        """Answer that `order` cannot be obeyed, and be done with it."""
        self.settle(order, {"type": "refused", "reason": reason[:TEXT_CHARS_MAX]})
