"""The training process as its node agent sees it: where it stands, what it was ordered, what it answers.

Standard library only, and nothing here reads the environment or installs a hook: see `app_agent.session` for what a
script calls and `app_agent.training.interpreter` for where this process is watched.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import checkpoints, parking, process_memory
from .agent_link import BEAT_S, AgentLink, Line
from .checkpoints import Root, Team

PROTO = 1
HEARTBEAT_S = 5.0
#: `step_s` is a mean over so many beats in which steps were made, five seconds of a quick loop.
BEATS_OF_STEP_TIME = 20
METRICS_MAX = 64
TEXT_CHARS_MAX = 8000
#: How long the end of the process waits for the last words to be written.
FLUSH_S = 2.0
#: How long it waits for an agent to come back when `finished` could not be put on the disk either.
FINISHED_S = 30.0

#: Orders that the helper thread obeys, whatever the training thread does.
AT_ONCE = frozenset({"probe", "tell", "arena", "cap"})
#: Of so many orders the answers are kept, to be given again.
ANSWERS_KEPT = 16
#: The first mini-batch may still make state, such as an optimizer's moments.
BOUNDARIES_BEFORE_SURVEY = 2

Save = Callable[[str], object]


class Order:
    """One order of the node agent. With `at_step` -1 it is for the next boundary."""

    __slots__ = ("at_step", "bytes", "do", "gen", "seq")

    def __init__(self, do: str, gen: int, seq: int, at_step: int = -1, size: int = 0) -> None:
        self.do, self.gen, self.seq, self.at_step, self.bytes = do, gen, seq, at_step, size

    @property
    def key(self) -> tuple[int, int]:
        """What orders are compared by."""
        return self.gen, self.seq


class Identity:
    """Who this process is: `rank` of `world` training processes that attempt `attempt` of the job has on this node."""

    __slots__ = ("attempt", "rank", "task", "world")

    def __init__(self, task: str, attempt: int, rank: int = 0, world: int = 1) -> None:
        self.task, self.attempt, self.rank, self.world = task, attempt, rank, world


class TrainingProcess:
    """The training process as its node agent sees it.

    The training thread writes the counters and obeys `order`; the helper thread reads the counters and sets `order`.
    Everything but the counters changes under `_changed`, which the training thread takes only when something is `due`.

    To stop after the same mini-batch, the processes of one task are first told to `hold` at a step ahead. The helper
    thread answers at once and must be right: it sets `order` and `due`, then reads `step`. The training thread writes
    `step`, then reads `due`. So a step that is not over when the helper looks will find the order; of one that is over,
    `late` is said, and the order is taken back before the training thread, which may have seen it, gets the lock.
    """

    def __init__(self, socket_path: str, identity: Identity, roots: list[Root]) -> None:
        self.task, self.attempt = identity.task, identity.attempt
        self.rank, self.world = identity.rank, identity.world
        self.roots = roots
        self.durable: Path | None = roots[-1].path if roots else None
        self.home = os.getpid()
        # The counters: written at each boundary.
        self.step = self.start_step = self.saved_step = -1
        self.boundaries = self.samples = 0
        self.training_s = 0.0
        self.mark = time.perf_counter()
        self.explicit = False
        self.order: Order | None = None
        self.due = False  #: whether the training thread is to look closer at its next boundary
        # What the script can do, and where it stands.
        self.total_steps = 0
        self.can_park = self.can_checkpoint = False
        self.stopped = self.held = self.leaving = self.finished = self.finish_recorded = False
        self.exit_status: object = None
        self.metrics: dict[str, float] = {}
        self._metrics_wanted = True
        # Memory, in bytes.
        self._survey_wanted = self._surveyed = False
        self._devices: tuple[int, ...] = ()
        self._state_bytes = self._trough_bytes = self._peak_bytes = 0
        self._cap: int | None = None  #: what is still to be put in force
        # Orders and answers.
        self._changed = threading.Condition()
        self._accepted = self._obeyed = (0, 0)
        self._answers: dict[tuple[int, int], Line] = {}  #: the last ones
        self._standing: Line = {}  #: the answer to every order to suspend while suspended
        # What was said last.
        self._samples_of_time: deque[tuple[int, float]] = deque(maxlen=BEATS_OF_STEP_TIME)
        self._told: Line = {}
        self._told_at = -math.inf
        self.link = AgentLink(socket_path, greet=self._hello, beat=self._beat, obey=self._take)

    # --- the script's side -----------------------------------------------------------------------------------------

    def cooperate(self, total_steps: int | None) -> None:
        """The script knows of us: it will come to a boundary."""
        self.total_steps = self.total_steps if total_steps is None else total_steps
        self.can_park = True
        self.link.wake()

    def offer_checkpoints(self) -> None:
        """The script can save: it may be told to leave."""
        self.can_checkpoint = True
        self.cooperate(None)

    def restore(self, load: Callable[[str], object]) -> int:
        """Load the newest checkpoint; return the step to go on with."""
        self.offer_checkpoints()
        found = checkpoints.newest(self.roots, self.attempt)
        if found is None:
            return 0
        loaded = load(str(found.path))
        step = found.step if loaded is None or isinstance(loaded, bool) else whole_number("load's answer", loaded)
        self.step = self.start_step = step
        self.samples = found.samples
        self.link.wake()
        return step + 1

    def consume(self, samples: int) -> None:
        """Count the samples of a mini-batch."""
        self.samples += samples if samples.__class__ is int and samples >= 0 else whole_number("samples", samples)

    def begin_explicit(self) -> None:
        """The script marks its mini-batches itself: what the optimizer hook has counted so far is void."""
        self.explicit = True
        self.step = self.start_step
        self.boundaries, self.training_s = 0, 0.0
        self._samples_of_time.clear()
        self.cooperate(None)

    def optimizer_stepped(self) -> None:
        """A boundary that the script did not mark; the same counting as in `step_end`."""
        now = time.perf_counter()
        self.training_s += now - self.mark
        self.mark = now
        self.boundaries += 1
        self.step += 1
        if not self.can_park:  # only now: many a program loads PyTorch and never trains
            self.cooperate(None)
        if self.due:
            self.obey(None, by_hook=True)

    def note(self, metrics: Mapping[str, float]) -> None:
        """Take `metrics` if the helper wants news: reading them may wait for a GPU, so most are let go unread."""
        if self._metrics_wanted:
            self._metrics_wanted = False
            self.report(metrics)

    def _has_begun(self, name: str, value: float) -> bool:
        """Whether this is a value: what is no number before there was one stands for none, as in a best so far."""
        return math.isfinite(value) or name in self.metrics

    def report(self, metrics: Mapping[str, float]) -> None:
        """Take `metrics` as they are now; one that is no finite number takes the place of one that was."""
        numbers = {str(name)[:128]: _number(name, value) for name, value in metrics.items()}
        begun = {name: value for name, value in numbers.items() if value is not None and self._has_begun(name, value)}
        known = {**self.metrics, **begun}
        self.metrics = dict(list(known.items())[-METRICS_MAX:])  # a new one: the helper may be reading the old

    def finish(self, metrics: Mapping[str, float]) -> None:
        """Training has reached its end: put that on the disk, then say it."""
        self.report(metrics)
        with self._changed:
            self.finished = True
            self.order = None
        document = {
            "schema": "finished/v1",
            "task": self.task,
            "attempt": self.attempt,
            "step": self.step,
            **_told(self.metrics),
        }
        try:
            if self.rank > 0:  # rank 0 speaks for all
                self.finish_recorded = True
            elif self.durable is not None:
                checkpoints.write_finished(self.roots[-1], document)
                self.finish_recorded = True
        except OSError as error:
            warnings.warn(f"gpu-arbiter: could not record the end of training in {self.durable}: {error}", stacklevel=3)
        self._say_finished()

    def _say_finished(self) -> None:
        self.link.say({"type": "finished", "step": self.step, **_told(self.metrics)})

    # --- orders, in the training thread ----------------------------------------------------------------------------

    def obey(self, save: Save | None, *, by_hook: bool) -> bool:
        """Do what is ordered for this boundary; return whether the process is to leave."""
        if self._survey_wanted:
            self._survey()
        while not self.leaving:
            order = self.order
            if order is None or self.step < order.at_step:
                break
            if by_hook and _inside_backward():
                self._refuse(
                    order, "the optimizer steps inside backward; call session.step_end() after each mini-batch"
                )
            elif order.do == "hold":
                self._hold(order)
            elif order.do == "suspend":
                self._suspend(order)
            elif save is not None:
                self._save(order, save)
            else:
                break  # a later boundary brings the save function
        with self._changed:
            self.due = self.order is not None or self._survey_wanted
        self.mark = time.perf_counter()  # standing still is no training time
        return self.leaving

    def _survey(self) -> None:
        """Look once how much there is to park, so that room can be made for it while training goes on."""
        self._survey_wanted = False
        try:
            state = parking.survey()
        except parking.ParkRefused:
            return  # an order to suspend will be answered with the reason
        self._devices, self._state_bytes = state.devices, state.bytes
        self._trough_bytes = process_memory.allocated_bytes(state.devices)[0] if state.devices else state.bytes
        process_memory.forget_peak(state.devices)

    def _hold(self, order: Order) -> None:
        """Stand at this boundary until there is another order."""
        with self._changed:
            self.held = True
            try:
                while self.order is order:
                    self._changed.wait()
            finally:
                self.held = False

    def _suspend(self, order: Order) -> None:
        begun = time.perf_counter()
        try:
            parked = parking.park()
        except parking.ParkRefused as refusal:
            self._refuse(order, str(refusal))
            return
        with self._changed:
            if self.order is order:  # and no younger order has come meanwhile
                self.stopped = True
                self._standing = {
                    "type": "suspended",
                    "step": self.step,
                    "bytes": parked.bytes,
                    "residue_bytes": parked.residue_bytes,
                    "seconds": time.perf_counter() - begun,
                }
                self._reply(order, self._standing)
            self._state_bytes = max(self._state_bytes, parked.bytes)
        try:
            while not self._unpark(parked, self._stand()):
                pass
        except BaseException:  # the script's own signal handler ends the process, and may want to save
            parked.restore()
            raise

    def _stand(self) -> Order | None:
        """Wait for an order to do anything else than standing still."""
        with self._changed:
            while self.stopped and self.order is not None and self.order.do == "suspend":
                self._changed.wait()
            self.stopped = False
            return self.order

    def _unpark(self, parked: parking.Parked, order: Order | None) -> bool:
        """Bring the state back to obey `order`; return False, and stand still again, if there is no memory for it."""
        begun = time.perf_counter()
        try:
            parked.restore()
        except parking.ParkRefused as refusal:
            if order is None:
                raise
            with self._changed:
                self._refuse(order, str(refusal))
                self.order, self.stopped = Order("suspend", order.gen, order.seq), True
            return False
        if order is not None and order.do == "resume":
            self._settle(order, {"type": "resumed", "step": self.step, "seconds": time.perf_counter() - begun})
        return True

    def _save(self, order: Order, save: Save) -> None:
        begun = time.perf_counter()
        try:
            path = self._write(order, save)
        except Exception as error:  # noqa: BLE001 - the script's own function failed: this order fails, training goes on
            self._refuse(order, f"the checkpoint of step {self.step} failed: {type(error).__name__}: {error}")
            return
        with self._changed:
            self.saved_step = self.step
            if self.order is not order:  # a younger order has come meanwhile
                return
            self.leaving = order.do == "leave"
            self.order = order if self.leaving else None  # leaving, each further step is told to leave again
            line = {"type": "saved", "step": self.step, "dir": str(path), "leaving": self.leaving}
            self._reply(order, {**line, "seconds": time.perf_counter() - begun})

    def _write(self, order: Order, save: Save) -> Path:
        """Write a checkpoint: to go on, in a durable place; to leave, in memory if that is offered."""
        if not self.roots:
            raise ValueError("GPU_ARBITER_CHECKPOINT_DIR is not set")
        roots = self.roots if order.do == "leave" else self.roots[-1:]
        facts = {"total_steps": self.total_steps, "samples": self.samples, "world": self.world}
        team = Team(self.rank, self.world, f"g{order.gen}-q{order.seq}")
        return checkpoints.write(roots, self.attempt, self.step, facts, save, team)

    def _refuse(self, order: Order, reason: str) -> None:
        self._settle(order, {"type": "refused", "reason": reason[:TEXT_CHARS_MAX]})

    def _settle(self, order: Order, line: Line) -> None:
        """Answer `order` and be done with it, unless a younger one has taken its place."""
        with self._changed:
            if self.order is order:
                self.order = None
                self._reply(order, line)

    def _reply(self, order: Order, line: Line) -> None:
        self._obeyed = order.key
        line = {**line, "seq": order.seq}
        self._answers[order.key] = line
        if len(self._answers) > ANSWERS_KEPT:
            del self._answers[next(iter(self._answers))]
        self.link.say(line)

    # --- orders, in the helper thread ------------------------------------------------------------------------------

    def _take(self, line: Line) -> None:
        order = Order(line["do"], line["gen"], line["seq"], line["at_step"], line["bytes"])
        with self._changed:
            if order.do in AT_ONCE and order.gen >= self._accepted[0]:
                self._accepted = max(self._accepted, order.key)
                self._answer_at_once(order)
            elif order.key > self._accepted:
                self._accepted = order.key
                self._accept(order)
                self._changed.notify_all()
            elif order.key in self._answers:
                self.link.say(self._answers[order.key])  # the first answer was lost

    def _answer_at_once(self, order: Order) -> None:
        """Obey what needs no boundary; it may be done twice, and takes no other order's place."""
        if order.do == "probe":
            self.link.say({"type": "stacks", "seq": order.seq, "text": _stacks()})
        elif order.do == "arena":
            threading.Thread(target=self._prepare, args=(order,), name="gpu-arbiter-arena", daemon=True).start()
        else:
            if order.do == "cap":
                self._cap = order.bytes
                self._enforce_cap()
            self.link.say({**self._news(), "seq": order.seq})

    def _prepare(self, order: Order) -> None:
        """Make the arena in a thread of its own: it may take seconds, and the helper thread must not be silent."""
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            parking.prepare(order.bytes, self._devices[0] if self._devices else None)
        except parking.ParkRefused as refusal:
            self.link.say({"type": "refused", "seq": order.seq, "reason": str(refusal)[:TEXT_CHARS_MAX]})
        else:
            self.link.say({**self._news(), "seq": order.seq})

    def _accept(self, order: Order) -> None:
        """Answer at once what can be, and leave the rest to the training thread."""
        if self.leaving or self.finished:
            if self.finished:
                self._say_finished()  # ahead of a refusal, which alone would lead to harsher means
            self._reply(order, {"type": "refused", "reason": "training has ended; the process is about to exit"})
        elif order.do == "resume":
            self._leave_to_training(order if self.stopped else None)
            if not self.stopped:
                self._reply(order, {"type": "resumed", "step": self.step, "seconds": 0.0})
        elif order.do == "suspend" and self.stopped:
            self.order = order
            self._reply(order, self._standing)
        elif reason := self._why_not(order):
            self._reply(order, {"type": "refused", "reason": reason})
        else:
            self._accept_at(order)

    def _accept_at(self, order: Order) -> None:
        """Leave `order` to the training thread unless the boundary it is for is past; see the class on who may look."""
        here = self.held or self.stopped  # the training thread stands, and has looked at `order` all the same
        self._leave_to_training(order)
        step = self.step
        late = 0 <= order.at_step < step or (order.at_step == step >= 0 and not here)
        if late:
            self._leave_to_training(None)
        if order.do == "hold":
            self._reply(order, {"type": "late" if late else "ready", "step": step})
        elif late:
            reason = f"step {order.at_step} is over, {step} was the last; name a later one"
            self._reply(order, {"type": "refused", "reason": reason})

    def _leave_to_training(self, order: Order | None) -> None:
        self.order = order
        self.due = order is not None or self._survey_wanted

    def _why_not(self, order: Order) -> str:
        """Return why `order` can never be obeyed as things are; empty if it can."""
        if order.do not in ("suspend", "hold", "leave", "save"):
            return f"this version of the library knows no order {order.do!r}"
        if order.do in ("leave", "save") and not self.can_checkpoint:
            return "the script gives no save function: call session.step_end(step, save=...) after each mini-batch"
        if self.stopped and order.do == "save":
            return "suspended; resume it first, or order it to leave"
        if self.stopped and order.do == "hold":
            return "suspended; resume it first"
        return ""

    # --- what the helper thread says -------------------------------------------------------------------------------

    def _hello(self) -> Line:
        with self._changed:
            gen, seq = self._accepted[0], self._obeyed[1] if self._obeyed[0] == self._accepted[0] else 0
            self._told = {}
            if self.finished:
                self._say_finished()  # after this hello, with the final metrics
            return {
                "type": "hello",
                "proto": PROTO,
                "task": self.task,
                "pid": self.home,
                "state": "suspended" if self.stopped else "held" if self.held else "running",
                "gen": gen,
                "seq": seq,
                "finished": self.finished,
                "rank": self.rank,
                "world": self.world,
                **self._facts(),
            }

    def _facts(self) -> Line:
        return {
            "step": self.step,
            "start_step": self.start_step,
            "total_steps": self.total_steps,
            "can_park": self.can_park,
            "can_checkpoint": self.can_checkpoint,
            "saved_step": self.saved_step,
            "state_bytes": self._state_bytes,
        }

    def _figures(self) -> Line:
        return {
            **_told(self.metrics),
            "samples": self.samples,
            "arena_bytes": parking.ready_bytes(),
            "peak_bytes": self._peak_bytes,
            "trough_bytes": self._trough_bytes,
        }

    def _news(self) -> Line:
        return {"type": "progress", **self._facts(), **self._figures(), "step_s": self._step_s()}

    def _beat(self) -> Line | None:
        """Look at the memory; return what has changed, at most every `BEAT_S` unless it is what the script can do.

        When nothing has changed for long, return a heartbeat.
        """
        now = time.monotonic()
        self._metrics_wanted = True
        self._watch_memory()
        line = {**self._facts(), **self._figures()}
        capable = self._told.get("can_park"), self._told.get("can_checkpoint"), self._told.get("start_step")
        urgent = capable != (line["can_park"], line["can_checkpoint"], line["start_step"])
        quiet_s = HEARTBEAT_S if line == self._told else 0.9 * BEAT_S
        if not urgent and now - self._told_at < quiet_s:
            return None
        self._told, self._told_at = line, now
        return {"type": "progress", **line, "step_s": self._step_s()}

    def _watch_memory(self) -> None:
        if not self._surveyed and self.boundaries >= BOUNDARIES_BEFORE_SURVEY and "torch" in sys.modules:
            self._surveyed = True
            with self._changed:
                self._survey_wanted = self.due = True
        if self._cap is not None:
            self._enforce_cap()
        with contextlib.suppress(Exception):  # a figure is not worth the thread
            used = process_memory.allocated_bytes(self._devices)[1] if self._devices else 0
            self._peak_bytes = max(self._peak_bytes, used or process_memory.anonymous_bytes())

    def _enforce_cap(self) -> None:
        """Put the cap in force once it is known which GPUs this process uses; without CUDA there is nothing to cap."""
        if self._cap is not None and self._devices:
            limit, self._cap = self._cap, None
            with contextlib.suppress(Exception):  # as above: the node agent sees whether it is kept to
                process_memory.cap(limit, self._devices)

    def _step_s(self) -> float:
        """Mean seconds per mini-batch over the last beats in which there were any; 0 while unknown.

        The first mini-batch never counts: it holds the start-up.
        """
        samples, sample = self._samples_of_time, (self.boundaries, self.training_s)
        with self._changed:  # the thread that makes the arena asks too
            if sample[0] > (samples[-1][0] if samples else 0):
                samples.append(sample)
        if len(samples) < 2:
            return 0.0
        (steps, begun_s), (steps_now, now_s) = samples[0], samples[-1]
        return max(0.0, now_s - begun_s) / (steps_now - steps)

    def note_exit(self, status: object) -> None:
        """Remember what the script exits with."""
        self.exit_status = status

    # --- the end ---------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """At the end of the interpreter: say `finished` if that is what this is, and see the last words off."""
        if not self.finished and self._ended_normally():
            self.finish({})
        if self.finished and not self.finish_recorded:
            self.link.flush(FINISHED_S)
        elif self.link.connected:
            self.link.flush(FLUSH_S)
        self.link.close()

    def _ended_normally(self) -> bool:
        """Whether nothing speaks against success: an exception, an exit code, an order to leave, steps not made.

        ``raise SystemExit(3)`` without `sys.exit` cannot be seen from here; the node agent, which asks for exit code
        0 as well, sees it.
        """
        crashed = getattr(sys, "last_value", None) is not None or self.exit_status not in (None, 0)
        told_to_leave = self.leaving or (self.order is not None and self.order.do == "leave")
        return not crashed and not told_to_leave and self.step + 1 >= self.total_steps


