"""The worker contract: the words of a training process and its node agent over a local Unix socket, one JSON line each.

The worker side is `app_agent.session`, which uses the standard library only and writes these shapes by hand; the node
agent decodes them with `decode_line`. Orders go to a helper thread of the worker, never by signal. Every order carries
the agent's generation `gen` (persisted, one more at each start of the node agent) and a `seq`; a worker ignores lower
generations and answers repeated orders again without doing them twice. The worker is fail-static: without an agent it
keeps its last order and reconnects with backoff.

The environment of a worker (see `ENVIRONMENT`): the socket, its identity, folders for checkpoints, its GPUs.
"""

from __future__ import annotations

from hashlib import blake2s
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from protocol.codec import WireError
from protocol.messages import Count, Label, Metrics, Seconds, Sentence, Step

PROTO = 1
#: Longest line either side sends or accepts.
LINE_BYTES_MAX = 65536
#: Samples of one line `counted`.
COUNTED_MAX = 1000
#: How long a worker waits for a trough of its memory.
TROUGH_S = 5.0
#: EX_TEMPFAIL: "I have saved; start me again", said by a worker that was told to leave.
EXIT_REQUEUE = 75

#: Name of each environment variable a node agent gives a worker, and its content.
ENVIRONMENT: dict[str, str] = {
    "GPU_ARBITER_SOCKET": "path of the node agent's Unix socket for this task; absent: every call is a no-op",
    "GPU_ARBITER_TASK": "the task's id",
    "GPU_ARBITER_JOB": "the job's id, the same in every attempt",
    "GPU_ARBITER_ATTEMPT": "the attempt, from 0",
    "GPU_ARBITER_RUN": "the submission that the job belongs to; a checkpoint of another run is not this job's",
    "GPU_ARBITER_CHECKPOINT_DIR": "folder of this job's checkpoints, the same in every attempt",
    "GPU_ARBITER_GPUS": "how many GPUs this task has",
    "GPU_ARBITER_MEMORY_DIR": "folder in host memory for a checkpoint with which it leaves its GPUs; absent: none",
    "PET_NPROC_PER_NODE": "the same number, for torchrun without --nproc-per-node",
    "GPU_ARBITER_NODES": "on how many nodes the job lies; 1: all its GPUs are here",
    "GPU_ARBITER_NODE_RANK": "the place of this node among them, from 0",
    "PET_NNODES": "the same as GPU_ARBITER_NODES, for torchrun; only of a job on several nodes, as are the next three",
    "PET_NODE_RANK": "the same as GPU_ARBITER_NODE_RANK, for torchrun",
    "PET_MASTER_ADDR": "the address of the first node, for torchrun",
    "PET_MASTER_PORT": "a port there, another in each attempt",
    "CUDA_VISIBLE_DEVICES": "their UUIDs, comma-separated (a hint, not isolation)",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "WANDB_RUN_ID": "the job's run at WandB, the same in every attempt; unless the user sets it",
    "WANDB_RESUME": "allow: begin that run, or go on with it; unless the user sets it",
    "MLFLOW_RUN_CONTEXT": "tags of MLflow's runs: gpu_arbiter_run, gpu_arbiter_job; unless the user sets it",
    "TORCH_NCCL_ENABLE_MONITORING": "0: the watchdog must not kill a suspended worker",
}


def memory_name(job: str, run: str) -> str:
    """Return the name of the folder in host memory of a job's checkpoints."""
    return blake2s((f"{job}/{run}" if run else job).encode(), digest_size=8).hexdigest()


class Hello(Struct, frozen=True, tag="hello"):
    """First line after each connect. `state` is the worker's present one; a reconnecting worker may be suspended.

    `metrics` and `diverged` are as in `Progress`: those that it reported while no node agent listened are not lost.

    A task may be several training processes (torchrun): `rank` of `world` on this node, each with a connection. `held`
    says that it stands at a boundary because of an order to `hold`, or will.
    """

    proto: int
    task: str
    pid: Count
    state: Literal["running", "held", "suspended"]
    step: Step
    start_step: Step
    total_steps: Count
    can_park: bool
    can_checkpoint: bool
    gen: Count = 0  #: the highest agent generation seen so far
    seq: Count = 0  #: the last order obeyed of that generation
    saved_step: Step = -1
    finished: bool = False
    rank: Count = 0
    world: Annotated[int, Meta(ge=1, le=1024)] = 1
    state_bytes: Count = 0  #: the bytes that parking this process would move; 0 while unknown
    metrics: Metrics = {}
    diverged: tuple[Label, ...] = ()


class Progress(Struct, frozen=True, tag="progress", omit_defaults=True):
    """Every quarter of a second at most, while steps are made, and every 5 s at least as a heartbeat.

    `metrics` are finite; `diverged` names those whose newest value is not, as JSON has no word for it.

    Bytes are of this process alone, 0 while unknown: those that parking would move; the part of the host arena that is
    faulted in and registered for it; the GPU memory of its tensors at their peak within a mini-batch, and at the newest
    trough; and the GPU memory that its allocator keeps, in use or not. Peak and kept memory include NCCL's buffers.
    """

    step: Step
    step_s: Seconds  #: mean mini-batch time over recent steps, without time suspended
    start_step: Step
    total_steps: Count
    can_park: bool
    can_checkpoint: bool
    saved_step: Step
    metrics: Metrics = {}
    state_bytes: Count = 0
    arena_bytes: Count = 0
    peak_bytes: Count = 0
    trough_bytes: Count = 0
    samples: Count = 0  #: samples consumed, where the script says so
    seq: Count = 0  #: of the order to `tell` that this answers; 0: unasked
    diverged: tuple[Label, ...] = ()
    reserved_bytes: Count = 0


