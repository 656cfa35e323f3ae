"""Themis's evaluation: what its claims are made of, by hand, and that a small one says the same twice."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from arbiter.core.policies.queues.las import Las
from arbiter.core.policies.queues.las import Settings as LasSettings
from benchmarks.papers import cases, themis
from benchmarks.papers.cases import FLUID, MEMORY, Case, Figures, elastic, erring, lying
from benchmarks.papers.document import Memory, Report, text_of
from benchmarks.papers.floor import Work, fits, floor_of
from benchmarks.papers.themis import BASELINES, PARTS, QUICK, SCHEMA, Plan
from protocol.messages import AppId, Bid, BidRow, ProbeReply, RoundId
from simulator.workload import AppPlan, JobPlan, Workload
from tests.support.auctions import app_of, gpus_of, view_of

#: Whichever test comes first may have to compile the solver's loops, which takes a minute on a busy machine.
pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).resolve().parents[2]
SMALL = QUICK["harder"]
TINY = replace(SMALL, apps=3, scale=0.05, contentions=(1, 2), knobs_f=("0.8", "1"))
TINY_PUBLISHED = replace(QUICK["published"], apps=2, scale=0.05, contentions=(4,), liar_gpu_hours=1.0, lies=(1.0,))
BID = Bid(AppId("a-1"), RoundId(1), 2.0, (BidRow(1, "machine", 1.0), BidRow(2, "rack", 0.5), BidRow(4, "cluster", 0.4)))
PROBED = ProbeReply(AppId("a-1"), RoundId(1), 2.0)


def figures(max_rho: float, gpu_s: float = 3600.0, floor: float = 0.5) -> Figures:
    found = Figures(max_rho, max_rho, max_rho, 1.0, 1.0, gpu_s, 36.0, 3600.0, 7200.0, 1.0, 0, 1, 0, 0.0, "a story")
    return replace(found, floor=floor)


@pytest.fixture
def known() -> Iterator[dict[Case, Figures]]:
    """Runs that count as done."""
    before = dict(MEMORY.done)
    yield MEMORY.done
    MEMORY.done = before


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_a_ratio_is_the_mean_over_seeds_of_equal_apps(known: dict[Case, Figures]) -> None:
    case = themis.base(SMALL)
    for seed, ours, fluid, theirs in ((0, 1.0, 0.5, 2.0), (1, 1.0, 1.0, 3.0)):
        known[replace(case, seed=seed)] = figures(ours)
        known[replace(case, seed=seed, policy=FLUID)] = figures(fluid)
        known[replace(case, seed=seed, policy="las")] = figures(theirs)
    claim = themis.ratio_claim(case, "las", (0, 1))
    # 2 and 3 have the mean 2.5; their interval is t(1) * 0.7071 / sqrt(2) = 12.706 / 2.
    assert claim.ours == "2.50 ± 6.35 (over fluid-fair-share 3.50 ± 6.35; at best 5.00 ± 12.71)"
    assert claim.name == "max rho, workload 1, 32 GPUs, contention 1: las / themis"
    assert claim.met is True
    assert themis.ratio_claim(case, "las", (0,)).verdict == "**missed**", "2.0 is less than 2.2"


def test_a_ratio_that_no_scheduler_can_reach_is_said_to_be_impossible(known: dict[Case, Figures]) -> None:
    case = themis.base(SMALL)
    known[case] = replace(figures(1.5), floor=1.0)
    known[replace(case, policy=FLUID)] = figures(1.0)
    known[replace(case, policy="las")] = figures(2.1)
    known[replace(case, policy="srtf")] = figures(2.3)
    assert themis.ratio_claim(case, "las", (0,)).verdict == "impossible", "2.1 over the floor of 1"
    assert themis.ratio_claim(case, "srtf", (0,)).verdict == "**missed**", "2.3 over the floor, 1.53 over themis"


def test_the_greatest_rho_and_the_gpu_time_of_others_are_told_over_those_of_themis(
    known: dict[Case, Figures],
) -> None:
    case = themis.base(SMALL, kind=2, contention=4)
    for seed, ours, theirs in ((3, 1.0, 3.0), (4, 2.0, 2.0)):
        known[replace(case, seed=seed)] = figures(ours, 900.0)
        known[replace(case, seed=seed, policy="las")] = figures(theirs, 1000.0)
    table = themis.over_themis("over themis", case, {"las": replace(case, policy="las")}, (3, 4))
    ((name, ratio, saved),) = table.rows
    assert (name, ratio.partition(" ")[0], saved.partition(" ")[0]) == ("las", "2.00", "10.0")


@pytest.mark.parametrize(("theirs", "met"), [(1.10, True), (1.04, False)])
def test_gpu_time_is_compared_with_ours(known: dict[Case, Figures], theirs: float, met: bool) -> None:
    case = themis.base(SMALL, kind=2)
    known[case] = figures(1.0, 1000.0)
    known[replace(case, policy=FLUID)] = figures(1.0, 1000.0)
    known[replace(case, policy="slaq")] = figures(1.0, 1000.0 * theirs)
    claim = themis.gpu_time_claim("x", case, "slaq", (0,), 0.048, "4.8 %")
    more = f"{100 * theirs - 100:.1f} %"
    assert (claim.ours, claim.met) == (f"{more} better (at best {more})", met)


@pytest.mark.parametrize(("work_s", "verdict"), [(1000.0, "impossible"), (950.0, "**missed**")])
def test_a_policy_that_wastes_little_cannot_be_beaten_by_much(
    known: dict[Case, Figures], work_s: float, verdict: str
) -> None:
    case = themis.base(SMALL, kind=2)
    known[case] = figures(1.0, 1020.0)
    known[replace(case, policy=FLUID)] = figures(1.0, work_s)
    known[replace(case, policy="slaq")] = figures(1.0, 1040.0)
    assert themis.gpu_time_claim("x", case, "slaq", (0,), 0.048, "4.8 %").verdict == verdict


@pytest.mark.parametrize(("wrong", "met"), [((1.1, 1.2), False), ((1.1, 1.0), True), ((0.7, 0.8), False)])
def test_errors_may_change_max_rho_a_little(known: dict[Case, Figures], wrong: tuple[float, float], met: bool) -> None:
    case = themis.base(SMALL, contention=4)
    known[case] = figures(1.0)
    for number, rho in enumerate(wrong, start=1):
        known[replace(case, error=0.2, error_seed=number)] = figures(rho)
    (claim,) = themis.errors_part(replace(SMALL, seeds=(0,), errors=2)).claims
    assert claim.met is met


def test_contention_is_met_only_by_themis_alone_near_1(known: dict[Case, Figures]) -> None:
    plan = replace(SMALL, seeds=(0,), contentions=(4,))
    case = themis.base(plan, contention=4)
    known[case] = figures(1.1)
    known[replace(case, policy=FLUID)] = figures(0.9)
    for policy in BASELINES:
        known[replace(case, policy=policy)] = figures(1.3)
    assert themis.contention_part(plan).claims[0].met is True
    known[replace(case, policy="srtf")] = figures(1.19)
    assert themis.contention_part(plan).claims[0].met is False
    known[case] = figures(1.21)
    known[replace(case, policy="srtf")] = figures(1.3)
    assert themis.contention_part(plan).claims[0].met is False


def test_each_size_has_its_own_verdict(known: dict[Case, Figures]) -> None:
    plan = replace(QUICK["published"], seeds=(0,), sizes=(("8x2", 0.0625), ("themis-32", 0.125)))
    for (cluster, scale), theirs in zip(plan.sizes, (1.9, 2.3), strict=True):
        case = replace(themis.base(plan, contention=4, cluster=cluster), scale=scale)
        known[case] = figures(1.0, floor=0.5)
        for policy in BASELINES:
            known[replace(case, policy=policy)] = figures(theirs)
    (table,) = themis.sizes_part(plan).tables
    assert table.rows[0] == ("16 GPUs, contention 4", "0.0625", "themis", "1.00", "1", "2.00", "")
    assert table.rows[1][3:] == ("1.90", "1.90", "3.80", "missed")
    assert {row[-1] for row in table.rows[8:]} == {"met"}


def test_an_error_changes_every_rho_and_nothing_else_and_follows_from_its_seed() -> None:
    change = erring(0.2, "7/app-1")
    probed, bid = change(PROBED), change(BID)
    assert isinstance(probed, ProbeReply)
    assert isinstance(bid, Bid)
    factors = [probed.rho / 2.0, bid.rho_none / 2.0, *(w.rho / r.rho for w, r in zip(bid.rows, BID.rows, strict=True))]
    assert all(0.8 <= factor <= 1.2 for factor in factors)
    assert len(set(factors)) == len(factors)
    assert [(row.gpus, row.level) for row in bid.rows] == [(row.gpus, row.level) for row in BID.rows]
    again = erring(0.2, "7/app-1")
    assert (again(PROBED), again(BID)) == (probed, bid)
    assert erring(0.2, "8/app-1")(PROBED) != probed


def test_a_liar_over_reports_what_lies_apart() -> None:
    bid = lying(0.5, "bid")(BID)
    assert isinstance(bid, Bid)
    assert [row.rho for row in bid.rows] == pytest.approx([1.0, 0.75, 0.6])
    assert bid.rho_none == 2.0
    assert lying(0.5, "bid")(PROBED) == PROBED
    assert lying(0.5, "bid and probe")(PROBED) == replace(PROBED, rho=3.0)


def test_jobs_of_any_size_have_the_same_work() -> None:
    app = AppPlan("a", "t", 0.0, 4, 4, (JobPlan(10.0, 5),))
    assert elastic(app) == AppPlan("a", "t", 0.0, 1, 4, (JobPlan(40.0, 5),))


def test_jobs_that_need_one_gpu_are_of_any_size_already_and_stay_as_they_are() -> None:
    growing = AppPlan("a", "t", 0.0, 1, 8, (JobPlan(10.0, 5),), phase_growth=2)
    assert elastic(growing) is growing


def test_where_acts_take_no_time_a_preemption_wastes_nothing() -> None:
    case = themis.base(QUICK["published"], contention=4, policy="las", seed=3)
    dear, cheap = (cases.run(replace(case, costless=costless)) for costless in (False, True))
    assert dear.preemptions > 0 < cheap.preemptions
    assert cheap.wasted_gpu_s < 0.02 * dear.wasted_gpu_s


def test_what_is_cut_from_a_gang_is_owed_and_the_debt_is_paid_in_later_rounds() -> None:
    debts = cases.Debts()
    had = [[debts.lot(round_, "keep", app) < 0.4 for app in "ab"] for round_ in range(50)]
    for of_app in zip(*had, strict=True):
        assert sum(of_app) == 20
        assert all(sum(of_app[first : first + 5]) == 2 for first in range(45))
    assert debts.lot(7, "tie", "a") == cases.draw(7, "tie", "a")


def test_runs_that_are_done_are_not_repeated(tmp_path: Path, known: dict[Case, Figures]) -> None:
    case = themis.base(TINY, seed=99)
    memory = Memory(Case, Figures)
    memory.use(tmp_path / "kept.jsonl")
    memory.add(case, figures(1.25))
    other = Memory(Case, Figures)
    other.use(tmp_path / "kept.jsonl")
    assert other.done == {case: figures(1.25)}


# --- a small evaluation -----------------------------------------------------------------------------------------------


def evaluated(*plans: Plan, parts: Collection[str] = tuple(PARTS)) -> Report:
    return themis.evaluate(plans, tuple(parts))


def test_the_published_setting_says_what_it_claims() -> None:
    report = evaluated(TINY_PUBLISHED, parts=("contention", "f", "liar"))
    assert [claim.name for claim in report.claims][:2] == [
        "published: contention 4x: max rho of themis stays near 1, of the others not",
        "published: best fairness_knob by max rho, contention 4",
    ]
    assert sum("the liar" in claim.name for claim in report.claims) == 4
    (table,) = (table for table in report.tables if table.name == "published: contention")
    assert ("4x", "floor") in [row[:2] for row in table.rows]


def test_what_the_spread_of_lengths_does_is_told_of_apps_that_need_no_gang() -> None:
    plan = replace(TINY_PUBLISHED, spreads=(0.0, 1.0))
    (table,) = themis.spread_part(plan).tables
    policies = (themis.THEMIS, *BASELINES)
    assert [row[:3] for row in table.rows] == [
        (kind, spread, policy) for kind in ("1", "2") for spread in ("0", "1") for policy in policies
    ]
    for kind, spread, policy, greatest, ratio, best, verdict in table.rows:
        case = themis.base(plan, kind=int(kind), contention=4, seed=3, spread=float(spread))
        case = replace(case, elastic=kind == "1")
        ours, theirs = cases.run(case), cases.run(replace(case, policy=policy))
        assert greatest == f"{theirs.max_rho:.2f}"
        assert float(ratio) == pytest.approx(theirs.max_rho / ours.max_rho, abs=0.005)
        assert float(best) == pytest.approx(theirs.max_rho / ours.floor, abs=0.005)
        assert verdict == ("" if policy == themis.THEMIS else "met" if float(ratio) >= 2.2 else "missed")
    assert len({row[3] for row in table.rows if row[2] == themis.THEMIS}) == 4, "the spread changes nothing"
    assert themis.spread_part(replace(plan, spreads=())).tables == ()


def test_every_part_says_what_it_claims() -> None:
    report = evaluated(TINY)
    assert report.schema == SCHEMA
    assert all(claim.name and claim.paper and claim.ours and claim.goal for claim in report.claims)
    names = [claim.name for claim in report.claims]
    assert len(set(names)) == len(names)
    for kind in (1, 2):
        for policy in BASELINES:
            assert f"harder: max rho, workload {kind}, 32 GPUs, contention 4: {policy} / themis" in names
    for word in (
        "GPU time, workload 2, contention 4: slaq",
        "contention 2x",
        "share 100%",
        "errors",
        "fairness_knob",
        "lease_s",
    ):
        assert any(word in name for name in names), word
    for table in report.tables:
        assert all(len(row) == len(table.columns) for row in table.rows), table.name
    (loose,) = (table for table in report.tables if table.name == "harder: claims where jobs need no gang")
    as_gangs = {f"harder: {name}": ours for name, ours, *_ in loose.rows}
    known = {claim.name: claim.ours for claim in report.claims if claim.name in as_gangs}
    assert any("errors" in name for name in known)
    assert known == {name: ours for name, ours in as_gangs.items() if name in known}
    assert any(gang != size for _, gang, _, size, _ in loose.rows)
    (cheap,) = (table for table in report.tables if table.name.endswith("where acts take no time"))
    assert all("workload 2" in name and dear != none for name, dear, _, none, _ in cheap.rows)
    assert text_of(report).startswith("## Claims\n")


def _document(*arguments: str) -> dict[str, Any]:
    words = ("--quick", "--json", "--setting", "harder", *arguments)
    command = [sys.executable, "benchmarks/papers/themis.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=500)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.full  # tests/simulation/test_world.py has two runs of one seed
def test_it_says_the_same_twice() -> None:
    first, second = _document("--only", "errors"), _document("--only", "errors")
    assert first.pop("cpu_s") > 0 < second.pop("cpu_s")
    assert first == second
    assert {*first["claims"][0]} == {"name", "paper", "ours", "goal", "met", "impossible"}


def test_an_unknown_part_is_named() -> None:
    command = [sys.executable, "benchmarks/papers/themis.py", "--only", "rho,luck"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert "there is no part 'luck'; choose of rho, errors" in done.stderr


def test_an_app_of_unequal_jobs_is_not_done_in_its_ideal_time_even_alone() -> None:
    # Jobs of 1 and 3 hours on one GPU each: B = 4 GPU-hours over two GPUs are 2 hours, and it takes 3.
    apps = (AppPlan("a", "t", 0.0, 1, 1, (JobPlan(3600.0, 10), JobPlan(10800.0, 10)), search="all"),)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "drawn", lambda case, cluster: Workload("w", apps))
        assert cases.rhos_alone(themis.base(TINY)) == pytest.approx([1.5])


# --- the published setting --------------------------------------------------------------------------------------------


def test_times_are_as_much_shorter_as_jobs_are_and_baselines_have_the_published_power() -> None:
    case = themis.base(QUICK["published"], policy="las", knobs=(("lease_s", "1200"),))
    assert case.scale == 0.125
    assert dict(cases.knobs_of(case)) == {
        "lease_s": "150",
        "renewal_lead_s": "3.75",
        "round_pause_s": "1",
        "policy.las.tenure": "lease",
        "policy.las.order": "service",
    }
    assert cases.knobs_of(themis.base(SMALL, policy="las")) == ()


def test_contention_is_a_part_of_the_cluster_as_published_and_denser_work_otherwise() -> None:
    quarter, dense = themis.base(QUICK["published"], contention=4), themis.base(SMALL, contention=4)
    assert (quarter.parts, quarter.contention, cases.cluster_of(quarter).gpus) == (4, 1.0, 8)
    assert (dense.parts, dense.contention, cases.cluster_of(dense).gpus) == (1, 4.0, 32)
    whole = themis.base(QUICK["published"])
    assert cases.drawn(whole, cases.cluster_of(whole)) == cases.drawn(quarter, cases.cluster_of(quarter))


# --- the floor --------------------------------------------------------------------------------------------------------


def test_the_floor_of_one_app_is_its_time_alone() -> None:
    assert floor_of([], 4) == 0.0
    assert floor_of([Work(0.0, 400.0, 4, alone_s=150.0, ideal_s=100.0)], 4) == 1.5


def test_the_floor_of_equal_apps_is_set_by_the_capacity() -> None:
    # Two apps of 400 GPU-seconds on 4 GPUs: one of them ends after 200 s at the earliest.
    equal = [Work(0.0, 400.0, 4, alone_s=100.0, ideal_s=100.0)] * 2
    assert floor_of(equal, 4) == pytest.approx(2.0, rel=2e-3)
    assert not fits(equal, 4, 1.9)
    # The second comes when the first is done.
    apart = [equal[0], replace(equal[0], submit_s=100.0)]
    assert floor_of(apart, 4) == pytest.approx(1.0, rel=2e-3)


def test_the_floor_knows_how_many_gpus_an_app_can_use() -> None:
    # The first takes 400 s on its one GPU and has 800 s for that; the other takes 100 s on all four, and has 100 s.
    works = [Work(0.0, 400.0, 1, 400.0, 800.0), Work(0.0, 400.0, 4, 100.0, 100.0)]
    assert floor_of(works, 4) == pytest.approx(1.0, rel=2e-3)
    # Of its 400 r s the first needs 400: it leaves the other all four GPUs for 400 (r - 1) of 100 r s, else three.
    tight = [replace(works[0], ideal_s=400.0), works[1]]
    assert floor_of(tight, 4) == pytest.approx(8 / 7, rel=2e-3)


def test_a_scheduler_of_jobs_serves_the_app_first_whose_jobs_have_had_less_each() -> None:
    search = replace(app_of("search"), served_gpu_s=400.0, jobs=((),) * 4)
    single = replace(app_of("single"), served_gpu_s=150.0, jobs=((),))
    las, view = Las(LasSettings(order="service", tenure="lease")), view_of(gpus_of(2), [search, single])
    assert [app.app for app in las.order(view)] == ["single", "search"]
    with cases.varied("service by job"):
        assert [app.app for app in las.order(view)] == ["search", "single"]
    assert [app.app for app in las.order(view)] == ["single", "search"]
