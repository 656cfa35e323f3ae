"""What a winner keeps of its bundle under each way to make a fraction c whole.

Every rule answers with a lot: the parts that may be kept, each with its chance. The arbiter's own is not written again
here: its lot is read off `arbiter.core.policies.themis.auction.rounding.keep` itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import NamedTuple

from arbiter.core.policies.themis.auction.problem import Map
from arbiter.core.policies.themis.auction.rounding import Counts, Worth, keep, prefixes

#: (chance, part) of everything that may be kept; the chances add up to 1.
Lot = list[tuple[float, Counts]]
#: Counts of GPUs closer than this are equal, so that 8 * 0.875 is 7.
EPS = 1e-9
#: Halvings of the interval of lots in search of the production rule's chance.
HALVINGS = 48
JUST_BELOW_ONE = 1.0 - 2.0**-53


class Bundle(NamedTuple):
    """What one bidder won, what it said its parts are worth, and its fraction c."""

    worth: Worth
    won: Counts
    log_c: float
    places: Map


def production(bundle: Bundle) -> Lot:
    """What the arbiter does: of two neighbours, so that the expected speed is the one at which V is c V."""

    def kept(lot: float) -> Counts:
        return keep(bundle.worth, bundle.won, bundle.log_c, bundle.places, lot=lot)

    above, below = kept(0.0), kept(JUST_BELOW_ONE)
    if above == below:
        return [(1.0, above)]
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if kept(middle) == above else (low, middle)
    return [(low, above), (1.0 - low, below)]


def mix_by_value(bundle: Bundle) -> Lot:
    """Of two neighbours, whichever the lot says, so that the value bid is c V in expectation."""
    parts = prefixes(bundle.worth, bundle.won, bundle.places)
    gains = list(accumulate(bundle.worth.gains(parts, bundle.places), max))
    values = [math.exp(gain) for gain in gains]
    target = math.exp(gains[-1] + bundle.log_c)
    above = next((index for index, value in enumerate(values) if value > target + EPS), len(values) - 1)
    below = values.index(values[max(0, above - 1)])
    span = values[above] - values[below]
    chance = min(1.0, max(0.0, (target - values[below]) / span)) if span > 0.0 else 1.0
    return [(chance, parts[above]), (1.0 - chance, parts[below])]


def floor(bundle: Bundle) -> Lot:
    """The count of GPUs rounded down, to whole gangs."""
    return [(1.0, _neighbours(bundle)[0])]


def ceil(bundle: Bundle) -> Lot:
    """The count of GPUs rounded up, to whole gangs."""
    return [(1.0, _neighbours(bundle)[1])]


def nearest(bundle: Bundle) -> Lot:
    """The count of GPUs rounded to the nearest whole gangs, up in the middle."""
    below, above, chance = _neighbours(bundle)
    return [(1.0, above if chance >= 0.5 - EPS else below)]


def stochastic_count(bundle: Bundle) -> Lot:
    """The count of GPUs rounded up or down by lot, so that it is c times what was won in expectation."""
    below, above, chance = _neighbours(bundle)
    return [(chance, above), (1.0 - chance, below)]


def all_or_nothing_by_value(bundle: Bundle) -> Lot:
    """All or nothing, so that the value bid is c V in expectation."""
    parts = prefixes(bundle.worth, bundle.won, bundle.places)
    gains = list(accumulate(bundle.worth.gains(parts, bundle.places), max))
    nothing = math.exp(gains[0] - gains[-1])
    chance = 1.0 if nothing >= 1.0 - EPS else (math.exp(bundle.log_c) - nothing) / (1.0 - nothing)
    return [(max(0.0, chance), parts[-1]), (1.0 - max(0.0, chance), parts[0])]


def all_or_nothing_by_c(bundle: Bundle) -> Lot:
    """All with chance c, else nothing."""
    chance = math.exp(bundle.log_c)
    return [(chance, dict(bundle.won)), (1.0 - chance, {})]


def no_payment(bundle: Bundle) -> Lot:
    """All that was won."""
    return [(1.0, dict(bundle.won))]


def _neighbours(bundle: Bundle) -> tuple[Counts, Counts, float]:
    """Return the parts next to c times the count from below and above, and how far it lies between them, 0 to 1."""
    parts = prefixes(bundle.worth, bundle.won, bundle.places)
    sizes = [sum(part.values()) for part in parts]
    target = sizes[-1] * math.exp(bundle.log_c)
    below = max(index for index, size in enumerate(sizes) if size <= target + EPS)
    above = min(index for index, size in enumerate(sizes) if size >= target - EPS)
    span = sizes[above] - sizes[below]
    return parts[below], parts[above], (target - sizes[below]) / span if span > 0 else 1.0


PRODUCTION = "production"
RULES: Mapping[str, Callable[[Bundle], Lot]] = {
    PRODUCTION: production,
    "mix by value": mix_by_value,
    "floor": floor,
    "nearest": nearest,
    "ceil": ceil,
    "stochastic count": stochastic_count,
    "all or nothing by value": all_or_nothing_by_value,
    "all or nothing by c": all_or_nothing_by_c,
    "no payment": no_payment,
}
#: Not a rule but what the rules approach: a bidder gets c V, as if GPUs could be cut.
IDEAL = "ideal c V"