class Suspended(Struct, frozen=True, tag="suspended"):
    """The worker stands at a mini-batch boundary; `bytes` are parked in host memory, `residue_bytes` stay behind."""

    seq: Count
    step: Step
    bytes: Count
    residue_bytes: Count
    seconds: Seconds


class Resumed(Struct, frozen=True, tag="resumed"):
    """The worker trains again."""

    seq: Count
    step: Step
    seconds: Seconds


class Saved(Struct, frozen=True, tag="saved"):
    """A checkpoint of `step` is durable. With `leaving`, the process now exits with code 75 (EXIT_REQUEUE)."""

    seq: Count
    step: Step
    dir: str
    seconds: Seconds
    leaving: bool


class Refused(Struct, frozen=True, tag="refused"):
    """The worker cannot obey order `seq`; `reason` says why (no save function, CUDA graphs alive, ...)."""

    seq: Count
    reason: Sentence


class Finished(Struct, frozen=True, tag="finished", omit_defaults=True):
    """Training reached its end. Said explicitly: exit code 0 alone is not success. Metrics as in `Progress`."""

    step: Step
    metrics: Metrics = {}
    diverged: tuple[Label, ...] = ()


class Stacks(Struct, frozen=True, tag="stacks"):
    """Answer to `probe`: where every thread stands."""

    seq: Count
    text: Sentence


class Ready(Struct, frozen=True, tag="ready"):
    """Answer to `hold`, from the helper thread at once: it will stand at the end of that step."""

    seq: Count
    step: Step  #: the last step it has completed


class Late(Struct, frozen=True, tag="late"):
    """Answer to `hold`: it has passed that step already and goes on; name a later one."""

    seq: Count
    step: Step


class Counted(Struct, frozen=True, tag="counted", omit_defaults=True):
    """A part of the answer to `sample`: the bytes of living tensors, each with its time, s of the monotonic clock.

    `made`: the bytes of all tensors made so far, at the same times; zeros where that is not known.
    """

    seq: Count
    at_s: Annotated[tuple[Seconds, ...], Meta(max_length=COUNTED_MAX)] = ()
    bytes: Annotated[tuple[Count, ...], Meta(max_length=COUNTED_MAX)] = ()
    made: Annotated[tuple[Count, ...], Meta(max_length=COUNTED_MAX)] = ()
    last: bool = False  #: no more are coming, unless it is asked again


FromWorker = Hello | Progress | Suspended | Resumed | Saved | Refused | Finished | Stacks | Ready | Late | Counted


class Order(Struct, frozen=True, tag="order", omit_defaults=True):
    """From the node agent.

    `suspend`: park at the next mini-batch boundary. `resume`. `leave`: at the next boundary save a checkpoint and exit
    75; `save`: at the next boundary save and go on. `probe`: answer `Stacks` from the helper thread at once. `tell`:
    answer `Progress` at once. `arena`: have a host arena of `bytes` faulted in and registered, from the helper thread.
    `cap`: let this process take at most `bytes` of each GPU's memory, 0 for no limit. `sample`: read the memory every
    10 ms or so for 20 s, or until the first step is told, and answer with lines of `Counted`. `trough`: wait for the
    next trough of the memory, for `TROUGH_S` at most, give back what the allocator keeps unused, and answer `Progress`;
    where steps are told this is the end of a mini-batch, and none is answered if it does not come in that time.

    The processes of one task stop at the same step in two phases, without a collective. `hold`: stand still at the end
    of step `at_step` until the next order; answered `Ready` or `Late`. Once all are ready, `suspend`, `leave` or `save`
    with the same `at_step` is done there; `resume` lets those that stand, or would, go on. With `at_step` -1 an order
    is obeyed at the next boundary.
    """

    do: Literal["suspend", "resume", "leave", "save", "probe", "tell", "arena", "cap", "hold", "sample", "trough"]
    gen: Count
    seq: Count
    at_step: Step = -1
    bytes: Count = 0


_decoder: msgspec.json.Decoder[FromWorker] = msgspec.json.Decoder(FromWorker)
_order_decoder: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
_encoder = msgspec.json.Encoder()


def decode_line(line: bytes) -> FromWorker:
    """Return the worker's message.

    Raises
    ------
    WireError
        For any other bytes.
    """
    if len(line) > LINE_BYTES_MAX:
        raise WireError(f"a line of {len(line)} bytes is longer than {LINE_BYTES_MAX}")
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a line of the worker contract: {error}") from error


def decode_order(line: bytes) -> Order:
    """Return the order in `line` (for tests of the worker side).

    Raises
    ------
    WireError
        For anything else.
    """
    try:
        return _order_decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not an order: {error}") from error


def encode_line(message: FromWorker | Order) -> bytes:
    """Return `message` as one line, newline included."""
    return _encoder.encode(message) + b"\n"
