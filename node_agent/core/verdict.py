"""The verdict on a worker that has ended.

Exit code 0 is not success: a framework hit by SIGTERM in mid-training may well return 0. Finished means that the worker
said so *and* left with 0; 75 after an order to leave means preempted; a worker that we signalled to make it leave was
preempted, with any code; every other end is a failure, told in one sentence.
"""

from __future__ import annotations

import signal as signals

from msgspec import Struct

from node_agent.core.events import WorkerGone
from node_agent.core.model import Facts, Stopping, Suspending, Task, Vacating
from protocol.messages import Outcome
from protocol.worker import EXIT_REQUEUE

#: A status travels every beat: it holds a log's tail as a hint, the log itself has the rest.
TAIL_CHARS_MAX = 2000


class Verdict(Struct, frozen=True):
    """`exit_code` as a shell would give it: 128 + n for signal n; `log_end` is for the owner of the app only."""

    outcome: Outcome
    reason: str
    exit_code: int | None
    log_end: str = ""


def judge(task: Task, gone: WorkerGone) -> Verdict:
    """Return how `task` ended, given how its process did."""
    code = _shell_code(gone)
    facts = task.facts
    finished = facts.finished or gone.finished is not None
    if finished and gone.exit_code == 0 and (not facts.signalled or _complete(facts)):
        return Verdict("finished", "", 0)
    match task.state:
        case Stopping(outcome=outcome, reason=reason):
            return Verdict(outcome, reason, code)
        case Vacating(reason=reason) if facts.signalled and reason:
            return Verdict("preempted", f"{reason}; {lost_work(facts)}", code)
        case _:
            return _unasked(task, gone)


def _unasked(task: Task, gone: WorkerGone) -> Verdict:
    """Judge a worker that left by itself, in its own way."""
    code, facts = gone.exit_code, task.facts
    if code is None and gone.signal is None:
        # Its supervisor or the node went down: the script is not to blame.
        return Verdict("preempted", f"{gone.reason or 'ended unseen'}; {lost_work(facts)}", None)
    if left(facts, gone):
        return Verdict("preempted", f"{_saved(facts)}left as it was told", code)
    if code == 0 and not facts.hello and not isinstance(task.state, Vacating | Suspending):
        # The person at a terminal knows what came of it.
        unconfirmed = "" if _has_terminal(task) else "exited 0; never used the library, so its success is unconfirmed"
        return Verdict("finished", unconfirmed, code)
    if code == 0:
        early = "exited early: code 0, but it never said that it had finished"
        return Verdict("failed", early, code, _log_end(gone))
    return Verdict("failed", _how(gone), _shell_code(gone), _log_end(gone))


def _has_terminal(task: Task) -> bool:
    return task.facts.quiet_s is not None or (task.launch is not None and task.launch.terminal is not None)


def left(facts: Facts, gone: WorkerGone) -> bool:
    """Say whether a worker saved all it had done and left, as it was told."""
    return facts.told_to_leave and (gone.exit_code == EXIT_REQUEUE or (gone.exit_code == 0 and facts.left))


def _complete(facts: Facts) -> bool:
    """Say whether all declared steps were made: a script that we sent SIGTERM may call a cut-off end a finish."""
    return facts.total_steps > 0 and facts.step + 1 >= facts.total_steps


def _saved(facts: Facts) -> str:
    """Say which step a worker that left has saved: a new attempt may not have said its step yet."""
    if facts.saved_step >= 0:
        return f"saved at step {facts.saved_step} and "
    return "saved and " if facts.left else ""


def lost_work(facts: Facts) -> str:
    """Say which work of a worker that is killed now is lost."""
    if facts.saved_step >= 0:
        return f"work since the checkpoint of step {facts.saved_step} is lost"
    return "work since the last checkpoint is lost"


def _how(gone: WorkerGone) -> str:
    if gone.reason:
        return gone.reason
    if gone.signal is not None:
        try:
            name = signals.Signals(gone.signal).name
        except ValueError:
            name = f"signal {gone.signal}"
        return f"was killed by {name}, which this system did not send"
    return f"exited with code {gone.exit_code}"


def _log_end(gone: WorkerGone) -> str:
    return gone.tail.strip()[-TAIL_CHARS_MAX:]


def _shell_code(gone: WorkerGone) -> int | None:
    return gone.exit_code if gone.signal is None else 128 + gone.signal
