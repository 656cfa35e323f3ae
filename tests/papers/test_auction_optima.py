"""The solver against auctions whose optima are proven by others: mixed-integer programmes, and trying everything.

`tests/data/auctions` says what is in the set; `python -m benchmarks.auctions.prove` made it.
"""

from __future__ import annotations

import math

import msgspec
import pytest

from arbiter.core.policies.themis.auction.instance import Result, parse, solve
from tests.support.exact_auctions import Proven, infeasible, log_v, proven, sum_log_v

pytestmark = pytest.mark.usefixtures("compiled_auction")

SET = proven()
CLOSE = 1e-6
#: Enough for every auction of the set; the usual one takes a thousandth.
BUDGET_MS = 60_000.0


def solved(case: Proven, t_id_factor: float = 1.0) -> Result:
    apps = [{**app, "t_id": app["t_id"] * t_id_factor} for app in case.instance["apps"]]
    return solve(parse(msgspec.json.encode({**case.instance, "apps": apps})), BUDGET_MS)


def test_there_are_at_least_a_hundred_auctions_in_the_set() -> None:
    assert len(SET) >= 100


@pytest.mark.parametrize("case", SET, ids=lambda case: case.name)
def test_objective_and_every_leave_one_out_are_the_proven_ones(case: Proven) -> None:
    result = solved(case)
    assert result.proven
    assert result.sum_log_v == pytest.approx(case.optimum, abs=CLOSE)
    assert 0.0 <= result.gap <= CLOSE
    assert result.without == pytest.approx(case.without, abs=CLOSE)


@pytest.mark.parametrize("case", SET, ids=lambda case: case.name)
def test_the_allocation_is_feasible_and_worth_what_is_said(case: Proven) -> None:
    result = solved(case)
    assert infeasible(case.instance, result.allocation) == []
    assert infeasible(case.instance, result.grants) == []
    assert sum_log_v(case.instance, result.allocation) == pytest.approx(result.sum_log_v, abs=CLOSE)
    for app in case.instance["apps"]:
        name = app["id"]
        assert result.log_v[name] == pytest.approx(log_v(case.instance, app, result.allocation[name]), abs=CLOSE)
        others = result.sum_log_v - result.log_v[name]
        assert math.log(result.c[name]) == pytest.approx(min(0.0, others - result.without[name]), abs=2 * CLOSE)


@pytest.mark.parametrize("factor", [1e-6, 3.0, 1e6])
@pytest.mark.parametrize("case", SET[::6], ids=lambda case: case.name)
def test_ideal_times_cancel_out(case: Proven, factor: float) -> None:
    """T_id = T_cluster N_avg scales V of its app: log V shifts by a constant and nothing else changes."""
    plain, scaled = solved(case), solved(case, factor)
    shift = math.log(factor)
    assert scaled.allocation == plain.allocation
    assert scaled.grants == plain.grants
    assert scaled.c == pytest.approx(plain.c, abs=1e-9)
    assert scaled.sum_log_v == pytest.approx(plain.sum_log_v + shift * len(plain.log_v), abs=CLOSE)
    assert scaled.without == pytest.approx(
        {app: value + shift * (len(plain.log_v) - 1) for app, value in plain.without.items()}, abs=CLOSE
    )
