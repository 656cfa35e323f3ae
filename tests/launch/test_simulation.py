"""`simulate`, `compare` and `sweep`, as a user types them."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from msgspec.structs import replace
from typer.testing import CliRunner

from launch import cli
from launch.verbs import simulation
from protocol import exit_codes
from simulator import experiment, fluid
from simulator import sweep as sweeping
from simulator.experiment import Experiment
from simulator.figures import results
from simulator.figures.results import Run
from simulator.workload import load

ROOT = Path(__file__).resolve().parents[2]
TRACE = "job_id,tenant,submit_s,gpus,duration_s\na,ann,0,1,100\nb,bob,0,2,50\nc,bob,10,1,20\n"
MEASURED = {"cpu_s", "jobs_per_cpu_s", "peak_rss_bytes"}


@pytest.fixture(autouse=True)
def _no_wish_for_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPU_ARBITER_OUTPUT", raising=False)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "three.csv"
    path.write_text(TRACE)
    return path


def run(*words: str | Path) -> Result:
    result = CliRunner().invoke(cli.app, list(map(str, words)))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def document(*words: str | Path) -> dict[str, Any]:
    result = run(*words, "--json")
    assert result.exit_code == exit_codes.DONE, result.stderr
    return json.loads(result.stdout)  # type: ignore[no-any-return]


# --- simulate -------------------------------------------------------------------------------------------------------


def test_simulate_drives_the_scheduler_itself(trace: Path) -> None:
    answer = document("simulate", trace, "--cluster", "1x2", "--policy", "fifo", "--overheads", "none")
    # Two GPUs, strictly in turn: `a` has one to 100, `b` needs both and so runs to 150, and `c` behind it to 170.
    assert {row["job"]: row["finish_s"] for row in answer["jobs"]} == {"a": 100.0, "b": 150.0, "c": 170.0}
    assert answer["schema"] == "simulation/v1"
    assert list(answer) == ["schema", "inputs", "summary", "tenants", "gangs", "apps", "jobs"]
    summary = answer["summary"]
    wanted = ("jobs_in", "jobs_out", "avg_jct_s", "p50_jct_s", "p99_jct_s", "makespan_s", "gpu_seconds_useful")
    assert [summary[name] for name in wanted] == [3, 3, pytest.approx(410 / 3), 150.0, 160.0, 170.0, 220.0]
    assert summary["gpu_seconds_wasted"] == 0.0
    assert {"max_rho", "cpu_s"} <= summary.keys()
    assert [row["tenant"] for row in answer["tenants"]] == ["ann", "bob"]
    inputs = answer["inputs"]
    assert (inputs["policy"], inputs["cluster"], inputs["trace"]) == ("fifo", "1x2", str(trace))
    assert (inputs["overheads"], inputs["profiles"], inputs["first"]) == ("none", "built-in", 0)


def test_simulate_shows_a_table_to_people(trace: Path) -> None:
    result = run("simulate", trace, "--cluster", "1x2", "--policy", "fifo", "--overheads", "none", "--seed", "4")
    assert result.exit_code == exit_codes.DONE
    for line in (
        "jobs +3 in, 3 out",
        "seed +4",
        r"makespan \[s\] +170.0",
        "policy +fifo",
        r"cut +60 s leave out 2 apps",
    ):
        assert re.search(f"^{line}$", result.stdout, re.MULTILINE), line
    assert re.search(r"^bob +2 +0.0 +0.0 +0.545 +155.0 +\d", result.stdout, re.MULTILINE)
    # By gang: `a` starts at once and `c` after 140 s; `b` waits for 100.
    assert re.search(r"^ *1 +2 +2 +70.0 +140.0 +130.0 +\d", result.stdout, re.MULTILINE)
    assert re.search(r"^ *2 +1 +1 +100.0 +100.0 +150.0 +\d", result.stdout, re.MULTILINE)


def test_jobs_that_can_never_run_are_named(trace: Path) -> None:
    trace.write_text(TRACE + "huge,ann,0,64,5\n")
    result = run("simulate", trace, "--cluster", "1x2", "--policy", fluid.NAME)
    assert re.search(r"^jobs +4 in, 3 out, 1 refused$", result.stdout, re.MULTILINE)
    assert re.search(r"^refused +huge$", result.stdout, re.MULTILINE)


def test_rows_are_written_where_asked(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    run("simulate", trace, "--cluster", "1x2", "--policy", fluid.NAME, "--out", out)
    with (out / "jobs.csv").open() as file:
        assert [row["job"] for row in csv.DictReader(file)] == ["a", "b", "c"]
    assert json.loads((out / "summary.json").read_text())["summary"]["jobs_out"] == 3
    assert (out / "apps.csv").exists()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("simulate", "--policy", "fifo", "--out", "file"), "file"),
        (("simulate", "--policy", "fifo", "--out", "taken"), "taken/apps.csv"),
        (("compare", "--policies", "fifo", "--html", "file/report.html"), "file"),
        (("compare", "--policies", "fifo", "--html", "taken"), "taken"),
    ],
)
def test_where_nothing_can_be_written_nothing_runs(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], named: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "apps.csv").mkdir(parents=True)
    monkeypatch.setattr(experiment, "execute", lambda *_: pytest.fail("it ran"))
    verb, *flags, place = words
    result = run(verb, trace, "--cluster", "1x2", *flags, tmp_path / place)
    assert (result.exit_code, result.stdout) == (exit_codes.FAILED, "")
    said, next_step = result.stderr.splitlines()
    assert said.startswith(f"gpu-arbiter: {tmp_path}/{named} cannot be written: ")
    assert next_step == "next: give a place you may write to"
    assert not (tmp_path / "taken" / "jobs.csv").exists()


def test_what_cannot_run_leaves_what_was_written_before(trace: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    report.write_text("earlier")
    simulation._demand_folder(tmp_path, (report.name,))
    assert report.read_text() == "earlier"
    result = run("compare", trace, "--cluster", "1x2", "--policies", "best", "--html", tmp_path / "new" / "report.html")
    assert (result.exit_code, (tmp_path / "new").exists()) == (exit_codes.USAGE, False)


def test_the_same_seed_gives_the_same_answer(trace: Path) -> None:
    words = ("simulate", "themis:1?apps=3&scale=0.1", "--cluster", "1x4", "--policy", fluid.NAME, "--seed", "5")
    one, other = document(*words), document(*words)
    for answer in (one, other):
        for name in MEASURED:
            del answer["summary"][name]
    assert one == other
    assert document(*words[:-1], "6")["apps"] != one["apps"]


def test_flags_reach_the_experiment(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Experiment] = []

    def execute(wanted: Experiment, progress: object) -> Run:
        seen.append(wanted)
        return real(replace(wanted, policy=fluid.NAME), None)

    real = experiment.execute
    monkeypatch.setattr(experiment, "execute", execute)
    run(
        *("simulate", trace, "--cluster", "1x2", "--policy", "fifo", "--overheads", "none", "--profiles", "crude"),
        *("--lease", "5m", "--round-pause", "2s", "--fairness-knob", "0.5", "--set", "probe_s=1", "--seed", "9"),
        *("--first", "2"),
    )
    knobs = (("lease_s", "300.0"), ("round_pause_s", "2.0"), ("policy.themis.fairness_knob", "0.5"), ("probe_s", "1"))
    assert seen == [Experiment(str(trace), "1x2", "fifo", "none", "crude", 9, 2, knobs)]


def test_the_cut_is_the_users(trace: Path) -> None:
    words = ("simulate", trace, "--cluster", "1x2", "--policy", fluid.NAME)
    assert document(*words)["summary"]["apps_cut"] == 2
    cut = document(*words, "--min-duration", "1m")["summary"]
    assert (cut["apps_cut"], cut["min_duration_s"]) == (2, 60.0)
    assert document(*words, "--min-duration", "0")["summary"]["apps_cut"] == 0


def test_jobs_that_never_end_are_a_failure(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = experiment.execute

    def execute(wanted: Experiment, progress: object) -> Run:
        whole = real(replace(wanted, policy=fluid.NAME), None)
        return replace(whole, jobs=(replace(whole.jobs[0], state="unfinished"), *whole.jobs[1:]))

    monkeypatch.setattr(experiment, "execute", execute)
    result = run("simulate", trace, "--cluster", "1x2", "--policy", "fifo", "--json")
    assert result.exit_code == exit_codes.FAILED
    assert json.loads(result.stdout.splitlines()[0])["summary"]["jobs_unfinished"] == 1
    assert "1 job never ended under fluid-fair-share; repeat with --seed 0" in result.stderr


# --- compare --------------------------------------------------------------------------------------------------------


def test_compare_always_has_the_reference_line(trace: Path, tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    words = ("compare", trace, "--cluster", "1x2", "--policies", "fifo,backfill,fifo", "--overheads", "none")
    answer = document(*words, "--html", html)
    assert answer["schema"] == "comparison/v1"
    assert [one["policy"] for one in answer["runs"]] == ["fifo", "backfill", "fluid-fair-share"]
    # Backfill lets `c` run beside `a`; `b` then waits for `a` alone.
    assert [one["summary"]["avg_jct_s"] for one in answer["runs"][:2]] == [pytest.approx(410 / 3), 90.0]
    assert html.read_text().startswith("<!doctype html>")
    text = run(*words).stdout
    assert re.search(r"^fluid-fair-share +3 ", text, re.MULTILINE)
    assert re.search(r"^POLICY +GANG 1 +GANG 2$", text, re.MULTILINE)
    assert re.search(r"^fifo +140 +100$", text, re.MULTILINE)
    assert re.search(r"^backfill +0 +100$", text, re.MULTILINE)
    assert [row["max_wait_s"] for row in answer["runs"][1]["gangs"]] == [0.0, 100.0]
    assert "<h2>Longest wait for the first GPUs, by gang</h2>" in html.read_text()
    assert '<th scope="col">gang of 2 [h]</th>' in html.read_text()
    assert '<th scope="row">fifo</th><td>0.04</td><td>0.03</td>' in html.read_text()
    assert "three on 1x2, 2 GPUs, seed 0" in text
    again = document("compare", trace, "--cluster", "1x2", "--policies", "fluid-fair-share,fifo", "--overheads", "none")
    assert [one["policy"] for one in again["runs"]] == ["fifo", "fluid-fair-share"]


def test_compare_says_whose_jobs_could_never_run(tmp_path: Path) -> None:
    wide = tmp_path / "wide.csv"
    wide.write_text(TRACE + "d,ann,0,4,10\n")
    result = run("compare", wide, "--cluster", "1x2", "--policies", "fifo", "--overheads", "none")
    assert result.exit_code == exit_codes.DONE
    assert "fifo: 1 of 4 jobs refused (d); its figures are of the others" in " ".join(result.stderr.split())


def test_all_policies_are_known_to_compare() -> None:
    assert simulation._policies("all") == experiment.policy_names()
    assert {"themis", "fifo", "fluid-fair-share"} <= set(experiment.policy_names())


# --- sweep ----------------------------------------------------------------------------------------------------------


def test_sweep_has_a_row_for_each_run_and_a_group_for_each_setting(trace: Path) -> None:
    words = ("sweep", trace, "--cluster", "1x2", "--policies", "fifo,fluid-fair-share", "--overheads", "none")
    answer = document(*words, "--set", "lease_s=300,600", "--seeds", "0-1", "--jobs", "1")
    assert answer["schema"] == "sweep/v1"
    assert [(row["policy"], row["settings"].get("lease_s"), row["seed"]) for row in answer["rows"]] == [
        ("fifo", "300", 0),
        ("fifo", "300", 1),
        ("fifo", "600", 0),
        ("fifo", "600", 1),
        ("fluid-fair-share", None, 0),
        ("fluid-fair-share", None, 1),
    ]
    assert len(answer["groups"]) == 3
    assert answer["groups"][0]["figures"]["makespan_s"] == {"mean": 170.0, "low": 170.0, "high": 170.0}
    assert answer["inputs"]["trace"] == str(trace)
    assert answer["inputs"]["settings"]["round_pause_s"] == 0.0
    assert answer["inputs"]["costs"]["start_s"] == 0.0
    assert any("fluid-fair-share" in sentence for sentence in answer["inputs"]["notes"])
    result = run(*words, "--set", "lease_s=300,300,600", "--seeds", "0-1", "--jobs", "1")
    assert [line for line in result.stderr.splitlines() if line] == answer["inputs"]["notes"]
    table = result.stdout
    assert re.search(r"^POLICY +LEASE_S +SEEDS +AVG JCT ", table)
    assert re.search(r"^fifo +300 +0-1 +136.7 \+- 0.0 ", table, re.MULTILINE)


@pytest.mark.parametrize(
    ("text", "seeds"), [("0-3", [0, 1, 2, 3]), ("0,3,5", [0, 3, 5]), ("7", [7]), ("1, 0-2", [1, 0, 2])]
)
def test_seeds_are_ranges_and_lists(text: str, seeds: list[int]) -> None:
    assert simulation._seeds(text) == seeds


@pytest.mark.parametrize(("seeds", "text"), [([4], "4"), ([3, 0, 1, 2], "0-3"), ([0, 2, 3, 7], "0,2-3,7")])
def test_seeds_are_shown_as_they_are_written(seeds: list[int], text: str) -> None:
    assert simulation._shortly(seeds) == text
    assert simulation._seeds(text) == sorted(seeds)


def test_jobs_that_never_end_are_a_failure_of_a_sweep_too(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = experiment.execute

    def execute(wanted: Experiment) -> Run:
        whole = real(replace(wanted, policy=fluid.NAME), None)
        lost = replace(whole.jobs[0], state="unfinished")
        return replace(whole, policy="fifo", jobs=(lost, *whole.jobs[1:]) if wanted.seed == 1 else whole.jobs)

    monkeypatch.setattr(sweeping, "execute", execute)
    words = ("sweep", trace, "--cluster", "1x2", "--policies", "fifo", "--seeds", "0-1", "--jobs", "1", "--json")
    result = run(*words)
    assert result.exit_code == exit_codes.FAILED
    assert "1 job never ended under fifo; repeat with --seed 1" in result.stderr
    assert len(json.loads(result.stdout.splitlines()[0])["rows"]) == 2


@pytest.mark.parametrize(("policy", "times"), [("themis", 1), ("fifo", 0), (fluid.NAME, 0)])
def test_the_solver_is_compiled_before_what_needs_it(
    trace: Path, monkeypatch: pytest.MonkeyPatch, policy: str, times: int
) -> None:
    real, done = experiment.execute, list[str]()
    monkeypatch.setattr(simulation.auction, "prepare", lambda: done.append("compiled"))
    for module in (experiment, sweeping):
        monkeypatch.setattr(module, "execute", lambda wanted, *_: real(replace(wanted, policy=fluid.NAME), None))
    run("simulate", trace, "--cluster", "1x2", "--policy", policy)
    run("sweep", trace, "--cluster", "1x2", "--policies", policy, "--jobs", "1", "--seeds", "0-1")
    assert done == ["compiled"] * times * 2


# --- what is wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("simulate", "/none.csv", "--cluster", "1x2"), "/none.csv cannot be read"),
        (("simulate", "TRACE", "--cluster", "two"), "the cluster 'two' is no size"),
        (("simulate", "TRACE", "--cluster", "1x2", "--policy", "best"), "the policy 'best' is not known"),
        (("simulate", "TRACE", "--cluster", "1x2", "--overheads", "some"), "overheads are 'some'"),
        (("simulate", "TRACE", "--cluster", "1x2", "--lease", "long"), "--lease is 'long'"),
        (("simulate", "TRACE", "--cluster", "1x2", "--lease", "1s"), "the settings: arbiter.lease_s is 1.0"),
        (("simulate", "TRACE", "--cluster", "1x2", "--fairness-knob", "7"), "policy.themis.fairness_knob is "),
        (("simulate", "TRACE", "--cluster", "1x2", "--set", "probe_s"), "--set is 'probe_s'"),
        (("simulate", "TRACE", "--cluster", "1x2", "--min-duration", "x"), "--min-duration is 'x'"),
        (
            ("simulate", "TRACE", "--cluster", "1x2", "--lease", "500", "--set", "lease_s=300"),
            "lease_s is set twice",
        ),
        (("compare", "TRACE", "--cluster", "1x2", "--set", "bid_s=3", "--set", "bid_s=2"), "bid_s is set twice"),
        (("simulate", "TRACE", "--cluster", "1x2", "--fairness-knob", "nan"), "policy.themis.fairness_knob is "),
        (("simulate", "TRACE", "--cluster", "1x2", "--set", "node_timeout_s=5"), "node_timeout_s has no effect here"),
        (
            ("simulate", "TRACE", "--cluster", "1x2", "--set", "tenants_only=true"),
            "the settings: arbiter.tenants_only is true and no tenant is named",
        ),
        (("simulate", "themis:1?search=single", "--cluster", "1x2"), "search is 'single'; give one of all, halving"),
        (("simulate", "themis:1?tenants=99999999999999999999", "--cluster", "1x2"), "tenants is 99999999999999999999"),
        (("compare", "TRACE", "--cluster", "1x2", "--policies", "fifo,best"), "the policy 'best' is not known"),
        (("compare", "TRACE", "--cluster", "1x2", "--policies", ","), "--policies names none"),
        (("sweep", "TRACE", "--cluster", "1x2", "--seeds", "3-1"), "--seeds is '3-1'"),
        (("sweep", "TRACE", "--cluster", "1x2", "--seeds", "all"), "--seeds is 'all'"),
        (("sweep", "TRACE", "--cluster", "1x2", "--set", "lease_s=,"), "--set lease_s=, has no values"),
        (("sweep", "TRACE", "--cluster", "1x2", "--set", "a=1", "--set", "a=2"), "--set a is there twice"),
        (("sweep", "TRACE", "--cluster", "1x2", "--set", "leash_s=300"), "there is no setting 'leash_s'"),
    ],
)
def test_a_mistake_is_one_sentence_and_a_next_step(trace: Path, words: tuple[str, ...], sentence: str) -> None:
    given = [str(trace) if word == "TRACE" else word for word in words]
    result = run(*given)
    assert (result.exit_code, result.stdout) == (exit_codes.USAGE, "")
    said, next_step = result.stderr.splitlines()
    assert said.startswith(f"gpu-arbiter: {sentence}")
    assert next_step.startswith("next: ")
    answer = json.loads(run(*given, "--json").stdout)
    assert (answer["schema"], f"gpu-arbiter: {answer['error']}") == ("error/v1", said)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("tenant,share\n", "names no tenant; give lines of tenant and share"),
        ("tenant,share\na,1\nb,2\na,3\n", "line 4 names a again; give each tenant one line"),
        ("tenant,weight\na,1\n", "line 1: the columns are tenant, weight; name them tenant and share"),
        ("tenant\n", "line 1: the columns are tenant; name them tenant and share"),
        ("", "names no tenant; give lines of tenant and share"),
        ("tenant,share\na,0\n", "line 2: share must be more than 0; give tenant and share"),
        ("tenant,share\nTeam A,1\n", "line 2: tenant cannot be that; use lower-case letters, digits and dashes"),
        ("tenant,share\na\n", "line 2: share must be a number, and is nothing; give tenant and share"),
    ],
)
def test_a_file_of_tenants_that_is_wrong_is_one_sentence(trace: Path, tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "shares.csv").write_text(text)
    result = run("simulate", trace, "--cluster", "1x2", "--tenants", tmp_path / "shares.csv")
    assert (result.exit_code, result.stdout) == (exit_codes.USAGE, "")
    assert sentence in result.stderr.splitlines()[0]


# --- how far it is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["simulate", "compare", "sweep"])
def test_a_tenant_of_whom_the_trace_has_no_job_is_noted(trace: Path, tmp_path: Path, verb: str) -> None:
    (tmp_path / "shares.csv").write_text("tenant,share\nbbo,5\nann,1\n")
    flag = "--policy" if verb == "simulate" else "--policies"
    words = (verb, trace, "--cluster", "1x2", flag, fluid.NAME, "--tenants", tmp_path / "shares.csv")
    said = f"{tmp_path}/shares.csv names bbo, of whom the trace has no job; bob is not named and has weight 1"
    assert run(*words).stderr.splitlines().count(said) == 1
    answer = document(*words)
    inputs = answer["runs"][0]["inputs"] if verb == "compare" else answer["inputs"]
    assert inputs["notes"].count(said) == 1


def test_who_waits_is_told_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(simulation, "LINE_EVERY_S", 0.0)
    with simulation._progress("fifo", "job", as_json=False) as told:
        told(10, 60)
    assert capsys.readouterr().err == "fifo: 10 of 60 jobs\n"
    with simulation._progress("fifo", "job", as_json=True) as told:
        told(10, 60)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(simulation, "LINE_EVERY_S", 1e9)
    with simulation._progress("fifo", "job", as_json=False) as told:
        told(10, 60)
    assert capsys.readouterr().err == ""


def test_a_bar_is_drawn_after_a_while_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with simulation._bar("fifo") as told:
        told(10, 60)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(simulation, "PATIENCE_S", 0.0)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    with simulation._bar("fifo") as told:
        told(10, 60)
        told(20, 60)
    assert "20/60" in capsys.readouterr().err


def test_slurms_accounting_becomes_a_trace(tmp_path: Path) -> None:
    told = (
        "101|ana|2026-11-20T10:00:00|3600|billing=8,cpu=8,gres/gpu=2,mem=64G,node=1\n"
        "102_1|bob|2026-11-20T09:30:00|600|billing=8,cpu=8,gres/gpu:a100=1,gres/gpu=1,mem=64G,node=1\n"
        "103|bob|2026-11-20T10:05:00|50|billing=8,cpu=8,mem=64G,node=1\n"  # no GPU
        "104|eve|2026-11-20T10:06:00|0|billing=8,cpu=8,gres/gpu=1,mem=64G,node=1\n"  # never ran
    )
    made = subprocess.run(
        [sys.executable, ROOT / "examples" / "from_sacct.py"], input=told, capture_output=True, text=True, check=True
    ).stdout
    assert made.splitlines()[1:] == ["102_1,0,1,600,bob", "101,1800,2,3600,ana"]
    (tmp_path / "trace.csv").write_text(made)
    assert [(app.tenant, app.gpus) for app in load(tmp_path / "trace.csv").apps] == [("bob", 1), ("ana", 2)]


# --- the guide ------------------------------------------------------------------------------------------------------


def test_the_guide_describes_every_figure_flag_and_knob(trace: Path) -> None:
    text = (ROOT / "docs" / "simulator.md").read_text()
    figures = results.summary(experiment.execute(Experiment(str(trace), "1x2", fluid.NAME)))
    for name in figures:
        base = re.sub(r"(_uniform)?(_cut)?$", "", name) if "rho" in name else name
        assert f"`{base}`" in text, base
    for row in (results.JobRow, results.AppRow):
        for name in row.__struct_fields__:
            assert f"`{name}`" in text, name
    for name in experiment.GENERATOR_KEYS:
        assert f"`{name}`" in text, name
    for verb in ("simulate", "compare", "sweep"):
        help_text = run(verb, "--help").stdout
        for flag in re.findall(r"--[a-z-]+", help_text):
            assert flag in text or flag == "--help", (verb, flag)
