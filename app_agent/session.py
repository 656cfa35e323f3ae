"""The library of a training script that shares GPUs: ``from app_agent import session``.

To be suspended and resumed a script needs no change: a plain PyTorch script runs as it is, and every
``optimizer.step()`` is a point where it can stand still. With a few lines it also leaves a GPU and goes on elsewhere::

    from app_agent import session

    session.init(total_steps=1000)
    start = session.restore(load)                  # load(folder) reads the checkpoint; 0 on a fresh start
    for step in range(start, 1000):
        ...
        if session.step_end(step, save=save):      # True: save(folder) has run, now leave
            sys.exit(session.EXIT_REQUEUE)
    session.done(accuracy=accuracy)

Under ``torchrun`` every training process does the same: all stop after the same mini-batch, each one's ``save(folder)``
is called with the same folder, and a checkpoint counts once all have written their share.

Run by hand, without a node agent, every call does nothing and costs nothing.

How it works: a helper thread holds a Unix socket to the node agent and leaves an order where the training thread looks
at the end of each mini-batch. The training thread obeys there and nowhere else. When no order is there, which is
nearly always, a step costs a look at the clock and two additions. Standard library only; PyTorch is touched only once
the script has loaded it.

`step` is the index of the mini-batch just completed, from 0; a checkpoint of step s holds s + 1 mini-batches.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

from .training import spawned
from .training.checkpoints import Root, Save
from .training.interpreter import is_helper, is_launcher, watch_exit, watch_launcher, watch_optimizers
from .training.state import Identity
from .training.training_process import TrainingProcess
from .training.values import whole_number

__all__ = [
    "EXIT_REQUEUE",
    "active",
    "checkpoint_dir",
    "done",
    "gpus",
    "init",
    "left",
    "report",
    "restore",
    "run",
    "samples",
    "save_at_once",
    "should_preempt",
    "step_end",
]

#: EX_TEMPFAIL: "I have saved; start me again".
EXIT_REQUEUE = 75

active: bool  #: whether a node agent started this process; answered by `__getattr__`
_session: TrainingProcess | None = None
_watching = False  #: whether this interpreter is watched: once, also if it is another training process later
_vacated = ""  #: the socket of a process that has left the training to others that it started


def init(total_steps: int | None = None) -> None:
    """Declare that this script cooperates, and how many mini-batches it will make, if that is known.

    Raises
    ------
    TypeError, ValueError
        If `total_steps` is not a number of mini-batches.
    """
    if total_steps is not None:
        total_steps = whole_number("total_steps", total_steps)
    _begin()
    if _session is not None:
        _session.cooperate(total_steps)


def restore(load: Callable[[str], object]) -> int:
    """Restore the newest complete checkpoint of this job, if there is one, and return how many mini-batches are done.

    That number is also the step to go on with: 0 on a fresh start. ``load(folder)`` reads the files that the save
    function wrote into `folder`; if it answers a number, that counts as the last completed step instead of the one on
    record.
    """
    _begin()
    return 0 if _session is None else _session.restore(load)


def samples() -> int:
    """Return how many samples have been consumed since the first attempt began, as told to `step_end`.

    After `restore` it says where in the data to go on, also when the number of GPUs or the batch has changed.
    """
    return 0 if _session is None else _session.samples


def step_end(
    step: int | None = None,
    save: Save | None = None,
    metrics: Mapping[str, float] | None = None,
    samples: int | None = None,
) -> bool:
    """Say that a mini-batch is complete; stand still here if ordered to.

    Parameters
    ----------
    step
        Index of the mini-batch, from 0; counted from the restored step on if left out.
    save
        ``save(folder)`` writes all state that training needs to go on. Called only when a checkpoint is wanted.
    metrics
        Measurements of the mini-batch, by name. Read a few times a second at most.
    samples
        Samples the mini-batch consumed, in all training processes together. Kept with each checkpoint.

    Returns
    -------
        True when a checkpoint was saved and the process is to leave with ``sys.exit(session.EXIT_REQUEUE)``.

    Raises
    ------
    TypeError, ValueError
        If `step` is not an index, or `samples` no count.
    """
    if step is not None and (step.__class__ is not int or step < 0):
        step = whole_number("step", step)
    session = _session or _resume_session()
    if session is None:
        return False
    if not session.explicit:
        session.begin_explicit()
    now = time.perf_counter()
    session.training_s += now - session.mark
    session.mark = now
    session.boundaries += 1
    if now >= session.memory_due_s:
        session.read_memory()
    if samples is not None:
        session.consume(samples)
    session.step = session.step + 1 if step is None else step
    if save is not None and not session.can_checkpoint:
        session.offer_checkpoints()
    if metrics is not None:
        session.note(metrics)
    if not session.due:
        return False
    return session.obey(save, by_hook=False)


def should_preempt() -> bool:
    """Return whether the next `step_end` with a save function will save and answer True."""
    order = None if _session is None else _session.order
    return order is not None and order.do == "leave"


def save_at_once(interrupt: Callable[[], object]) -> None:
    """Say that this script can save wherever it is, and have `interrupt` called as soon as it is told to leave.

    For programs without mini-batches. `interrupt` may be called in another thread, more than once, and must not wait.
    It has the main thread save, such as by a signal; then the main thread calls `left`, and leaves with
    ``sys.exit(session.EXIT_REQUEUE)``.
    """
    _begin()
    if _session is not None:
        _session.save_at_once(interrupt)


def left() -> None:
    """Say that this script has saved, by itself, all that it needs to go on, and leaves now; see `save_at_once`."""
    if _session is not None:
        _session.left()


def report(**metrics: float) -> None:
    """Report measurements, such as a validation accuracy; the newest value of each name is kept."""
    if _session is not None:
        _session.report(metrics)


def done(**metrics: float) -> None:
    """Say that training has reached its end, with final measurements.

    An exit with code 0 alone is not success: a process that is told to terminate often ends just so.
    """
    if _session is not None:
        _session.finish(metrics)


def gpus() -> int:
    """Return how many GPUs this process has; 1 when it was not told."""
    return int(os.environ.get("GPU_ARBITER_GPUS") or 1)


def checkpoint_dir() -> Path | None:
    """Return the folder of this job's checkpoints, the same in every attempt, or None without a node agent."""
    return None if _session is None else _session.durable


