"""The training process as its node agent sees it: where it stands, what it was ordered, what it answers.

Standard library only, and nothing here reads the environment or installs a hook: see `app_agent.session` for what a
script calls and `app_agent.interpreter` for where this process is watched.
"""

from __future__ import annotations

import math
import operator
import os
import sys
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import checkpoints
from .agent_link import BEAT_S, AgentLink, Line

if TYPE_CHECKING:
    from . import parking

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

Save = Callable[[str], object]


class Order:
    """One order of the node agent."""

    __slots__ = ("do", "gen", "seq")

    def __init__(self, do: str, gen: int, seq: int) -> None:
        self.do, self.gen, self.seq = do, gen, seq

    @property
    def key(self) -> tuple[int, int]:
        """What orders are compared by."""
        return self.gen, self.seq


class TrainingProcess:
    """The training process as its node agent sees it.

    The training thread writes the counters and obeys `order`; the helper thread reads the counters and sets `order`.
    Everything but the counters changes under `_changed`, which the training thread takes only when there is an order.
    """

    def __init__(self, socket_path: str, task: str, attempt: int, root: Path | None) -> None:
        self.task, self.attempt, self.root = task, attempt, root
        self.home = os.getpid()
        # The counters: written at each boundary.
        self.step = self.start_step = self.saved_step = -1
        self.boundaries = 0
        self.training_s = 0.0
        self.mark = time.perf_counter()
        self.explicit = False
        self.order: Order | None = None
        # What the script can do, and where it stands.
        self.total_steps = 0
        self.can_park = self.can_checkpoint = False
        self.stopped = self.leaving = self.finished = self.finish_recorded = False
        self.exit_status: object = None
        self.metrics: dict[str, float] = {}
        self._metrics_wanted = True
        # Orders and answers.
        self._changed = threading.Condition()
        self._accepted = self._obeyed = (0, 0)
        self._answer: Line = {}
        self._standing: Line = {}  #: the answer to every order to suspend while suspended
        # What was said last.
        self._samples: deque[tuple[int, float]] = deque(maxlen=BEATS_OF_STEP_TIME)
        self._told: Line = {}
        self._told_at = -math.inf
        self.link = AgentLink(socket_path, greet=self._hello, beat=self._progress, obey=self._take)

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
        found = None if self.root is None else checkpoints.newest(self.root, self.attempt)
        if found is None:
            return 0
        loaded = load(str(found.path))
        step = found.step if loaded is None or isinstance(loaded, bool) else whole_number("load's answer", loaded)
        self.step = self.start_step = step
        self.link.wake()
        return step + 1

    def begin_explicit(self) -> None:
        """The script marks its mini-batches itself: what the optimizer hook has counted so far is void."""
        self.explicit = True
        self.step = self.start_step
        self.boundaries, self.training_s = 0, 0.0
        self._samples.clear()
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
        if self.order is not None:
            self.obey(None, by_hook=True)

    def note(self, metrics: Mapping[str, float]) -> None:
        """Take `metrics` if the helper wants news: reading them may wait for a GPU, so most are let go unread."""
        if self._metrics_wanted:
            self._metrics_wanted = False
            self.report(metrics)

    def report(self, metrics: Mapping[str, float]) -> None:
        """Take `metrics` as they are now."""
        numbers = {str(name)[:128]: _number(name, value) for name, value in metrics.items()}
        known = {**self.metrics, **{name: value for name, value in numbers.items() if value is not None}}
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
            "metrics": self.metrics,
        }
        try:
            if self.root is not None:
                checkpoints.write_finished(self.root, document)
                self.finish_recorded = True
        except OSError as error:
            warnings.warn(f"gpu-arbiter: could not record the end of training in {self.root}: {error}", stacklevel=3)
        self._say_finished()

    def _say_finished(self) -> None:
        self.link.say({"type": "finished", "step": self.step, "metrics": self.metrics})

    # --- orders, in the training thread ----------------------------------------------------------------------------

    def obey(self, save: Save | None, *, by_hook: bool) -> bool:
        """Do what is ordered; return whether the process is to leave."""
        while not self.leaving:
            order = self.order
            if order is None:
                break
            if by_hook and _inside_backward():
                self._refuse(
                    order, "the optimizer steps inside backward; call session.step_end() after each mini-batch"
                )
            elif order.do == "suspend":
                self._suspend(order)
            elif save is not None:
                self._save(order, save)
            else:
                break  # a later boundary brings the save function
        self.mark = time.perf_counter()  # standing still is no training time
        return self.leaving

    def _suspend(self, order: Order) -> None:
        from . import parking

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
        from . import parking

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
            if self.root is None:
                raise ValueError("GPU_ARBITER_CHECKPOINT_DIR is not set")  # noqa: TRY301 - one fate for all that fails
            path = checkpoints.write(self.root, self.attempt, self.step, self.total_steps, save)
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
        self._answer = {**line, "seq": order.seq}
        self.link.say(self._answer)

    # --- orders, in the helper thread ------------------------------------------------------------------------------

    def _take(self, line: Line) -> None:
        order = Order(line["do"], line["gen"], line["seq"])
        with self._changed:
            if order.key > self._accepted:
                self._accepted = order.key
                self._accept(order)
                self._changed.notify_all()
            elif order.key == self._obeyed:
                self.link.say(self._answer)  # the first answer was lost

    def _accept(self, order: Order) -> None:
        """Answer at once what needs no boundary, and leave the rest to the training thread."""
        if order.do == "probe":
            self._reply(order, {"type": "stacks", "text": _stacks()})
        elif self.leaving or self.finished:
            if self.finished:
                self._say_finished()  # ahead of a refusal, which alone would lead to harsher means
            self._reply(order, {"type": "refused", "reason": "training has ended; the process is about to exit"})
        elif order.do == "suspend":
            self.order = order
            if self.stopped:
                self._reply(order, self._standing)
        elif order.do == "resume":
            self.order = order if self.stopped else None
            if not self.stopped:
                self._reply(order, {"type": "resumed", "step": self.step, "seconds": 0.0})
        else:
            self._accept_checkpoint(order)

    def _accept_checkpoint(self, order: Order) -> None:
        if order.do not in ("leave", "save"):
            self._reply(
                order, {"type": "refused", "reason": f"this version of the library knows no order {order.do!r}"}
            )
        elif not self.can_checkpoint:
            reason = "the script gives no save function: call session.step_end(step, save=...) after each mini-batch"
            self._reply(order, {"type": "refused", "reason": reason})
        elif self.stopped and order.do == "save":
            self._reply(order, {"type": "refused", "reason": "suspended; resume it first, or order it to leave"})
        else:
            self.order = order

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
                "state": "suspended" if self.stopped else "running",
                "gen": gen,
                "seq": seq,
                "finished": self.finished,
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
        }

    def _progress(self) -> Line | None:
        """Return what has changed, at most every `BEAT_S` unless it is what the script can do; else a heartbeat."""
        now = time.monotonic()
        self._metrics_wanted = True
        line = {"type": "progress", **self._facts(), "metrics": self.metrics}
        capable = self._told.get("can_park"), self._told.get("can_checkpoint"), self._told.get("start_step")
        urgent = capable != (line["can_park"], line["can_checkpoint"], line["start_step"])
        quiet_s = HEARTBEAT_S if line == self._told else 0.9 * BEAT_S
        if not urgent and now - self._told_at < quiet_s:
            return None
        self._told, self._told_at = line, now
        return {**line, "step_s": self._step_s()}

    def _step_s(self) -> float:
        """Mean seconds per mini-batch over the last beats in which there were any; 0 while unknown.

        The first mini-batch never counts: it holds the start-up.
        """
        samples, sample = self._samples, (self.boundaries, self.training_s)
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
    """Return `value` as a finite number, or None: no measurement is worth a crash."""
    try:
        number = float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor with more than one element
        warnings.warn(f"gpu-arbiter: metric {name!s} is {type(value).__name__}; report single numbers", stacklevel=4)
        return None
    return number if math.isfinite(number) else None


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
