"""Simulated jobs that ask for a kind of GPUs, on a cluster of two kinds."""

from __future__ import annotations

from pathlib import Path

import pytest

from arbiter.core.registry import POLICIES
from simulator.experiment import Experiment, execute
from simulator.figures.results import Run
from simulator.workload import load
from simulator.workload.plans import WorkloadError

#: Four jobs of an hour that ask for one of the two H200, four that ask for one of the two A100, one for an H100.
TRACE = "job_id,submit_s,gpus,duration_s,gpu_type,min_memory_gib\n" + "".join(
    [
        *(f"h{number},0,1,3600,h200,\n" for number in range(4)),
        *(f"a{number},0,1,3600,a100|v100,40\n" for number in range(4)),
        "none,0,1,60,h100,\n",
    ]
)
CLUSTER = """
name = "two kinds"
[[machines]]
count = 1
gpus = 2
gpu_type = "NVIDIA A100-SXM4-80GB"
memory_gib = 80
[[machines]]
count = 1
gpus = 2
gpu_type = "NVIDIA H200"
memory_gib = 141
"""


def run(folder: Path, policy: str, trace: str = TRACE) -> Run:
    (folder / "trace.csv").write_text(trace)
    (folder / "cluster.toml").write_text(CLUSTER)
    return execute(Experiment(str(folder / "trace.csv"), str(folder / "cluster.toml"), policy, "none"))


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_each_kind_has_its_own_jobs_and_none_waits_for_the_other(policy: str, tmp_path: Path) -> None:
    found = run(tmp_path, policy)
    done = {app.app: app for app in found.apps}
    assert done["none"].state == "refused"
    assert "needs 1 h100, and there is none of that kind" in done["none"].reason
    ended = [done[f"{kind}{number}"].finish_s for kind in "ha" for number in range(4)]
    assert all(end is not None and end <= 7300.0 for end in ended), "two at a time on two GPUs each take two hours"


def test_alone_an_app_has_the_gpus_of_its_kind(tmp_path: Path) -> None:
    text = "job_id,submit_s,gpus,duration_s,gpu_type\nj,0,2,100,h200\n"
    (app,) = run(tmp_path, "fifo", text).apps
    assert app.alone_s == 100.0
    plan = load(tmp_path / "trace.csv").apps[0]
    assert plan.gpu_types == ("h200",)


@pytest.mark.parametrize(
    ("column", "value", "mend"),
    [
        ("gpu_type", "h100||", "give a type such as h100"),
        ("min_memory_gib", "-1", "give 0 to"),
        ("min_memory_gib", "much", "give a number"),
    ],
)
def test_a_kind_that_is_none_is_refused_by_its_line(column: str, value: str, mend: str, tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(f"job_id,submit_s,gpus,duration_s,{column}\nj,0,1,9,{value}\n")
    with pytest.raises(WorkloadError, match=f"line 2: {column} is .*{mend}"):
        load(file)
