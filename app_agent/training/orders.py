"""Orders of the node agent arrive in the helper thread: answered at once, or left to the training thread.

`state` says how the two threads agree on the step for which an order is in time.
"""

from __future__ import annotations

import signal
import sys
import threading
import traceback

from . import figures, memory_cycle, parking
from .agent_link import Line
from .state import TEXT_CHARS_MAX, Order, TrainingState

#: Orders that the helper thread obeys without waiting for the training thread.
AT_ONCE = frozenset({"probe", "tell", "arena", "cap", "sample", "trough"})


def take(process: TrainingState, line: Line) -> None:
    """Take in one order; one that is older than the last is answered as before, or not at all."""
    order = Order(line["do"], line["gen"], line["seq"], line["at_step"], line["bytes"])
    with process.changed:
        if order.do in AT_ONCE and order.gen >= process.accepted[0]:
            process.accepted = max(process.accepted, order.key)
            _answer_at_once(process, order)
        elif order.key > process.accepted:
            process.accepted = order.key
            _accept(process, order)
            process.changed.notify_all()
        elif order.key in process.answers:
            process.link.say(process.answers[order.key])  # the first answer was lost


def _answer_at_once(process: TrainingState, order: Order) -> None:
    """Obey an order that needs no boundary; it may be done twice, and takes no other order's place."""
    if order.do == "probe":
        process.link.say({"type": "stacks", "seq": order.seq, "text": _stacks()})
    elif order.do == "arena":
        threading.Thread(target=_prepare, args=(process, order), name="gpu-arbiter-arena", daemon=True).start()
    elif order.do == "sample":
        memory_cycle.sample(process, order)
    elif order.do == "trough":
        memory_cycle.trough(process, lambda: process.link.say({**figures.progress(process), "seq": order.seq}))
    else:
        if order.do == "cap":
            process.cap = order.bytes
            figures.enforce_cap(process)
        process.link.say({**figures.progress(process), "seq": order.seq})


def _prepare(process: TrainingState, order: Order) -> None:
    """Make the arena in a thread of its own: it may take seconds, and the helper thread must not be silent."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        parking.prepare(order.bytes, process.devices[0] if process.devices else None)
    except parking.ParkRefused as refusal:
        process.link.say({"type": "refused", "seq": order.seq, "reason": str(refusal)[:TEXT_CHARS_MAX]})
    else:
        process.link.say({**figures.progress(process), "seq": order.seq})


def _accept(process: TrainingState, order: Order) -> None:
    """Answer at once if that is possible, and leave the rest to the training thread."""
    if process.leaving or process.finished:
        if process.finished:
            figures.say_finished(process)  # ahead of a refusal, which alone would lead to harsher means
        process.reply(order, {"type": "refused", "reason": "training has ended; the process is about to exit"})
    elif order.do == "resume":
        _leave_to_training(process, order if process.stopped else None)
        if not process.stopped:
            process.reply(order, {"type": "resumed", "step": process.step, "seconds": 0.0})
    elif order.do == "suspend" and process.stopped:
        process.order = order
        process.reply(order, process.suspended_answer)
    elif reason := _why_not(process, order):
        process.reply(order, {"type": "refused", "reason": reason})
    else:
        _accept_at(process, order)


def _accept_at(process: TrainingState, order: Order) -> None:
    """Leave `order` to the training thread unless the boundary it is for is past (see `state`)."""
    here = process.held or process.stopped  # the training thread stands, and has looked at `order` all the same
    _leave_to_training(process, order)
    step = process.step
    late = 0 <= order.at_step < step or (order.at_step == step >= 0 and not here)
    if late:
        _leave_to_training(process, None)
    if order.do == "hold":
        process.reply(order, {"type": "late" if late else "ready", "step": step})
    elif order.do == "leave" and process.interrupt is not None:
        if not process.parked:  # else as soon as the memory is back: see `boundary`
            process.interrupt()
    elif late:
        reason = f"step {order.at_step} is over, {step} was the last; name a later one"
        process.reply(order, {"type": "refused", "reason": reason})


def _leave_to_training(process: TrainingState, order: Order | None) -> None:
    process.order = order
    process.due = process.awaited


def _why_not(process: TrainingState, order: Order) -> str:
    """Return why `order` can never be obeyed as things are; empty if it can."""
    if order.do not in ("suspend", "hold", "leave", "save"):
        return f"this version of the library knows no order {order.do!r}"
    if order.do in ("leave", "save") and not process.can_checkpoint:
        return "the script gives no save function: call session.step_end(step, save=...) after each mini-batch"
    if process.interrupt is not None and order.do == "save":
        return "the script saves only as it leaves"
    if process.stopped and order.do == "save":
        return "suspended; resume it first, or order it to leave"
    if process.stopped and order.do == "hold":
        return "suspended; resume it first"
    return ""


def _stacks() -> str:
    """Return where every thread stands, the main thread first."""
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    order = sorted(frames, key=lambda ident: ident != main)
    parts = [f"{names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frames[ident])) for ident in order]
    return "\n".join(parts)[:TEXT_CHARS_MAX]
