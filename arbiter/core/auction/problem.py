"""The auction's input as one frozen value: the GPUs in play and what each bidder would make of them.

All values are *gains*: log V relative to gaining nothing, that is log(rho_none / rho). V = 1 / rho, and products of V
become sums. Scaling all rho of an app by a constant changes nothing, so T_id and N_avg cancel out of the auction.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from msgspec import Struct

from arbiter.core.chance import draw
from arbiter.core.placement import LOOSENESS, group, locality
from arbiter.core.policy import AppView, GpuView, View
from protocol.messages import AppId, Bid, GpuId, Level

#: A rho is clipped to these before its logarithm is taken; the wire allows 0 to 1e15.
RHO_MIN, RHO_MAX = 1e-15, 1e15
#: Gains are rounded to this many digits, so that equal tables are equal and their bidders are known as identical.
GAIN_DIGITS = 12
#: Two sums of gains closer than this are equal.
TOLERANCE = 1e-9


class Row(Struct, frozen=True):
    """With `new` GPUs more, the union with the kept ones within `level`, the bidder gains `gain` (log V)."""

    new: int
    level: Level
    gain: float


class Bidder(Struct, frozen=True):
    """One app's valuation. `rows` are its useful rows: at most one per count and level, each a gain above 0."""

    app: AppId
    gang: int
    kept: tuple[GpuView, ...]
    held: frozenset[GpuId]  #: GPUs in play that it holds now: their renewal is no restart
    only: frozenset[GpuId] | None
    rho_none: float
    rows: tuple[Row, ...]

    def gain(self, gpus: Sequence[GpuView]) -> float:
        """Return the greatest gain among the rows that these new GPUs satisfy, 0 for none."""
        if not gpus:
            return 0.0
        counts = usable_counts(self.kept, gpus, self.gang)
        spread = LOOSENESS[locality((*self.kept, *gpus))]
        gains = (row.gain for row in self.rows if row.new in counts and LOOSENESS[row.level] >= spread)
        return max(gains, default=0.0)

    def rho(self, gpus: Sequence[GpuView]) -> float:
        """Return rho, as bid, with these GPUs more."""
        return self.rho_none * math.exp(-self.gain(gpus))


class Problem(Struct, frozen=True):
    """One auction. `work` bounds the search, in steps (`solve.Search`): a core knows no clock."""

    seed: int
    gpus: tuple[GpuView, ...]
    bidders: tuple[Bidder, ...]
    work: int


def usable_counts(kept: Sequence[GpuView], new: Sequence[GpuView], gang: int) -> Collection[int]:
    """Return how many of `new` an app can use: sums, over the machines, of what makes whole gangs with `kept`."""
    if gang == 1:
        return range(len(new) + 1)
    held = {node: len(gpus) for node, gpus in group(kept, lambda gpu: gpu.node).items()}
    counts = {0}
    for node, gpus in group(new, lambda gpu: gpu.node).items():
        first = -held.get(node, 0) % gang or gang
        counts |= {before + take for before in counts for take in range(first, len(gpus) + 1, gang)}
    return counts


def whole_gangs(kept: Sequence[GpuView], new: Sequence[GpuView], gang: int) -> bool:
    """Say whether on each machine with new GPUs the kept and new ones are whole gangs."""
    if gang == 1:
        return True
    held = {node: len(gpus) for node, gpus in group(kept, lambda gpu: gpu.node).items()}
    won = group(new, lambda gpu: gpu.node)
    return all((held.get(node, 0) + len(gpus)) % gang == 0 for node, gpus in won.items())


def build(view: View, bids: Mapping[AppId, Bid], *, work: int) -> Problem:
    """Return the auction among the apps of `view` that bid; bids of others and rows beyond the offer are ignored.

    The order of the bidders decides ties: incumbents first, as their renewal is no restart, then by lot.
    """
    gpus = tuple(sorted(view.gpus, key=lambda gpu: gpu.gpu))
    entered = [app for app in view.apps if app.app in bids]
    ordered = _by_lot(view.seed, entered)
    return Problem(view.seed, gpus, tuple(_bidder(app, bids[app.app], gpus) for app in ordered), work)


def _by_lot(seed: int, apps: Sequence[AppView]) -> list[AppView]:
    return sorted(apps, key=lambda app: (not app.renewable, draw(seed, "tie", app.app), app.app))


def _bidder(app: AppView, bid: Bid, gpus: Sequence[GpuView]) -> Bidder:
    named = [only for only in (app.only, bid.only) if only is not None]
    usable = frozenset.intersection(*map(frozenset, named)) if named else None
    room = len(gpus) if usable is None else sum(gpu.gpu in usable for gpu in gpus)
    return Bidder(
        app=app.app,
        gang=app.gang,
        kept=app.kept,
        held=frozenset(app.renewable),
        only=usable,
        rho_none=_clipped(bid.rho_none),
        rows=_rows(bid, kept=len(app.kept), most=min(room, app.want)),
    )


def _rows(bid: Bid, *, kept: int, most: int) -> tuple[Row, ...]:
    """Return the best row per count and level with a gain; the rest can only lose."""
    if not math.isfinite(bid.rho_none):
        return ()
    base = math.log(_clipped(bid.rho_none))
    best: dict[tuple[int, Level], float] = {}
    for row in bid.rows:
        new = row.gpus - kept
        if not 0 < new <= most or not math.isfinite(row.rho):
            continue
        gain = round(base - math.log(_clipped(row.rho)), GAIN_DIGITS)
        if gain > best.get((new, row.level), 0.0):
            best[new, row.level] = gain
    return tuple(Row(new, level, best[new, level]) for new, level in sorted(best))


def _clipped(rho: float) -> float:
    return min(max(rho, RHO_MIN), RHO_MAX) if math.isfinite(rho) else RHO_MAX
