"""The reason of a failed task ends with the last lines of its log: a hint for the owner of the app alone.

All that tells of reasons to others cuts them here; what is kept for longer than the logs themselves never has them.
"""

from __future__ import annotations

#: Between the reason and the end of the log, which goes to the end of the text.
MARK = "; its log ends: "
#: What stands there for others.
INSTEAD = "; its owner can read more in its log"


def with_log_end(reason: str, log_end: str) -> str:
    """Return a reason with the end of the log after it, if there is one."""
    return f"{reason}{MARK}{log_end}" if log_end else reason


def without_log_end(text: str) -> str:
    """Return a text for others than the owner: all that stands behind the mark may be what the task has printed."""
    head, mark, _ = text.partition(MARK)
    if not mark:
        return text
    opened = head.count("(") > head.count(")")  # a story tells a reason in brackets
    return f"{head}{INSTEAD}{')' * opened}"
