"""The cost of an attempt: how long it has had its GPUs, and how much of that has to be done again if it ends now.

The time in which it is parked does not count, neither between two turns nor after its lease. Times are ages of its
process, which the node's kernel knows: so they are right after a restart of the node agent, even if its clock has been
set since. The record that the node agent writes down changes only when the task gets its GPUs, gives them up or saves,
and at its first mini-batch.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

#: The least time until a first mini-batch, seconds: 0 is none yet.
FIRST_MIN_S = 1e-3


class Cost(Struct, frozen=True):
    """Seconds that a task has had its GPUs: `before_s` until its process was `since_s` old, and all the time since.

    `since_s` is None while the task does not have them. Of its whole time, `saved_s` need not be done again. `first_s`
    is how much of it had passed when its first mini-batch was made; 0 before that.
    """

    before_s: float = 0.0
    since_s: float | None = 0.0
    saved_s: float = 0.0
    first_s: float = 0.0

    def ran_s(self, age_s: float) -> float:
        """Return how long the task has had its GPUs now that its process is `age_s` old."""
        return self.before_s + (0.0 if self.since_s is None else max(0.0, age_s - self.since_s))

    def unsaved_s(self, age_s: float) -> float:
        """Return how much of that has to be done again if the task ends now."""
        return max(0.0, self.ran_s(age_s) - self.saved_s)

    def turned(self, age_s: float, *, on: bool) -> Cost:
        """Return the cost of a task that has its GPUs from now on, or that has them no more."""
        if on == (self.since_s is not None):
            return self
        return replace(self, before_s=self.ran_s(age_s), since_s=age_s if on else None)

    def begun(self, age_s: float, since_first_s: float) -> Cost:
        """Return the cost of a task that made its first mini-batch so many seconds ago, if that was not known."""
        return self if self.first_s else replace(self, first_s=max(FIRST_MIN_S, self.ran_s(age_s) - since_first_s))

    def saved(self, age_s: float, behind_s: float = 0.0) -> Cost:
        """Return the cost of a task that has saved all but the work of the last `behind_s`."""
        return replace(self, saved_s=max(self.saved_s, self.ran_s(age_s) - behind_s))
