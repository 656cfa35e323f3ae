"""Reports and receipts over random worlds full of faults: what the ledger adds up to is what the state has counted.

``python -m tests.simulation.test_gpu_time_reports 50`` judges so many worlds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise, tee
from random import Random
from typing import Any, get_args

import pytest

from arbiter import receipts, reports
from arbiter.core.effects import AppRecord, Record
from arbiter.core.state.model import State
from arbiter.ledger import Ledger
from protocol.messages import EventFilter
from simulator.faults.runs import _Run
from simulator.faults.scenario import draw

#: GPU-seconds; rounding of sums of a thousand terms.
SLACK_S = 1e-3
RECORDS = get_args(Record)


class Bookkeeper:
    """Writes the ledger of a world, and remembers at some moments what the state has counted until then."""

    def __init__(self, seed: int) -> None:
        self.dice = Random(f"moments {seed}")
        self.ledger = Ledger(":memory:")
        self.moments: list[tuple[float, dict[str, tuple[float, float]]]] = []
        self.preempted: dict[str, int] = {}

    def __call__(self, actor: Any, event: Any, effects: Sequence[Any]) -> None:
        """Hear of an event of a participant."""
        if actor.party.role != "arbiter":
            return
        self.write(effects)
        state: State = actor.core.state
        if self.dice.random() < 0.01 and (not self.moments or state.now > self.moments[-1][0]):
            history = state.history
            standing = {name: history.of_tenant(name, state.now) for name in history.tenants}
            told = {name: (each.allocated_gpu_s, each.draining_gpu_s) for name, each in standing.items()}
            self.moments.append((state.now, told))
            _check_whole(state, self.ledger, state.now)
        self.preempted |= {app.id: app.tally.preemptions for app in state.apps.values()}

    def write(self, effects: Iterable[object]) -> None:
        """Write the records among these effects."""
        for effect in effects:
            if isinstance(effect, RECORDS):
                self.ledger.write(effect)
                self.ledger.write(effect)  # a restart records again what it is not sure of

    def forget(self, left: State, told: Iterable[Sequence[object]]) -> None:
        """Begin anew with what a journal tells that has lost its end: the ledger stands in the same file."""
        self.ledger = Ledger(":memory:")
        over = set()
        for effects in told:
            self.write(effects)
            over |= {effect.app for effect in effects if isinstance(effect, AppRecord)}
        self.moments = [moment for moment in self.moments if moment[0] <= left.now]
        self.preempted = {app: count for app, count in self.preempted.items() if app in over}
        self.preempted |= {app.id: app.tally.preemptions for app in left.apps.values()}


def check(seed: int) -> int:
    """Judge the reports and receipts of a world; return how many preemptions it had."""
    run, keeper = _Run(draw(seed), None), Bookkeeper(seed)
    run.injector._told = [*run.injector._told, keeper]
    judge_loss = run.injector.on_loss

    def lose(left: State, told: Iterable[Sequence[object]], lost: int) -> None:
        for_checks, for_keeper = tee(told)
        judge_loss(left, for_checks, lost)
        keeper.forget(left, for_keeper)

    run.injector.on_loss = lose
    assert run.verdict().wrong == "", seed
    state, now = run.world.arbiter.core.state, run.world.arbiter.core.state.now
    _check_whole(state, keeper.ledger, now)
    edges = [0.0, *(at for at, _ in keeper.moments)]
    _check_periods(reports.asked("tenant", edges, state, now), keeper)
    return _check_receipts(state, keeper, now)


def _check_whole(state: State, ledger: Ledger, now: float) -> None:
    """The whole by tenant is what the state has counted, and sums by owner and app are that same whole."""
    tenants = reports.asked("tenant", (), state, now).rows(ledger)
    told = {row.tenant: (row.had_gpu_s, row.draining_gpu_s, row.lost_gpu_s) for row in tenants}
    for name in state.history.tenants:
        counted = state.history.of_tenant(name, now)
        figures = (counted.allocated_gpu_s, counted.draining_gpu_s, counted.lost_gpu_s)
        assert told.get(name, (0.0, 0.0, 0.0)) == pytest.approx(figures, abs=SLACK_S), name
    for by in ("owner", "app"):
        rows = reports.asked(by, (), state, now).rows(ledger)  # type: ignore[arg-type]
        for field in ("had_gpu_s", "draining_gpu_s", "lost_gpu_s"):
            sums = [sum(getattr(row, field) for row in each) for each in (rows, tenants)]
            assert sums[0] == pytest.approx(sums[1], abs=SLACK_S), (by, field)


def _check_periods(report: reports.Report, keeper: Bookkeeper) -> None:
    """Each period has what the state counted from its beginning to its end."""
    rows = report.rows(keeper.ledger)
    for (start, before), (end, after) in pairwise([(0.0, {}), *keeper.moments]):
        told = {row.tenant: (row.had_gpu_s, row.draining_gpu_s) for row in rows if row.start == start}
        for tenant, (had, draining) in after.items():
            earlier = before.get(tenant, (0.0, 0.0))
            figures = (had - earlier[0], draining - earlier[1])
            assert told.get(tenant, (0.0, 0.0)) == pytest.approx(figures, abs=SLACK_S), (tenant, start, end)  # type: ignore[arg-type]


def _check_receipts(state: State, keeper: Bookkeeper, now: float) -> int:
    """Every GPU that was taken is on one receipt, and none names its own app or costs more than the app has lost."""
    count, live = 0, list(reports.live_stretches(state, now))
    for app, preempted in keeper.preempted.items():
        among = EventFilter(ids=(app,), kinds=("preempted", "granted"))
        events = [event for _, event in keeper.ledger.events(among, limit=100_000)]
        drained = [each for each in (*keeper.ledger.stretches_of(app), *live) if each.draining and each.app == app]
        losses = keeper.ledger.losses_of(app)  # type: ignore[arg-type]
        told = receipts.receipts_of(events, drained, losses)
        assert sum(len(each.gpus) for each in told) == preempted, app
        assert sum(each.lost_gpu_s for each in told) <= sum(each.lost_gpu_s for each in losses) + SLACK_S
        cost = sum(each.draining_gpu_s for each in told)
        assert cost <= sum(each.gpu_s(each.start, each.end) for each in drained) + SLACK_S
        for each in told:
            assert app not in each.winners
            assert each.missing >= 0
            assert each.away_s is None or each.away_s >= 0.0
        count += preempted
    return count


def test_reports_and_receipts_of_worlds_full_of_faults_add_up() -> None:
    # World 5329 has two losses of a task at one moment; in world 5158 the journal loses its end.
    assert sum(map(check, (*range(4100, 4103), 5158, 5329))) > 10, "these worlds have preemptions"


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(5000, 6000, 125))
def test_reports_and_receipts_of_a_thousand_worlds_add_up(first: int) -> None:
    assert sum(map(check, range(first, first + 125))) > 100, "these worlds have preemptions"


def main(count: int) -> None:
    preemptions = sum(map(check, range(5000, 5000 + count)))
    print(f"reports and receipts of {count} worlds add up to the second, with {preemptions} preemptions")


if __name__ == "__main__":
    main(int(sys.argv[1]))
