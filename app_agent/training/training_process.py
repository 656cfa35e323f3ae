"""The training process as its script sees it: mini-batches, measurements, checkpoints, the end.

Standard library only, and nothing in this folder but `interpreter` and `spawned` reads the environment or installs a
hook: see `app_agent.session` for the functions that a script calls.
"""

from __future__ import annotations

import functools
import math
import sys
import time
import warnings
from collections.abc import Callable, Mapping

from . import boundary, checkpoints, figures, orders
from .agent_link import AgentLink
from .checkpoints import Root, Save
from .state import Identity, TrainingState
from .values import metric_fields, metric_value, whole_number

METRICS_MAX = 64
#: How long the end of the process waits for the last words to be written.
FLUSH_S = 2.0
#: How long it waits for an agent to come back when `finished` could not be put on the disk either.
FINISHED_S = 30.0


class TrainingProcess(TrainingState):
    """The training process of a script: the script's side, and the link to the node agent."""

    def __init__(self, socket_path: str, identity: Identity, roots: list[Root]) -> None:
        super().__init__(identity, roots)
        self.link = AgentLink(
            socket_path,
            greet=functools.partial(figures.hello, self),
            beat=functools.partial(figures.beat, self),
            obey=functools.partial(orders.take, self),
        )

    def cooperate(self, total_steps: int | None) -> None:
        """Note that the script knows of us: it will come to a boundary."""
        self.total_steps = self.total_steps if total_steps is None else total_steps
        self.can_park = True
        self.link.wake()

    def offer_checkpoints(self) -> None:
        """Note that the script can save: it may be told to leave."""
        self.can_checkpoint = True
        self.cooperate(None)

    def save_at_once(self, interrupt: Callable[[], object]) -> None:
        """Note that the script saves wherever it is: `interrupt` is called as soon as it is told to leave.

        It is called in the helper thread, or in the training thread at a boundary.
        """
        with self.changed:
            self.interrupt, self.can_checkpoint = interrupt, True
        self.link.wake()

    def left(self) -> None:
        """Say that the script has saved by itself all that it has done, and leaves now."""
        with self.changed:
            self.leaving, self.saved_step = True, self.step
            order = self.order
            if order is not None and order.do == "leave":
                line = {"type": "saved", "step": self.step, "dir": str(self.durable or ""), "leaving": True}
                self.reply(order, {**line, "seconds": 0.0})

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

    # --- mini-batches -----------------------------------------------------------------------------------------------

    def consume(self, samples: int) -> None:
        """Count the samples of a mini-batch."""
        self.samples += samples if samples.__class__ is int and samples >= 0 else whole_number("samples", samples)

    def begin_explicit(self) -> None:
        """Forget the optimizer hook's count: the script marks its mini-batches itself."""
        self.explicit = True
        self.step = self.start_step
        self.boundaries, self.training_s = 0, 0.0
        self.beats.clear()
        self.cooperate(None)

    def optimizer_stepped(self) -> None:
        """Count a boundary that the script did not mark, as `step_end` does."""
        now = time.perf_counter()
        self.training_s += now - self.mark
        self.mark = now
        self.boundaries += 1
        self.step += 1
        if now >= self.memory_due_s:
            self.read_memory()
        if not self.can_park:  # only now: many a program loads PyTorch and never trains
            self.cooperate(None)
        if self.due:
            self.obey(None, by_hook=True)

    def read_memory(self) -> None:
        """Read the memory counters at this boundary, as `memory_due_s` has come."""
        boundary.read_memory(self)

    def obey(self, save: Save | None, *, by_hook: bool) -> bool:
        """Obey the order for this boundary; return whether the process is to leave."""
        return boundary.obey(self, save, by_hook=by_hook)

    # --- measurements -----------------------------------------------------------------------------------------------

    def note(self, metrics: Mapping[str, float]) -> None:
        """Take `metrics` if the helper wants news: reading them may wait for a GPU, so most are let go unread."""
        if self.metrics_wanted:
            self.metrics_wanted = False
            self.report(metrics)

    def report(self, metrics: Mapping[str, float]) -> None:
        """Take `metrics` as they are now; one that is no finite number takes the place of one that was."""
        numbers = {str(name)[:128]: metric_value(name, value) for name, value in metrics.items()}
        begun = {name: value for name, value in numbers.items() if value is not None and self._has_begun(name, value)}
        known = {**self.metrics, **begun}
        self.metrics = dict(list(known.items())[-METRICS_MAX:])  # a new one: the helper may be reading the old

    def _has_begun(self, name: str, value: float) -> bool:
        """Whether `value` is a measurement: before the first number, NaN stands for none, as in a best so far."""
        return math.isfinite(value) or name in self.metrics

    # --- the end ----------------------------------------------------------------------------------------------------

    def finish(self, metrics: Mapping[str, float]) -> None:
        """Put it on the disk that training has reached its end, then say it."""
        self.report(metrics)
        with self.changed:
            self.finished = True
            self.order = None
        document = {
            "schema": "finished/v1",
            "task": self.task,
            "attempt": self.attempt,
            "step": self.step,
            **metric_fields(self.metrics),
        }
        try:
            if self.team[0] > 0:  # rank 0 speaks for all
                self.finish_recorded = True
            elif self.durable is not None:
                checkpoints.write_finished(self.roots[-1], document)
                self.finish_recorded = True
        except OSError as error:
            warnings.warn(f"gpu-arbiter: could not record the end of training in {self.durable}: {error}", stacklevel=3)
        figures.say_finished(self)

    def note_exit(self, status: object) -> None:
        """Remember the script's exit status."""
        self.exit_status = status

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
