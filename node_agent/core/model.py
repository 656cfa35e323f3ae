"""A task as the node agent knows it: a state is a class with its own data, and a table holds the transitions.

=============  =========================================================================================
`Waiting`      has a lease; its GPUs are not proven free yet
`Starting`     its process is being started
`Loading`      its process lives and has not said hello
`Running`      said hello, or never will
`Suspending`   was ordered to park at the next mini-batch boundary
`Suspended`    parked: alive, its GPU memory in host memory; until its next turn, or because its lease ended
`Resuming`     was ordered to train again; of several processes, some may train
`Vacating`     must leave its GPUs: told to save and go, or being signalled
`Stopping`     must end for good: being signalled
`Exited`       gone; `lingering` while its process is not, although its GPU is lost
=============  =========================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, assert_never

from msgspec import Struct

from node_agent.core.cost import Cost
from node_agent.core.rank_sync import Ranks
from protocol.messages import (
    AppId,
    GpuId,
    JobId,
    LaunchSpec,
    Outcome,
    PreemptBy,
    Rendezvous,
    StepSource,
    TaskId,
    TaskPhase,
    Want,
    device_of,
)
from protocol.worker import Order, Progress

REASON_CHARS_MAX = 4000  #: of a sentence that travels every beat

#: `unasked`: the driver could not be asked, or a process would not resume; they are asked again at the deadline.
Rung = Literal["unasked", "ordered", "probed", "terminated", "killed"]


class Ladder(Struct, frozen=True):
    """How hard the worker has been asked, and when to ask harder."""

    rung: Rung
    deadline: float
    order: Order | None = None  #: the order, to be repeated after a reconnect


class Waiting(Struct, frozen=True):
    """`obstacle` says why the task waits."""

    obstacle: str = ""


class Starting(Struct, frozen=True):
    """Nothing is known yet of the process."""


class Loading(Struct, frozen=True):
    """Waits for hello until `hello_by`."""

    hello_by: float


class Running(Struct, frozen=True):
    """Trains."""


class Suspending(Struct, frozen=True):
    """Ordered to park, or being checkpointed by the driver.

    While the driver cannot be asked, it is asked again: for a task that is to leave until `ask_by`.
    """

    ladder: Ladder
    by_driver: bool = False
    ask_by: float = 0.0
    wish: Want | None = None  #: for which `ask_by` was set: to leave after a rest has its own time
    obstacle: str = ""  #: why the driver could not be asked when it was tried last


class Suspended(Struct, frozen=True):
    """Parked; must have given its memory back by `proof_by`. Each event from then on has that looked at."""

    proof_by: float
    obstacle: str = ""  #: why it cannot be resumed although it should run
    retry_at: float = 0.0  #: it refused to resume; ask again then
    by_driver: bool = False  #: by the driver's checkpoint: it hears nothing
    kept: str = ""  #: how much memory it has not given back, which is in the way of other tasks and not in its own
    looked: bool = False  #: `proof_by` is over


class Resuming(Struct, frozen=True):
    """Ordered to train again, or being restored by the driver."""

    ladder: Ladder
    by_driver: bool = False


class Vacating(Struct, frozen=True):
    """Leaves its GPUs; `reason` says why it had to be signalled, empty while it leaves by itself."""

    ladder: Ladder
    reason: str = ""


class Stopping(Struct, frozen=True):
    """Ends for good, as `outcome` unless it finishes first. One that was `parked` does not use its GPUs."""

    ladder: Ladder
    outcome: Outcome
    reason: str
    parked: bool = False


class Exited(Struct, frozen=True):
    """Ended."""

    outcome: Outcome
    reason: str
    exit_code: int | None = None
    lingering: bool = False
    kill_again_at: float = 0.0
    unflushed: bool = False  #: its checkpoint is on the way from host memory to the disk


State = Waiting | Starting | Loading | Running | Suspending | Suspended | Resuming | Vacating | Stopping | Exited

#: The states that may follow each state. A worker found by a new incarnation enters as Loading or Suspended.
TRANSITIONS: dict[type[State], tuple[type[State], ...]] = {
    Waiting: (Starting, Exited),
    Starting: (Loading, Waiting, Exited),
    Loading: (Running, Suspending, Suspended, Vacating, Stopping, Exited),
    Running: (Suspending, Suspended, Resuming, Vacating, Stopping, Exited),
    Suspending: (Running, Suspending, Suspended, Resuming, Vacating, Stopping, Exited),
    Suspended: (Running, Resuming, Vacating, Stopping, Exited),
    Resuming: (Running, Suspended, Resuming, Vacating, Stopping, Exited),
    Vacating: (Suspending, Resuming, Stopping, Exited),
    Stopping: (Exited,),
    Exited: (),
}


class Facts(Struct, frozen=True):
    """The newest that the worker said of itself, and the measurements of it."""

    hello: bool = False
    connected: bool = False
    step: int = -1
    start_step: int = -1
    saved_step: int = -1
    total_steps: int = 0
    step_s: float = 0.0
    can_park: bool = False
    can_checkpoint: bool = False
    left: bool = False  #: saved a checkpoint and said that it goes
    told_to_leave: bool = False
    signalled: bool = False
    finished: bool = False
    suspensions: int = 0
    refused: tuple[str, ...] = ()  #: methods that it refused, or by which it, or an earlier attempt, kept memory
    refusal: str = ""  #: why it refused the last of them, or what was kept
    driver_lost: bool = False  #: the driver of this node has lost an earlier attempt of its job
    metrics: dict[str, float] = {}
    diverged: tuple[str, ...] = ()  #: metrics whose newest value is no finite number
    samples: int = 0
    source: StepSource = "unknown"  #: of `step_s`
    confidence: float = 0.0
    periods: dict[StepSource, float] = {}  #: that each signal shows, s, where the worker does not tell its steps
    sample_at: float = 0.0  #: when to have its memory sampled, UNIX seconds; 0: not seen running yet
    sampled: bool = False  #: it was: it had run for a while and told no step
    passes_asked_at: float = 0.0  #: when it was sampled though it tells its steps, UNIX seconds; 0: not yet
    micro_batches: int = 0  #: how many passes of its memory's period make a mini-batch, from 2 on; 0: unknown
    utilisation: float | None = None
    load: float | None = None
    state_bytes: int = 0  #: of the state that parking would move
    arena_bytes: int = 0  #: of the host memory that is ready for it
    arena_asked: int = 0
    peak_bytes: int = 0
    trough_bytes: int = 0
    swing_bytes: int = 0  #: of its memory in each mini-batch as the driver shows it; 0 while that shows no cycle
    reserved_bytes: int = 0
    parked_bytes: int = 0
    suspend_s: float = 0.0
    resume_s: float = 0.0
    cost: Cost = Cost()
    first_missed: bool = False  #: an earlier node agent may have seen its first mini-batch, and did not note when
    on_gpu: bool = False  #: a process of it was seen to use a GPU, as the driver needs it
    mps: bool = False  #: it is a client of MPS, for as long as it lives
    quiet_s: float | None = None  #: for how long nothing was typed or shown in its terminal; None: it has none
    worked_at: float = 0.0  #: of a task with a terminal: when a GPU of it was last seen at work, UNIX seconds
    warned_at: float | None = None  #: when its terminal was told that it will end, UNIX seconds
    verdict: Literal["", "failed", "preempted"] = ""  #: an earlier node agent's on its end, if that was one of MPS


class Lesson(Struct, frozen=True):
    """What the attempts of a job have shown on this node, for its next ones."""

    driver_lost: bool = False  #: the driver has lost one
    kept_by: frozenset[str] = frozenset()  #: methods by which one was suspended and kept memory of its GPUs
    kept: str = ""  #: how much it kept

    def of_new_attempt(self) -> Facts:
        """Return the facts with which a new attempt begins."""
        refusal = f"an earlier attempt of it {self.kept}" if self.kept else ""
        return Facts(driver_lost=self.driver_lost, refused=tuple(sorted(self.kept_by)), refusal=refusal)


class MpsFault(Struct, frozen=True):
    """A fatal fault of the MPS server that a task used, at `at` (UNIX seconds)."""

    at: float
    reason: str


class Task(Struct, frozen=True):
    """One attempt of one job on this node. `named` says that the newest plan names it."""

    id: TaskId
    app: AppId
    job: JobId
    attempt: int
    gpus: tuple[GpuId, ...]
    state: State
    want: Want | None = None  #: None: found alive, and no plan has come yet
    launch: LaunchSpec | None = None
    grace_s: float = 120.0
    preempt_by: PreemptBy = "auto"
    reason: str = ""
    named: bool = True
    complaint: str = ""  #: why its order cannot be obeyed, for the status
    facts: Facts = Facts()
    priority: int = 0
    ranks: Ranks = Ranks()
    began_at: float | None = None  #: when its process began, UNIX seconds; None: it has had none
    reseated: bool = False  #: on other seats of its GPUs than it was started on, or on other GPUs
    image_of: tuple[GpuId, ...] = ()  #: parked or resuming: the seats from which the driver is to move it to `gpus`
    rendezvous: Rendezvous | None = None  #: of a job on several nodes
    stop_at: int = -1  #: the step after which all parts of such a job are to stand, or to leave
    stands: bool = False  #: it is to stand there only, until a plan says that it is to leave
    parked_as: int = 0  #: its number in the order in which tasks were parked; 0: before the node agent began
    given_up: bool = False  #: parked, and its seats were reported empty under no lease: another task may have them now

    @property
    def devices(self) -> frozenset[GpuId]:
        """The devices that its seats are on."""
        return frozenset(map(device_of, self.gpus))

    @property
    def gpu_peak_bytes(self) -> int:
        """The memory that it has on each of its GPUs at most at its peak; 0 while unknown.

        Of ranks with a GPU each it is that of the largest. One process on several GPUs tells their sum alone, which it
        may have on one of them.
        """
        peaks = [told.peak_bytes for told in self._tellers]
        return max(peaks) if len(peaks) >= self.ranks.world and all(peaks) else 0

    @property
    def gpu_reserved_bytes(self) -> int:
        """The memory that its allocator keeps on each of its GPUs at most, by the same rule."""
        return max((told.reserved_bytes for told in self._tellers), default=0)

    @property
    def _tellers(self) -> Sequence[Facts | Progress]:
        return [self.facts] if self.ranks.world == 1 else list(self.ranks.news.values())

    @property
    def home(self) -> tuple[GpuId, ...]:
        """The seats that its process is on, or was when it was suspended."""
        return self.image_of or self.gpus

    @property
    def occupies(self) -> bool:
        """Whether its process may hold memory on its GPUs beyond a parked worker's share."""
        match self.state:
            case Waiting() | Suspended() | Stopping(parked=True):
                return False
            case Exited(lingering=lingering):
                return lingering
            case _:
                return True

    @property
    def has_gpus(self) -> bool:
        """Whether its process is on its GPUs: that time counts as cost."""
        return self.occupies and not isinstance(self.state, Starting | Exited)

    def age_s(self, now: float) -> float:
        """Return how old its process is."""
        return 0.0 if self.began_at is None else now - self.began_at

    @property
    def deadline(self) -> float | None:
        """When to act on the task if no news comes, UNIX seconds."""
        match self.state:
            case (
                Suspending(ladder=ladder) | Resuming(ladder=ladder) | Vacating(ladder=ladder) | Stopping(ladder=ladder)
            ):
                return ladder.deadline
            case Loading(hello_by=at):
                return at
            case Suspended(proof_by=proof_by, looked=looked, retry_at=retry_at) if self.want in ("run", "vacate"):
                times = (0.0 if looked else proof_by, retry_at if self.want == "run" else 0.0)
                return min(filter(None, times), default=None)
            case Exited(lingering=True, kill_again_at=at):
                return at
            case _:
                return None

    @property
    def phase(self) -> TaskPhase:
        """The word on the wire for its state."""
        return phase(self.state)


def phase(state: State) -> TaskPhase:
    """Return the word on the wire for `state`."""
    match state:
        case Waiting() | Starting() | Loading():
            return "starting"
        case Running():
            return "running"
        case Suspending():
            return "suspending"
        case Suspended():
            return "suspended"
        case Resuming():
            return "resuming"
        case Vacating():
            return "vacating"
        case Stopping():
            return "stopping"
        case Exited():
            return "exited"
        case _:
            assert_never(state)


class IllegalTransition(AssertionError):  # noqa: N818 - the field's own word for it
    """Our own bug: a task was led where its state does not go. Carries the task's whole story."""

    def __init__(self, task: TaskId, start: State, finish: State, story: tuple[str, ...]) -> None:
        self.task, self.start, self.finish, self.story = task, start, finish, story
        told = "; ".join(story)
        super().__init__(f"task {task} cannot go from {start!r} to {finish!r}; its story: {told}")
