"""The meaning of the exit codes of `gpu-arbiter`: a contract with scripts, written down in docs/cli.md.

`run` and `wait` return the app's own exit code instead (128 + n when signal n ended it).
"""

from __future__ import annotations

DONE = 0
FAILED = 1  #: the command was tried and failed, or an app failed without a code of its own
USAGE = 2  #: the command line or a file it names is wrong
NOT_FOUND = 3  #: no such app, task or node
REFUSED = 4  #: refused by policy, or can never fit
TIMED_OUT = 5  #: `--timeout` passed first
UNREACHABLE = 6  #: no daemon, arbiter or broker answers; of `submit` with an id: it is queued all the same
NOT_PERMITTED = 7
CHANGED = 8  #: the state that the command was based on has changed underneath
WOULD_WAIT = 10  #: of a dry run: the app would not start in the next round
PREEMPTED = 75  #: EX_TEMPFAIL: the app ended preempted and will not be started again
INTERRUPTED = 130  #: 128 + SIGINT

#: For docs and tests: every code and its meaning.
MEANING: dict[int, str] = {
    DONE: "done",
    FAILED: "failed",
    USAGE: "wrong usage",
    NOT_FOUND: "no such thing",
    REFUSED: "refused by policy, or can never fit",
    TIMED_OUT: "timed out waiting",
    UNREACHABLE: "daemon, arbiter or broker unreachable",
    NOT_PERMITTED: "not permitted",
    CHANGED: "changed underneath",
    WOULD_WAIT: "would wait",
    PREEMPTED: "ended preempted and will not resume",
    INTERRUPTED: "interrupted",
}
