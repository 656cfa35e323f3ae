"""The forms in which people write a utility: the worth of a job by the time at which it ends."""

from __future__ import annotations

import math

from protocol.messages import Utility

#: Seconds of a unit of time, by its letter.
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
#: A preset falls from 99 % to 1 % of its worth within so many times 1 / theta2: 2 ln 99.
_FALL = 2.0 * math.log(99.0)
#: A job with a hard deadline is worth 99 % at the deadline and 1 % when it is late by this part of it.
HARD = 0.1
#: The greatest number that may be written.
NUMBER_MAX = 1e9
FORMS = (
    "write sigmoid:THETA1,THETA2,THETA3 such as sigmoid:50,2/h,6h (worth 50, halved at 6 h), deadline:6h, soft:6h, "
    "or none; what it is worth may follow a time after a comma, such as deadline:6h,50, or none after a colon: none:50"
)


def parse(text: str) -> Utility:
    """Return the utility that is written as `FORMS` says.

    `deadline` falls from 99 % at the deadline to 1 % when it is a tenth later; `soft` from 99 % at once over one half
    at the time given to 1 % at twice that; `none` is worth the same whenever it ends.

    Raises
    ------
    ValueError
        With one sentence, for anything else.
    """
    kind, _, rest = text.strip().partition(":")
    words = [word.strip() for word in rest.split(",")] if rest.strip() else []
    match kind:
        case "sigmoid" if len(words) == 3:
            return Utility(_some(_number(words[0]), words[0]), _per_second(words[1]), _seconds(words[2]))
        case "deadline" if len(words) in (1, 2):
            due_s = _some(_seconds(words[0]), words[0])
            return Utility(_worth(words[1:]), _FALL / (HARD * due_s), due_s * (1.0 + HARD / 2.0))
        case "soft" if len(words) in (1, 2):
            due_s = _some(_seconds(words[0]), words[0])
            return Utility(_worth(words[1:]), _FALL / (2.0 * due_s), due_s)
        case "none" if len(words) <= 1:
            # theta2 = 0 halves the worth at any time, so the declared worth is doubled.
            return Utility(2.0 * _worth(words), 0.0, 0.0)
        case _:
            raise ValueError(f"{text!r} is no utility")


def _worth(words: list[str]) -> float:
    return _some(_number(words[0]), words[0]) if words else 0.0


def _some(value: float, word: str) -> float:
    if value <= 0.0:
        raise ValueError(f"{word!r} in a utility must be more than 0")
    return value


def _number(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= NUMBER_MAX:
        raise ValueError(f"{word!r} in a utility is no number from 0 to {NUMBER_MAX:.0f}")
    return value


def _seconds(word: str) -> float:
    """Return a time with its unit: a bare 6 would be seconds elsewhere, and hours to a user who writes a deadline."""
    scale = UNITS.get(word[-1:], 0.0)
    if scale:
        return _number(word[:-1]) * scale
    if _number(word) > 0.0:
        raise ValueError(f"{word!r} in a utility has no unit of time; write {word}h, or {word}m")
    return 0.0


def _per_second(word: str) -> float:
    number, slash, unit = word.partition("/")
    value = _number(number)
    if unit not in UNITS and (slash or value > 0.0):
        raise ValueError(f"{word!r} in a utility has no unit of time after a slash; write 2/h, or 0.001/s")
    return value / UNITS[unit or "s"]
