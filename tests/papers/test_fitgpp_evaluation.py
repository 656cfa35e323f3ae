"""FitGpp's evaluation: what its claims are made of, and one small run of everything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.papers import fitgpp
from benchmarks.papers.document import Claim
from benchmarks.papers.fitgpp import FIFO, FITGPP, LRTP, MEMORY, PARTS, POLICIES, RAND, Case, Figures, Plan

TINY = Plan(
    nodes=2, jobs=24, seeds=(0,), caps=(1, 2), shares=(0.5,), graces=(2.0,), kept=1, more_kept=(1,), few_seeds=(0,)
)


@pytest.fixture
def known() -> Iterator[dict[Case, Figures]]:
    """The runs that are done, for one test."""
    before = dict(MEMORY.done)
    MEMORY.done.clear()
    yield MEMORY.done
    MEMORY.done.clear()
    MEMORY.done.update(before)


def found(preempted: int = 0, *, interactive: float = 1.0, batch: float = 2.0, restart: float = 1.0) -> Figures:
    restarts = (restart,) * preempted
    return Figures((interactive,) * 100, (batch,) * 100, restarts, preempted, preempted, jobs=1000, unfinished=0)


def told(known: dict[Case, Figures], figures: dict[str, Figures]) -> dict[str, Claim]:
    cases = {name: [Case(name, 0, 2, 1000)] for name in POLICIES}
    known.update({cases[name][0]: each for name, each in figures.items()})
    claims = [*fitgpp.slowdown_claims(cases, FITGPP, cases[FITGPP])]
    claims += fitgpp.preemption_claims(cases, FITGPP, cases[FITGPP])
    return {claim.name: claim for claim in claims}


def test_claims_are_of_the_figures(known: dict[Case, Figures]) -> None:
    slow = found(interactive=50.0, batch=2.0)
    claims = told(
        known,
        {
            FIFO: slow,
            FITGPP: found(7, interactive=1.5, batch=2.2, restart=2.0),
            LRTP: found(96, restart=4.0),
            RAND: found(50, restart=3.0),
        },
    )
    met = {name: claim.met for name, claim in claims.items()}
    assert met == {
        "TE slowdown, 95th percentile, fitgpp against fifo": True,
        "BE slowdown, median, fitgpp against fifo": True,
        "BE slowdown, 95th percentile, fitgpp against fifo": True,
        "jobs preempted, fitgpp over lrtp": True,
        "median minutes from preemption to restart, fitgpp over lrtp": True,
        "jobs preempted, fitgpp over rand": False,
        "median minutes from preemption to restart, fitgpp over rand": False,
    }
    assert claims["jobs preempted, fitgpp over rand"].ours == "0.70 % of 5.00 %"
    assert claims["TE slowdown, 95th percentile, fitgpp against fifo"].ours == "-97.0 % (1.5 against 50)"


def test_who_preempted_nobody_restarted_nobody(known: dict[Case, Figures]) -> None:
    nobody = dict.fromkeys(POLICIES, found())
    assert {claim.met for name, claim in told(known, nobody).items() if "TE" not in name and "BE" not in name} == {None}


def test_a_small_run_of_everything(known: dict[Case, Figures]) -> None:
    parts = {name: part(TINY) for name, part in PARTS.items()}
    claims, tables = parts["policies"]
    assert len({claim.name for claim in claims}) == len(claims) == 14
    rows = {row[0]: row for table in tables for row in table.rows}
    assert rows[FIFO][4] == "0.00 %"
    assert rows["fitgpp, 1 of 2 nodes for interactive apps only"][5] == "0"
    assert {row[0] for row in parts["robustness"][1][0].rows} >= {
        "lrtp, interactive apps 0.5",
        "fitgpp, 1 nodes for interactive apps only",
    }
    assert all(figures.unfinished == 0 and len(figures.interactive + figures.batch) == 24 for figures in known.values())
    assert len(known) == 4 + 1 + 1 + 2 * 4
