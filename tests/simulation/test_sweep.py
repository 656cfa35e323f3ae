"""Experiments from words, grids of them, and intervals over seeds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import pytest

from simulator import experiment, sweep
from simulator.cluster import parse_cluster
from simulator.experiment import Experiment, ExperimentError

TRACE = "job_id,submit_s,gpus,duration_s\na,0,1,10\nb,0,1,20\nc,5,2,5\n"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    (tmp_path / "three.csv").write_text(TRACE)
    return str(tmp_path / "three.csv")


def base(trace: str, **fields: Any) -> Experiment:
    return Experiment(trace, "1x2", "fifo", overheads="none", **fields)


# --- words ----------------------------------------------------------------------------------------------------------


def test_knobs_reach_the_arbiter_and_its_policy(trace: str) -> None:
    knobs = (("lease_s", "300"), ("policy.themis.fairness_knob", "0.5"), ("policy.themis.leftover", "idle"))
    settings = experiment.settings_of(base(trace, seed=4, knobs=knobs))
    assert (settings.policy, settings.seed, settings.lease_s) == ("fifo", 4, 300.0)
    table = settings.policies["themis"]
    assert (table["fairness_knob"], table["leftover"], table["tenants_first"]) == (0.5, "idle", True)
    assert settings.policy_settings == {}


def test_a_pause_between_rounds_is_an_overhead(trace: str) -> None:
    assert experiment.settings_of(base(trace)).round_pause_s == 0.0
    assert experiment.settings_of(Experiment(trace, "1x2", "fifo")).round_pause_s == 0.5
    assert experiment.settings_of(base(trace, knobs=(("round_pause_s", "3"),))).round_pause_s == 3.0


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"policy": "best"}, "the policy 'best' is not known; choose one of "),
        ({"knobs": (("leash_s", "3"),)}, "there is no setting 'leash_s'; choose one of lease_s, "),
        ({"knobs": (("lease_s", "long"),)}, "lease_s is 'long'; it must be a number"),
        ({"knobs": (("ask_max", "1.5"),)}, "ask_max is '1.5'; it must be a whole number"),
        ({"knobs": (("lease_s", "nan"),)}, "the settings: arbiter: lease_s is nan; it must be a finite number above 0"),
        ({"knobs": (("beat_s", "5"),)}, "beat_s has no effect here: no message is lost and no process dies"),
        ({"knobs": (("app_timeout_s", "5"),)}, "app_timeout_s has no effect here: "),
        ({"knobs": (("node_timeout_s", "5"),)}, "node_timeout_s has no effect here: "),
        ({"knobs": (("lease_s", "10"),)}, "the settings: arbiter.lease_s is 10.0, too short"),
        (
            {"knobs": (("policy.themis.fairness_knob", "7"),)},
            "policy.themis.fairness_knob is 7.0; it must be from 0 to 1",
        ),
        ({"knobs": (("policy.oasis.slots", "1.5"),)}, "policy.oasis.slots is '1.5'; it must be a whole number"),
        (
            {"knobs": (("policy.las.threshold", "1"),)},
            "there is no setting 'policy.las.threshold'; choose one of policy.las.threshold_gpu_s",
        ),
        (
            {"knobs": (("las_threshold_gpu_s", "1"),)},
            "there is no setting 'las_threshold_gpu_s'; las_threshold_gpu_s is now policy.las.threshold_gpu_s",
        ),
        ({"knobs": (("trial_s", "1"),)}, "there is no setting 'trial_s'; trial_s is now interactive_s"),
        ({"knobs": (("reasons_max", "1"),)}, "there is no setting 'reasons_max'; reasons_max is no setting any more"),
        ({"knobs": (("decide_grace_s", "1"),)}, "there is no setting 'decide_grace_s'; choose one of lease_s, "),
        ({"cluster": "0x8"}, "the cluster 0x8 is empty; "),
        ({"overheads": "some"}, "overheads are 'some'"),
        ({"profiles": "/none"}, "the folder of profiles /none holds no table"),
        ({"trace": "/none.csv"}, "/none.csv cannot be read"),
        ({"trace": "themis:3"}, "the trace 'themis:3' asks for workload '3'; write themis:1 or themis:2"),
        (
            {"trace": "themis-nsdi:0"},
            "the trace 'themis-nsdi:0' asks for workload '0'; write themis-nsdi:1 or themis-nsdi:2",
        ),
        ({"trace": "themis:1?apps"}, "the trace 'themis:1?apps' has no key=value"),
        ({"trace": "themis:1?app=2"}, "the trace 'themis:1?app=2' has 'app', which no generator knows"),
        ({"trace": "themis:1?apps=two"}, "the trace 'themis:1?apps=two' has apps=two, which is no number"),
        ({"trace": "themis:1?apps=2&apps=3"}, "the trace 'themis:1?apps=2&apps=3' has apps twice; give it once"),
        ({"trace": "themis:1?search=foo"}, "search is 'foo'; give one of all, halving, hyperband, curve"),
    ],
)
def test_what_is_wrong_is_one_sentence(trace: str, fields: dict[str, Any], sentence: str) -> None:
    given = {"trace": trace, "cluster": "1x2", "policy": "fifo", "overheads": "none"} | fields
    with pytest.raises(ExperimentError) as wrong:
        experiment.prepare([Experiment(**given)])
    assert str(wrong.value).startswith(sentence)
    assert "\n" not in str(wrong.value)


def test_a_drawn_trace_follows_from_its_seed_and_its_arguments() -> None:
    cluster = parse_cluster("2x4")
    trace = "themis:1?apps=5&scale=0.1&contention=2"
    drawn = experiment.workload_of(trace, cluster, seed=3)
    assert (drawn.name, len(drawn.apps)) == (trace, 5)
    assert experiment.workload_of(trace, cluster, seed=4).apps != drawn.apps
    assert experiment.workload_of("themis:1?apps=5&scale=0.1", cluster, seed=3).apps != drawn.apps
    assert experiment.workload_of("themis:2", cluster, seed=3).apps != drawn.apps
    assert experiment.workload_of(trace.replace("themis", "themis-nsdi"), cluster, seed=3).apps != drawn.apps


def test_the_first_jobs_are_whole_apps() -> None:
    drawn = experiment.workload_of("themis:1?apps=9&scale=0.2", parse_cluster("2x4"))
    sizes = [len(app.jobs) for app in drawn.apps]
    assert len(experiment.beginning(drawn, 0).apps) == 9
    assert len(experiment.beginning(drawn, sum(sizes[:3])).apps) == 3
    assert len(experiment.beginning(drawn, sum(sizes[:3]) + sizes[3] - 1).apps) == (3 if sizes[3] > 1 else 4)
    assert len(experiment.beginning(drawn, 1).apps) >= 1


# --- grids ----------------------------------------------------------------------------------------------------------


def test_a_grid_is_every_combination_in_order(trace: str) -> None:
    knobs = {"lease_s": ("300", "600"), "fairness_knob": ("0", "1")}
    grid = sweep.grid(base(trace), ["themis", "fluid-fair-share"], knobs, [0, 1])
    assert [(run.policy, *(value for _, value in run.knobs), run.seed) for run in grid] == [
        ("themis", "300", "0", 0),
        ("themis", "300", "0", 1),
        ("themis", "300", "1", 0),
        ("themis", "300", "1", 1),
        ("themis", "600", "0", 0),
        ("themis", "600", "0", 1),
        ("themis", "600", "1", 0),
        ("themis", "600", "1", 1),
        ("fluid-fair-share", 0),
        ("fluid-fair-share", 1),
    ]


def test_a_grid_says_once_what_its_runs_share(trace: str) -> None:
    grid = sweep.grid(
        base(trace), ["fluid-fair-share", "themis"], {"lease_s": ("300",), "policy.themis.leftover": ("idle",)}, [0, 1]
    )
    notes: list[list[str]] = [["drawn", "a"], ["drawn", "b"], ["drawn"], []]
    inputs = sweep.inputs(grid, [{"notes": own} for own in notes], 60.0)
    assert {name: inputs[name] for name in ("trace", "cluster", "overheads", "profiles", "first")} == {
        "trace": trace, "cluster": "1x2", "overheads": "none", "profiles": "built-in", "first": 0,
    }  # fmt: skip
    assert (inputs["notes"], inputs["min_duration_s"]) == (["drawn", "a", "b"], 60.0)
    assert (inputs["costs"]["start_s"], inputs["settings"]["round_pause_s"], inputs["settings"]["probe_s"]) == (0, 0, 2)
    assert not {"lease_s", "policy", "seed", "beat_s"} & inputs["settings"].keys()
    assert inputs["settings"]["policy.themis.fairness_knob"] == 0.8
    assert not {"policy.themis.leftover", "policy.las.threshold_gpu_s", "policies"} & inputs["settings"].keys()
    alone = sweep.inputs(grid[:2], [], 60.0)
    assert (alone["settings"], alone["costs"]) == ({}, {})


def test_rows_come_in_order_whoever_makes_them(trace: str) -> None:
    experiments = sweep.grid(base(trace), ["fluid-fair-share"], {}, [2, 0, 1])
    told: list[tuple[int, int]] = []
    here = sweep.sweep(experiments, progress=lambda done, whole: told.append((done, whole)))
    assert [row["seed"] for row in here] == [2, 0, 1]
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert here[0]["notes"][0] == "the trace names no tenants: all jobs are of 'default'"
    # Two GPUs: `a` and `b` alone to 5; then 2/3 each until `a` has its 10 at 12.5, when `b` has 10 of 20 and `c` 5 of
    # 10; 1 each until `c` ends at 17.5 and `b` at 22.5.
    figures = here[0]["summary"]
    assert (figures["jobs_out"], figures["makespan_s"]) == (3, pytest.approx(22.5))
    assert figures["avg_jct_s"] == pytest.approx((12.5 + 22.5 + 12.5) / 3)
    there = sweep.sweep(experiments, processes=2)
    measured = {"cpu_s", "jobs_per_cpu_s", "peak_rss_bytes"}
    for one, other in zip(here, there, strict=True):
        assert one["seed"] == other["seed"]
        assert all(other["summary"][name] == value for name, value in one["summary"].items() if name not in measured)


def test_without_its_library_a_sweep_says_what_to_do(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experiments = sweep.grid(base(trace), ["fluid-fair-share"], {}, [0, 1])
    monkeypatch.setitem(sys.modules, "joblib", None)
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(
        ExperimentError, match=r"^more than one process needs joblib; pip install 'gpu-arbiter\[sweep\]', or sweep with"
    ):
        sweep.sweep(experiments, processes=2)
    with pytest.raises(ExperimentError, match=r"^--dask needs distributed; pip install 'distributed', or leave --dask"):
        sweep.sweep(experiments, dask="tcp://nowhere:1")


def test_a_dask_cluster_gets_the_runs_in_order(trace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Future:
        def __init__(self, value: Any) -> None:
            self.value = value

        def result(self) -> Any:
            return self.value

    class Client:
        def __init__(self, address: str) -> None:
            assert address == "tcp://scheduler:8786"

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *how: object) -> None:
            pass

        def map(self, function: Any, items: Any, *, pure: bool) -> list[Future]:
            assert not pure
            return [Future(function(item)) for item in items]

    class Library:
        pass

    library: Any = Library()
    library.Client = Client
    monkeypatch.setitem(sys.modules, "distributed", library)
    rows = sweep.sweep(sweep.grid(base(trace), ["fluid-fair-share"], {}, [1, 0]), dask="tcp://scheduler:8786")
    assert [row["seed"] for row in rows] == [1, 0]


def test_an_interval_is_students() -> None:
    # 1, 2, 3: deviation 1, so 4.303 / sqrt(3).
    three = sweep.interval([1.0, 2.0, 3.0])
    assert three["mean"] == 2.0
    assert three["high"] == pytest.approx(2.0 + 2.4844, abs=1e-3)
    assert three["low"] == pytest.approx(2.0 - 2.4844, abs=1e-3)
    assert sweep.interval([5.0]) == {"mean": 5.0, "low": None, "high": None}
    assert sweep.student_t(30) == 2.042
    assert sweep.student_t(31) == pytest.approx(2.0395, abs=1e-3)
    assert sweep.student_t(120) == pytest.approx(1.9799, abs=1e-3)


def test_groups_are_over_seeds_alone() -> None:
    rows: list[dict[str, Any]] = [
        {
            "policy": policy,
            "settings": {"lease_s": lease},
            "seed": seed,
            "summary": {"x": value, "y": None, "seed": seed},
        }
        for policy, lease, seed, value in [
            ("a", "1", 0, 2.0),
            ("a", "1", 1, 4.0),
            ("a", "2", 0, 9.0),
            ("b", "1", 0, 1.0),
        ]
    ]
    first, second, third = sweep.groups(rows)
    assert (first["seeds"], first["figures"]["x"]["mean"], list(first["figures"])) == ([0, 1], 3.0, ["x"])
    assert (second["settings"], second["figures"]["x"]["mean"]) == ({"lease_s": "2"}, 9.0)
    assert (third["policy"], third["figures"]["x"]["low"]) == ("b", None)


def test_the_same_seed_gives_the_same_rows_in_fresh_interpreters(trace: str) -> None:
    program = (
        "import sys, json\n"
        "from simulator import experiment\n"
        "from simulator.figures import results\n"
        "run = experiment.execute(experiment.Experiment(sys.argv[1], '2x4', 'fluid-fair-share', seed=3))\n"
        "document = results.document(run)\n"
        "for name in results.MEASURED: del document['summary'][name]\n"
        "print(json.dumps(document))\n"
    )
    root = Path(__file__).resolve().parents[2]
    texts = {
        subprocess.run(
            [sys.executable, "-c", program, "themis:2?apps=4&scale=0.1"],
            cwd=root,
            env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
