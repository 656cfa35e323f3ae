"""What the truthfulness experiment measures, as one document."""

from __future__ import annotations

from msgspec import Struct

from benchmarks.truth.one_shot import CaseGain, RandomGain
from benchmarks.truth.spread import Estimate


class Cell(Struct, frozen=True):
    """A lie of the grid over many rounds; the gain is the share of its time that the liar is done sooner."""

    case: str
    rule: str
    by: float
    honest_s: float
    liar_s: float
    gain: Estimate
    gain_at_once: Estimate  #: with intervals that hold for all cells of the rule together
    unproven: float  #: share of the auctions that were not proven within the budget


class Gate(Struct, frozen=True):
    """Whether lying paid under a rule: the worst cell in one auction, the mean over many rounds, the cells that pay."""

    rule: str
    one_auction: float
    many_rounds: Estimate
    paying: list[str]
    passed: bool


class LeftoverLie(Struct, frozen=True):
    """What one lie gained over many rounds."""

    kind: str
    by: float
    gain: Estimate


class LeftoverCell(Struct, frozen=True):
    """One way to treat leftovers: what it costs when all tell the truth, and what lies gain.

    `fairness_knob` is f: the share of apps that do not bid. Times and rho are means over runs of the mean and the
    greatest over apps; `withheld` is the share of GPU time that nobody had though an app would have used it.
    """

    world: str
    fairness_knob: float
    leftover: str
    took_s: float
    took_s_max: float
    rho_mean: float
    rho_max: float
    withheld: float
    lies: list[LeftoverLie]


class Report(Struct, frozen=True):
    """Everything measured, schema ``truthfulness/v1``."""

    schema: str
    date: str
    machine: str
    command: str
    cpu_s: float
    seeds: int
    grid: list[CaseGain]
    others: list[CaseGain]
    rounds: list[Cell]
    gates: list[Gate]
    random: list[RandomGain]
    leftovers: list[LeftoverCell]
    passed: bool
