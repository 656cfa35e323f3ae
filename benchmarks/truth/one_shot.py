"""The gain of a lie in one auction, exactly: the expectation over lots and ties, not a sample of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from msgspec import Struct

from arbiter.core.policies.themis.auction import payments
from arbiter.core.policies.themis.auction.instance import Bidding, Entry, Instance, enter
from arbiter.core.policies.themis.auction.problem import Map
from arbiter.core.policies.themis.auction.rounding import Counts, machine_of
from arbiter.core.policies.themis.auction.solve import Budget, solve
from benchmarks.truth.rules import IDEAL, RULES, Bundle
from benchmarks.truth.setting import LIAR, LIES, Case, apps_of, auction_of, best_log_value, lying

#: Enough to prove every optimum of one auction here; one that is not proven stops the experiment.
AMPLE_MS = 60_000.0
#: A gain that is more than arithmetic, relative.
PROFIT = 1e-3


class Outcome(NamedTuple):
    """One auction solved: per bidder, GPUs won by place, and log c."""

    instance: Instance
    entry: Entry
    won: tuple[Counts, ...]
    log_c: tuple[float, ...]
    gap: float  #: the worst of its problems

    def bundle(self, bidder: int) -> Bundle:
        """Return what a rounding rule has to know of a bidder."""
        return Bundle(self.entry.worths[bidder], self.won[bidder], self.log_c[bidder], self.entry.places)


def hold(instance: Instance, budget_ms: float | None = None) -> Outcome:
    """Solve an auction: to proven optima, or as far as a budget goes."""
    entry = enter(instance)
    solved = solve(entry.problem, Budget.of(AMPLE_MS if budget_ms is None else budget_ms))
    assert budget_ms is not None or not solved.open(), "an auction of this experiment was not proven"
    log_c = tuple(payments.log_fraction(solved, bidder) for bidder in range(len(instance.apps)))
    return Outcome(instance, entry, payments.bundles(solved), log_c, solved.worst_gap)


def by_machine(places: Map, counts: Counts) -> dict[str, int]:
    """Return GPUs by the name of their machine."""
    named: dict[str, int] = {}
    for place, count in counts.items():
        name = places.machines[machine_of(place, places) - places.first_machine].id
        named[name] = named.get(name, 0) + count
    return named


def expected_value(outcome: Outcome, bidder: int, true: Bidding, rule: str) -> float:
    """Return what `true` may expect: the mean of its true V (no logarithm) over what the rule may leave it."""
    places, won = outcome.entry.places, outcome.won[bidder]
    if rule == IDEAL or not won:
        return math.exp(outcome.log_c[bidder] + best_log_value(outcome.instance, true, by_machine(places, won)))
    return math.fsum(
        chance * math.exp(best_log_value(outcome.instance, true, by_machine(places, part)))
        for chance, part in RULES[rule](outcome.bundle(bidder))
    )


# --- the paper's setting --------------------------------------------------------------------------------------------


class CaseGain(Struct, frozen=True):
    """What lie `kind` by `by` (1.0 is 100 %) gains in a case: relative, of the expected true V."""

    case: str
    rule: str
    kind: str
    by: float
    gain: float


def case_gains(
    cases: Iterable[Case], kinds: Sequence[str], by: Sequence[float], rules: Sequence[str]
) -> list[CaseGain]:
    """Return the liar's gain in every case, for every lie and rule.

    Ties are decided by the order of the bidders, and every order is as likely: a truthful app expects the mean over all
    positions, and so does the liar.
    """
    gains = []
    for case in cases:
        apps = apps_of(case)
        honest = hold(auction_of(apps))
        true = {
            rule: fmean(expected_value(honest, bidder, apps[0], rule) for bidder in range(len(apps))) for rule in rules
        }
        for kind in kinds:
            for amount in by:
                lied = _lied_in_every_position(apps, kind, amount)
                for rule in rules:
                    value = fmean(expected_value(outcome, at, apps[0], rule) for at, outcome in enumerate(lied))
                    gains.append(CaseGain(case.name, rule, kind, amount, value / true[rule] - 1.0))
    return gains


def _lied_in_every_position(apps: Sequence[Bidding], kind: str, by: float) -> list[Outcome]:
    others = [app for app in apps if app.id != LIAR]
    liar = next(app for app in lying(auction_of(apps), LIAR, kind, by).apps if app.id == LIAR)
    return [hold(auction_of([*others[:at], liar, *others[at:]])) for at in range(len(apps))]


# --- small auctions at random ---------------------------------------------------------------------------------------


class RandomGain(Struct, frozen=True):
    """One lie in one random auction. `same`: it wins the very bundle that the truth wins."""

    auction: int
    kind: str
    by: float
    same: bool
    gain: dict[str, float]  #: by rule, relative, of the expected true V

    def pays(self, rule: str) -> bool:
        """Whether the gain is more than arithmetic."""
        return self.gain[rule] > PROFIT


def random_gains(
    auctions: Iterable[Instance], by: Sequence[float], rules: Sequence[str], kinds: Sequence[str] = LIES
) -> Iterable[RandomGain]:
    """Yield the gain of the first app's lies, of every kind and size, in each auction."""
    for number, instance in enumerate(auctions):
        true = instance.apps[0]
        honest = hold(instance)
        expected = {rule: expected_value(honest, 0, true, rule) for rule in rules}
        for kind in kinds:
            for amount in by:
                outcome = hold(lying(instance, true.id, kind, amount))
                gain = {rule: expected_value(outcome, 0, true, rule) / expected[rule] - 1.0 for rule in rules}
                yield RandomGain(number, kind, amount, outcome.won[0] == honest.won[0], gain)
