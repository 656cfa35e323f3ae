"""An app and its jobs as their owner's tools see them; a tool that only shows them imports no more than this."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from protocol.messages import AppId, JobId, StepSource, TaskId

RecordState = Literal["waiting", "running", "suspended", "held", "finished", "failed", "cancelled"]


class JobRecord(Struct, frozen=True):
    """One job that has a living process, as its owner's tools see it.

    `steps` of `total_steps` (0: unknown) mini-batches and `samples` are done, by its script's word. A mini-batch takes
    `step_s` (0: unknown), without time suspended, by `step_source`: its own word, or the period of a signal. It has its
    GPUs for a `share` of the time, 1 if it has them to itself, and beside it run the tasks `packed_with`; `remark` is
    its node agent's finding about that.
    """

    job: JobId
    task: TaskId
    gpus: tuple[str, ...]
    steps: int
    total_steps: int
    samples: int
    step_s: float
    step_source: StepSource
    share: float
    packed_with: tuple[TaskId, ...]
    remark: str


class AppRecord(Struct, frozen=True):
    """One app as its owner's tools see it. `exit_code` is the app's own as a shell would show it, once it is over.

    It waits for the end of the apps `after`. Of an array `tasks` are those of jobs that run or are parked, and `ended`
    has the indices of the jobs that have ended, by how they did, written as ``0-4,7``.

    Below `checkpoint_dir` its jobs have their folders; `call_dir` is the folder of the call if it is one of a function.
    Both are empty for an app that was over before this was kept.
    """

    app: AppId
    tenant: str
    name: str
    state: RecordState
    reason: str
    submitted_at: float
    ended_at: float | None
    exit_code: int | None
    refused: bool
    gpus: tuple[str, ...]
    tasks: tuple[TaskId, ...]
    migrations: int
    steps_lost: int
    suspensions: int
    metrics: dict[str, float]
    jobs: tuple[JobRecord, ...] = ()
    after: tuple[AppId, ...] = ()
    ended: dict[RecordState, str] = {}
    checkpoint_dir: str = ""
    call_dir: str = ""

    @property
    def over(self) -> bool:
        """Whether the app has ended."""
        return self.ended_at is not None
