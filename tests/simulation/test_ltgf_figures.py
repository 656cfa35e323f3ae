"""Long-term GPU-time fairness in the simulator: every policy's runs have it, by the weights they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from simulator.experiment import Experiment, ExperimentError, execute, settings_of
from simulator.figures.results import Run, TenantPoint, interval_indices, ltgf_figures, summary, tenants
from simulator.run import INTERVAL_S

#: Two tenants, whose jobs of an hour want all GPUs of two nodes from the beginning.
TRACE = "job_id,submit_s,gpus,duration_s,tenant\n" + "".join(
    f"{tenant}{number},0,1,3600,{tenant}\n" for number in range(8) for tenant in ("a", "b")
)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    trace, shares = tmp_path / "trace.csv", tmp_path / "shares.csv"
    trace.write_text(TRACE)
    shares.write_text("tenant,share,anything\na,3,x\nb,1,y\n")
    return str(trace), str(shares)


def run(files: tuple[str, str], policy: str) -> Run:
    trace, shares = files
    return execute(Experiment(trace, "2x2", policy, "none", knobs=(("lease_s", "300"),), tenants=shares))


def test_gpu_time_is_booked_for_every_app_and_no_more_than_there_is(files: tuple[str, str]) -> None:
    found = run(files, "astraea")
    had = [app.allocated_gpu_s for app in found.apps]
    assert all(value == pytest.approx(3600.0, rel=0.01) for value in had)
    (last,) = {point.at_s for point in found.tenants[-2:]}
    assert sum(point.allocated_gpu_s for point in found.tenants[-2:]) <= 4 * last + 1e-6
    assert sum(point.fair_gpu_s for point in found.tenants[-2:]) <= 4 * last + 1e-6


def test_while_both_want_more_astraea_gives_by_weight_and_fifo_by_arrival(files: tuple[str, str]) -> None:
    found = {policy: run(files, policy) for policy in ("astraea", "fifo")}
    early = {
        policy: {point.tenant: point.allocated_gpu_s for point in each.tenants if point.at_s < 3 * INTERVAL_S}
        for policy, each in found.items()
    }
    assert early["astraea"]["a"] / early["astraea"]["b"] == pytest.approx(3.0, rel=0.05)
    assert early["fifo"]["a"] / early["fifo"]["b"] == pytest.approx(1.0, rel=0.05)
    below = {policy: summary(each)["share_intervals_below_1"] for policy, each in found.items()}
    assert below["astraea"] < below["fifo"]
    (a, b) = tenants(found["fifo"])
    assert a["ltgf"] < b["ltgf"]


def test_a_tenants_interval_counts_where_something_was_due_in_it() -> None:
    points = (
        TenantPoint(900.0, "a", 50.0, 100.0, 100.0),
        TenantPoint(900.0, "b", 0.0, 0.0, 100.0),
        TenantPoint(1800.0, "a", 200.0, 150.0, 200.0),
        TenantPoint(2700.0, "a", 200.0, 150.0, 300.0),
    )
    since, alone = interval_indices(points)
    assert since == [0.5, 200.0 / 150.0]
    assert alone == [0.5, 3.0]


def test_figures_of_runs_that_kept_no_books_are_none(files: tuple[str, str]) -> None:
    fluid = execute(Experiment(files[0], "2x2", "fluid-fair-share"))
    assert ltgf_figures(fluid)["share_ltgf_unfair"] is None
    assert ltgf_figures(fluid)["share_intervals_below_1"] is None


def test_what_is_no_file_of_tenants_is_said_in_one_sentence(tmp_path: Path) -> None:
    base = Experiment("t", "2x2", "astraea")
    with pytest.raises(ExperimentError, match="cannot be read; give a CSV with tenant and share"):
        settings_of(replace(base, tenants=str(tmp_path / "none.csv")))
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("tenant,share\na,1\nb,0\n")
    with pytest.raises(ExperimentError, match=r"wrong.csv line 3: share .*; give tenant and share"):
        settings_of(replace(base, tenants=str(wrong)))


def noted(trace: str, shares: Path, text: str, **changes: Any) -> str:
    """Return the note of a run about its tenants, the file's name aside."""
    shares.write_text("tenant,share\n" + text)
    experiment = replace(Experiment(trace, "2x2", "fluid-fair-share", tenants=str(shares)), **changes)
    return " / ".join(note.removeprefix(f"{shares} ") for note in execute(experiment).notes if str(shares) in note)


def test_who_is_named_and_has_no_job_is_noted_with_who_is_not_named(files: tuple[str, str], tmp_path: Path) -> None:
    trace, shares = files[0], tmp_path / "named.csv"
    assert noted(trace, shares, "a,1\nb,2\n") == noted(trace, shares, "a,1\n") == ""
    assert noted(trace, shares, "c,1\na,1\n") == (
        "names c, of whom the trace has no job; b is not named and has weight 1"
    )
    assert noted(trace, shares, "c,1\n") == (
        "names c, of whom the trace has no job; a and b are not named and have weight 1"
    )
    many = "".join(f"t{number},1\n" for number in range(9))
    assert (
        noted(trace, shares, f"a,1\nb,1\n{many}") == "names t0, t1, t2, t3, t4 and 4 more, of whom the trace has no job"
    )
    assert noted(trace, shares, "a,1\nb,1\n", first=1) == "names b, of whom the trace has no job within --first 1"
    only = (("tenants_only", "true"),)
    assert noted(trace, shares, "c,1\na,1\n", policy="fifo", overheads="none", knobs=only) == (
        "names c, of whom the trace has no job; b is not named, and by tenants_only its jobs are refused"
    )
