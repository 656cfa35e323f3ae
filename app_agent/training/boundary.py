"""Orders are obeyed at the end of a mini-batch, in the training thread."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

from . import checkpoints, communicators, parking, process_memory
from .agent_link import BEAT_S
from .checkpoints import Save, Team
from .communicators import Communicators
from .state import Order, TrainingState

#: The memory counters are read once for each beat of the helper thread, which tells the newest reading only; the peak
#: is counted by the allocator. Where that would take more than this share of the time, they are read less often, but
#: no slow reading stops them for longer than so many seconds.
READING_SHARE, READING_GAP_S_MAX = 1 / 20_000, 5.0
#: From the word that the memory is at a trough to the lock of the driver there is a line to the node agent, and one to
#: the driver's helper. The lock stops the GPU and not this thread, which goes on after so long and then waits for it.
STAND_S = 1.0


def read_memory(process: TrainingState) -> None:
    """Note how much memory this process has at the boundary, and at the peak of the mini-batches before it."""
    begun = time.perf_counter()
    with contextlib.suppress(Exception):  # a figure is not worth the training
        process.note_memory(process_memory.reading(process.devices))
    spent = time.perf_counter() - begun
    process.memory_due_s = begun + min(READING_GAP_S_MAX, max(BEAT_S, spent / READING_SHARE))


def obey(process: TrainingState, save: Save | None, *, by_hook: bool) -> bool:
    """Obey the order for this boundary; return whether the process is to leave."""
    if process.survey_wanted:
        _survey(process)
    if process.cache_unwanted:
        process.cache_unwanted = False
        _give_back_unused(process)
    if process.trough is not None:
        _stand_at_trough(process, *process.trough)
    while not process.leaving:
        order = process.order
        if order is None or process.step < order.at_step:
            break
        if by_hook and _inside_backward():
            process.refuse(order, "the optimizer steps inside backward; call session.step_end() after each mini-batch")
        elif order.do == "hold":
            _hold(process, order)
        elif order.do == "suspend":
            _suspend(process, order)
        elif save is not None:
            _save(process, order, save)
        else:
            if order.do == "leave" and process.interrupt is not None:
                process.interrupt()
            break  # a later boundary brings the save function
    with process.changed:
        process.due = process.awaited
    process.mark = time.perf_counter()  # standing still is no training time
    return process.leaving


def _give_back_unused(process: TrainingState) -> None:
    with contextlib.suppress(Exception):  # as in the capture of a CUDA graph: training is worth more
        process_memory.give_back_unused()
    read_memory(process)


def _stand_at_trough(process: TrainingState, say_so: Callable[[], None], until_s: float) -> None:
    """Stand here, where the activations are gone, until the driver has stopped what the GPU does, or for a moment."""
    wanted = time.monotonic() < until_s
    if wanted:
        _give_back_unused(process)
    with process.changed:
        process.trough = None
        if wanted:
            say_so()
            process.changed.wait_for(lambda: process.order is not None, STAND_S)


def _survey(process: TrainingState) -> None:
    """Look once how much there is to park, so that room can be made for it while training goes on."""
    process.survey_wanted = False
    with contextlib.suppress(parking.ParkRefused):  # an order to suspend will be answered with the reason
        state = parking.survey()
        process.devices, process.state_bytes = state.devices, state.bytes
        process.nccl_bytes = communicators.held_bytes()
    process_memory.forget_peak(process.devices)
    process.peak_bytes = 0  # what it was before says nothing of a mini-batch
    process.memory_due_s = 0.0  # at the next boundary, when one has been counted


def _hold(process: TrainingState, order: Order) -> None:
    """Stand at this boundary until there is another order."""
    with process.changed:
        process.held = True
        try:
            while process.order is order:
                process.changed.wait()
        finally:
            process.held = False


def _suspend(process: TrainingState, order: Order) -> None:
    begun = time.perf_counter()
    process.parked = True
    try:
        _park_and_stand(process, order, begun)
    finally:
        process.parked = False


def _park_and_stand(process: TrainingState, order: Order, begun: float) -> None:
    team = communicators.found(process.rank, process.world, order.name)
    try:
        parked = parking.park(team.suspend)
    except parking.ParkRefused as refusal:
        team.decline()
        process.refuse(order, str(refusal))
        return
    with process.changed:
        if process.order is order:  # and no younger order has come meanwhile
            process.stopped = True
            process.suspended_answer = {
                "type": "suspended",
                "step": process.step,
                "bytes": parked.bytes,
                "residue_bytes": parked.residue_bytes + team.kept_bytes(),
                "seconds": time.perf_counter() - begun,
            }
            process.reply(order, process.suspended_answer)
        process.state_bytes = max(process.state_bytes, parked.bytes)
    try:
        while not _unpark(process, parked, team, _stand(process)):
            pass
    except BaseException:  # the script's own signal handler ends the process, and may want to save
        parked.restore()  # and without the communicators: other ranks may not be here to resume theirs
        raise


def _stand(process: TrainingState) -> Order | None:
    """Wait for an order to do anything else than standing still."""
    with process.changed:
        while process.stopped and process.order is not None and process.order.do == "suspend":
            process.changed.wait()
        process.stopped = False
        return process.order


def _unpark(process: TrainingState, parked: parking.Parked, team: Communicators, order: Order | None) -> bool:
    """Bring the state back to obey `order`; return False, and stand still again, if there is no memory for it."""
    begun = time.perf_counter()
    try:
        team.resume()
        parked.restore()
    except (parking.ParkRefused, communicators.NotResumed) as refusal:
        if order is None:
            raise
        with process.changed:
            process.refuse(order, str(refusal))
            process.order, process.stopped = Order("suspend", order.gen, order.seq), True
        return False
    if order is not None and order.do == "resume":
        process.settle(order, {"type": "resumed", "step": process.step, "seconds": time.perf_counter() - begun})
    return True


def _save(process: TrainingState, order: Order, save: Save) -> None:
    begun = time.perf_counter()
    try:
        path = _write(process, order, save)
    except Exception as error:  # noqa: BLE001 - the script's own function failed: this order fails, training goes on
        # `protocol.log_ends` knows the words of the script by the beginning of this sentence.
        process.refuse(order, f"the checkpoint of step {process.step} failed: {type(error).__name__}: {error}")
        return
    with process.changed:
        process.saved_step = process.step
        if process.order is not order:  # a younger order has come meanwhile
            return
        process.leaving = order.do == "leave"
        process.order = order if process.leaving else None  # leaving, each further step is told to leave again
        line = {"type": "saved", "step": process.step, "dir": str(path), "leaving": process.leaving}
        process.reply(order, {**line, "seconds": time.perf_counter() - begun})


def _write(process: TrainingState, order: Order, save: Save) -> Path:
    """Write a checkpoint: to go on, in a durable place; to leave, in memory if that is offered."""
    if not process.roots:
        raise ValueError("GPU_ARBITER_CHECKPOINT_DIR is not set")
    roots = process.roots if order.do == "leave" else process.roots[-1:]
    rank, world = process.team
    facts = {"total_steps": process.total_steps, "samples": process.samples, "world": world}
    # Each node agent numbers its own orders; on several nodes only the step is the same in all.
    apart = world != process.world
    team = Team(rank, world, "nodes" if apart else order.name, apart=apart)
    return checkpoints.write(roots, process.attempt, process.step, facts, save, team)


def _inside_backward() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch._C._current_graph_task_id() != -1
