"""The pace of restatements: on a large site each member restates, and is restated to, less often.

Every `beat_s` the arbiter restates plans and holdings, so that what was lost is mended. Where more than
`restatements_per_s` would come of that, of nodes or of apps, one beat restates a part of them, the next beat the next
part. Nodes and apps are told how long a whole turn takes, and report no more often. A turn is never longer than a third
of the silence after which a member counts as lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import TypeVar
from zlib import crc32

from arbiter.core.state.model import ArbiterSettings, State

#: A member that is heard says so this often at least before it counts as silent.
BEATS_IN_SILENCE = 3

MemberId = TypeVar("MemberId", bound=str)


def is_due(state: State, now: float) -> bool:
    """Whether a beat is due now."""
    return now >= state.beat_at + state.settings.beat_s


def parts(settings: ArbiterSettings, members: int) -> int:
    """Return over how many beats the restatement of so many members is spread."""
    wanted = ceil(members / (settings.restatements_per_s * settings.beat_s))
    return max(1, min(wanted, int(longest_s(settings) / settings.beat_s)))


def longest_s(settings: ArbiterSettings) -> float:
    """Return the longest beat that any member is told, seconds."""
    return min(settings.node_timeout_s, settings.app_timeout_s) / BEATS_IN_SILENCE


def told_s(settings: ArbiterSettings, members: int) -> float:
    """Return the beat that each of so many members is told, seconds; 0: the one that it is configured to."""
    spread = parts(settings, members)
    return spread * settings.beat_s if spread > 1 else 0.0


def part(state: State, members: Iterable[MemberId], count: int) -> list[MemberId]:
    """Return those of `members` that the present beat restates; `count` of them matter to the pace.

    The part that a member is of follows from its id, so that no coming and going of others keeps it from its turn.
    """
    spread = parts(state.settings, count)
    return [member for member in members if crc32(member.encode()) % spread == state.beats % spread]
