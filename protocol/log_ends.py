"""What a task has said itself, in the reasons of what became of it: a hint for the owner of the app alone.

The reason of a failed task ends with the last lines of its log. The reason of one that could not save has the words
of the exception that its save function raised. All that tells of reasons to others cuts both here; what is kept for
longer than the logs themselves never has them.
"""

from __future__ import annotations

import re

#: Between the reason and the end of the log, which goes to the end of the text.
MARK = "; its log ends: "
#: What stands there for others.
INSTEAD = "; its owner can read more in its log"
#: The same of the words of an exception; more may follow them, which others are not told either.
SAID_MARK = "; its script says: "
SAID_INSTEAD = "; its owner is told why"
MARKS = {MARK: INSTEAD, SAID_MARK: SAID_INSTEAD}
#: How our library in a training process begins when a save function has raised (`app_agent.training.boundary`).
_SAVE_FAILED = re.compile(r"(the checkpoint of step -?\d+ failed): ")


def with_log_end(reason: str, log_end: str) -> str:
    """Return a reason with the end of the log after it, if there is one."""
    return f"{reason}{MARK}{log_end}" if log_end else reason


def with_script_words(reason: str) -> str:
    """Return the reason why a training process obeys no order, with a mark before the words of its script, if any.

    The mark is set where the word comes in, and not in our library: that of a user may be of an older release.
    """
    return _SAVE_FAILED.sub(rf"\1{SAID_MARK}", reason, count=1)


def without_log_end(text: str) -> str:
    """Return a text for others than the owner: all that stands behind a mark may be what the task itself has said."""
    found = [(text.find(mark), mark) for mark in MARKS if mark in text]
    if not found:
        return text
    at, mark = min(found)
    head = text[:at]
    opened = head.count("(") > head.count(")")  # a story tells a reason in brackets
    return f"{head}{MARKS[mark]}{')' * opened}"
