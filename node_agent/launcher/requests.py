"""The words of a node agent and its launcher: one JSON line each way over a Unix socket, file descriptors beside it.

A request to start a task comes with four descriptors, in this order: the log (for appending), the record of the end,
the lock of the record, and the pipe for the first line; a fifth for a task with a terminal is the socket at which
its owner comes to it. The task's supervisor gets them as they are, so that no user needs a path into the node agent's
folders. Likewise a request to ask the driver, or for a checkpoint in memory, comes with the pipe for the answer.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from protocol.messages import AppId, Count, Folder, Gpus, JobId, Label, LaunchSpec, Sentence, Variable, Word

#: Of one request: the largest command and environment that the kernel takes, and room.
REQUEST_BYTES_MAX = 2**23
DESCRIPTORS = 4
DESCRIPTORS_MAX = 5
#: The longest that an operation of the driver may take: an hour.
DRIVE_S_MAX = 3600.0
DRIVEN_MAX = 4096
#: Of node agents on this node by their state directories, and of their tasks; see `node_agent.workers.containment`.
Owner = Annotated[str, Meta(pattern=r"^[0-9a-f]{8}$")]
Key = Annotated[str, Meta(pattern=r"^[0-9a-f]{8}-[0-9a-f]{16}$")]


class Start(Struct, frozen=True, tag="start", forbid_unknown_fields=True):
    """Start a task on these devices; `env` are the variables of the node agent's own, `node` is for sentences."""

    key: Key
    node: Label
    app: AppId
    job: JobId
    attempt: Count
    gpus: Gpus
    launch: LaunchSpec
    env: dict[Variable, Word] = {}
    memory_bytes: Count = 0
    cpus: tuple[Count, ...] = ()
    memory_dir: bool = False  #: it may leave its checkpoint in memory


class Signal(Struct, frozen=True, tag="signal", forbid_unknown_fields=True):
    """SIGTERM the task's main process, SIGKILL all but its supervisor, or `end` the supervisor too."""

    key: Key
    how: Literal["terminate", "kill", "end"]


class Living(Struct, frozen=True, tag="living", forbid_unknown_fields=True):
    """Name the tasks of a node agent that are there."""

    owner: Owner


class Drive(Struct, frozen=True, tag="drive", forbid_unknown_fields=True):
    """Have the driver suspend or resume these processes of a task, or find their state, within `timeout_s` seconds.

    The pipe for the answer comes with it; see `node_agent.workers.driver_helper`.
    """

    key: Key
    do: Literal["suspend", "resume", "find"]
    timeout_s: Annotated[float, Meta(gt=0, le=DRIVE_S_MAX)]
    pids: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=DRIVEN_MAX)]
    lock_s: Annotated[float, Meta(ge=0, le=DRIVE_S_MAX)] = 0.0


class Keep(Struct, frozen=True, tag="keep", forbid_unknown_fields=True):
    """Look for a checkpoint in memory of an attempt that was started here, copy it to its disk, or forget it.

    `before`: of `release`, the attempt before which all is forgotten; None: all, and the folder too. The pipe for the
    answer comes with it; see `node_agent.workers.memory_helper`.
    """

    key: Key
    gateway: Label
    run: Word
    job: JobId
    attempt: Count
    do: Literal["find", "flush", "release"]
    before: Count | None = None


class Marked(Struct, frozen=True):
    """What the mark of an attempt holds: its user, and where its checkpoints go."""

    user: str
    uid: int
    checkpoint_dir: Folder


class Keeping(Struct, frozen=True):
    """What the helper for checkpoints in memory, already the user, is to do; `folder` is that of the user's."""

    folder: Folder
    checkpoint_dir: Folder
    request: Keep


class Kept(Struct, frozen=True):
    """The answer of that helper: the unflushed checkpoint in memory (empty: none), and why it could not be copied."""

    found: Label = ""
    error: Sentence = ""


class Reply(Struct, frozen=True, omit_defaults=True):
    """The answer: `error` is empty or a sentence; the supervisor of a task that was started; keys of living tasks."""

    error: str = ""
    shim: int = 0
    shim_ticks: int = 0
    keys: tuple[Key, ...] = ()


class Payload(Struct, frozen=True):
    """What the supervisor, already the user, is to run; see `node_agent.workers.shim`."""

    command: tuple[str, ...]
    cwd: Folder
    checkpoint_dir: Folder
    env: dict[str, str]
    secrets: dict[str, str]
    cpus: tuple[int, ...]
    reader: str  #: the user, for sentences
    node: str
    terminal: bool = False
    bootstrap_dir: str = ""  #: of the launcher's settings
    cgroup: str = "own"


Request = Start | Signal | Living | Drive | Keep