def run() -> str:
    """Return the id of the submission that this job belongs to; empty without a node agent."""
    return "" if _session is None or not _session.roots else _session.roots[-1].run


def __getattr__(name: str) -> bool:
    if name == "active":
        return _session is not None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# --- starting -------------------------------------------------------------------------------------------------------


def _begin() -> None:
    """Take the node agent's socket, if this process has been given one and has not taken it yet."""
    if _session is not None or is_helper(sys.orig_argv):
        return
    if is_launcher(sys.orig_argv):  # the processes that it starts do the training
        watch_launcher(EXIT_REQUEUE)
        return
    # Removed from the environment, so that no child of this process takes itself for the training process.
    path = os.environ.pop(spawned.SOCKET, "") or _vacated
    identity = _identity() if path and not spawned.living() else None
    if identity is not None:
        _train(path, identity)


def _train_as_rank(target: Callable[..., object], path: str, world: int, rank: int, *arguments: object) -> None:
    """Run `target` as one of `world` training processes that another has started, and say how it ended.

    `path` is the node agent's socket.
    """
    os.environ.pop(spawned.SOCKET, None)
    identity = _identity()
    if identity is not None:
        _train(path, Identity(identity.task, identity.attempt, rank, world, _team(rank, world)))
    try:
        target(rank, *arguments)
    except SystemExit as end:
        _note_exit(end.code)
        raise
    except BaseException:
        _note_exit(1)
        raise
    finally:
        _end()


def _train(path: str, identity: Identity) -> None:
    global _session, _watching, _vacated  # noqa: PLW0603 - a process is one training process
    _session, _vacated = TrainingProcess(path, identity, _roots()), ""
    if not _watching:
        _watching = True
        os.register_at_fork(after_in_child=_forget)
        atexit.register(_end)
        watch_exit(_note_exit)
        watch_optimizers(_after_optimizer_step)
        spawned.watch(_step_aside, _train_as_rank, EXIT_REQUEUE)
    _session.link.start()


def _step_aside() -> str:
    """Leave the training to processes that this one is about to start; return the socket for them.

    Empty if this process trains itself: it has come to a mini-batch, or is one of several.
    """
    global _session, _vacated
    session = _session
    if session is None:
        return "" if spawned.living() else _vacated
    if session.world > 1 or session.boundaries:
        return ""
    _session, _vacated = None, session.link.path
    session.link.close()
    watch_launcher(EXIT_REQUEUE)
    return _vacated


def _resume_session() -> TrainingProcess | None:
    """Be the training process again, if this one has stepped aside for others that are gone."""
    if _vacated:
        _begin()
    return _session


def _identity() -> Identity | None:
    """Return the identity of this process by its environment; None, with a warning, if that does not tell it."""
    task, attempt = os.environ.get("GPU_ARBITER_TASK", ""), os.environ.get("GPU_ARBITER_ATTEMPT", "")
    if not task or not attempt.isdecimal():
        warnings.warn("gpu-arbiter: GPU_ARBITER_TASK or GPU_ARBITER_ATTEMPT is missing; running alone", stacklevel=4)
        return None
    rank = os.environ.get("LOCAL_RANK", "0")
    world = (
        os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
    )  # torchrun's name, and DeepSpeed's
    if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        warnings.warn(
            f"gpu-arbiter: LOCAL_RANK {rank!r} is not below LOCAL_WORLD_SIZE {world!r}; running alone", stacklevel=4
        )
        return None
    return Identity(task, int(attempt), int(rank), int(world), _team(int(rank), int(world)))


def _team(rank: int, world: int) -> tuple[int, int]:
    """Return the rank among the processes on all nodes, and their number: by torchrun, else as many on each node."""
    told = [os.environ.get(name, "") for name in ("GPU_ARBITER_NODES", "GPU_ARBITER_NODE_RANK", "RANK", "WORLD_SIZE")]
    nodes, node_rank, global_rank, all_ranks = (int(word) if word.isdecimal() else -1 for word in told)
    if nodes <= 1:
        return rank, world
    if 0 <= global_rank < all_ranks:
        return global_rank, all_ranks
    return max(0, node_rank) * world + rank, nodes * world


def _roots() -> list[Root]:
    """Return the folders of checkpoints: in this node's memory, if the node agent offers it, and the durable one."""
    memory, durable = (os.environ.get(f"GPU_ARBITER_{name}_DIR", "") for name in ("MEMORY", "CHECKPOINT"))
    run = os.environ.get("GPU_ARBITER_RUN", "")
    roots = [Root(Path(memory), durable=False, run=run)] if memory and durable else []
    return [*roots, Root(Path(durable), run=run)] if durable else roots


def _forget() -> None:
    """In a forked child: it is not the training process."""
    global _session, _vacated  # noqa: PLW0603 - see `_train`
    _vacated = ""
    if _session is not None:
        _session.link.abandon()
        _session = None


def _note_exit(status: object) -> None:
    if _session is not None:
        _session.note_exit(status)


def _end() -> None:
    global _session
    session, _session = _session, None
    if session is not None:
        session.end()


def _after_optimizer_step(*_: object) -> None:
    session = _session or _resume_session()
    if session is not None and not session.explicit:
        session.optimizer_stepped()