def whole_number(name: str, value: object) -> int:
    """Return `value` as an index or a count; raises TypeError or ValueError with a sentence that names it."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]  # an int, a NumPy integer or a tensor of one
    except TypeError:
        raise TypeError(f"{name} is {value!r}; give a whole number") from None
    if number < 0:
        raise ValueError(f"{name} is {number}; give 0 or more")
    return number


def _number(name: object, value: Any) -> float | None:
    """Return `value` as a number, finite or not, or None: no measurement is worth a crash."""
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with more than one element
        warnings.warn(f"gpu-arbiter: metric {name!s} is {type(value).__name__}; report single numbers", stacklevel=4)
        return None


def _told(metrics: Mapping[str, float]) -> Line:
    """Return how `metrics` are told: those that are finite, and the names of the others if there are any."""
    diverged = [name for name, value in metrics.items() if not math.isfinite(value)]
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return {"metrics": finite, "diverged": diverged} if diverged else {"metrics": finite}


def _inside_backward() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch._C._current_graph_task_id() != -1


def _stacks() -> str:
    """Where every thread stands, the main thread first."""
    frames = sys._current_frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    order = sorted(frames, key=lambda ident: ident != main)
    parts = [f"{names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frames[ident])) for ident in order]
    return "\n".join(parts)[:TEXT_CHARS_MAX]
