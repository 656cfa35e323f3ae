"""Traces of every format: small ones made by hand, and the recorded ones."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from simulator.workload import AppPlan, JobPlan, Workload, WorkloadError, load
from tests.support.traces import shared

DATA = Path(__file__).resolve().parents[1] / "data" / "simulation"


def lines(workload: Workload) -> list[tuple[str, str, float, int, float]]:
    return [(app.id, app.tenant, app.submit_s, app.gpus, app.jobs[0].duration_s) for app in workload.apps]


def notes(workload: Workload) -> str:
    return "\n".join(workload.notes)


def write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_the_neutral_csv_is_read_in_the_order_jobs_come() -> None:
    workload = load(DATA / "neutral.csv")
    assert workload.name == "neutral"
    assert workload.seed is None
    assert lines(workload) == [
        ("early", "team-a", 5.0, 1, 10.4),
        ("late", "team-b", 60.5, 2, 90.0),
        ("twin", "team-b-2", 60.5, 4, 0.2),
    ]
    assert workload.apps[1] == AppPlan("late", "team-b", 60.5, 2, 2, (JobPlan(90.0, 90),), "ResNet-50", 32, "single")
    assert (workload.apps[0].model, workload.apps[0].batch_size) == ("", 0)


def test_a_job_has_about_a_step_a_second_and_at_least_one() -> None:
    assert [app.jobs[0].steps for app in load(DATA / "neutral.csv").apps] == [10, 90, 1]
    assert [app.jobs[0].steps for app in load(DATA / "neutral.csv", step_s=0.1).apps] == [104, 900, 2]


def test_jobs_that_cannot_run_are_named() -> None:
    said = notes(load(DATA / "neutral.csv"))
    assert "1 jobs left out because they use no GPU: idle\n" in said
    assert "1 jobs left out because their run time is not above 0: still\n" in said


def test_of_many_jobs_left_out_five_are_named_and_all_counted(tmp_path: Path) -> None:
    rows = "".join(f"j{number},0,{number % 8 == 0:d},9\n" for number in range(9))
    said = notes(load(write(tmp_path, "job_id,submit_s,gpus,duration_s\n" + rows)))
    assert "7 jobs left out because they use no GPU: j1, j2, j3, j4, j5, ..." in said


def test_limits_take_the_first_to_come_and_say_so() -> None:
    assert [app.id for app in load(DATA / "neutral.csv", first=2).apps] == ["early", "late"]
    cut = load(DATA / "neutral.csv", until_s=60.5)
    assert [app.id for app in cut.apps] == ["early"]
    assert "2 jobs not taken, as asked: submissions end at 60.5 s" in notes(cut)
    assert "not taken" not in notes(load(DATA / "neutral.csv"))


def test_one_of_several_traces_in_a_file_is_chosen(tmp_path: Path) -> None:
    file = write(tmp_path, "trace,job_id,submit_s,gpus,duration_s\na,0,1,1,5\nb,0,2,1,6\n")
    assert lines(load(file, trace="b")) == [("0", "default", 2.0, 1, 6.0)]
    with pytest.raises(WorkloadError, match=r"holds 2 traces; keep the lines of one of them: a, b"):
        load(file)
    with pytest.raises(WorkloadError, match=r"no trace 'c'; choose one of a, b"):
        load(file, trace="c")


def test_philly_runs_from_the_first_start_to_the_last_end() -> None:
    workload = load(DATA / "cluster_job_log.json")
    assert lines(workload) == [
        ("application_2", "vc-bb22", 0.0, 1, 330.0),
        ("application_1", "vc-aa11", 600.0, 3, 3600.0),
    ]
    said = notes(workload)
    assert "1 jobs left out because they have no attempt: application_3" in said
    assert "1 jobs left out because the log lacks their start or their end: application_4" in said
    assert "1 jobs left out because they use no GPU: application_5" in said
    assert "1 Failed, 2 Killed, 2 Pass" in said


def test_alibaba_2020_rounds_shares_up_and_joins_the_tasks_of_a_job() -> None:
    workload = load(DATA / "pai" / "pai_task_table.csv")
    assert lines(workload) == [
        ("jobA", "user-1", 0.0, 4, 1000.0),  # two instances of a half, and one of one and a half
        ("jobB", "user-2", 10.0, 4, 30.0),
    ]
    said = notes(workload)
    assert "rounded up to whole GPUs, in 1 jobs" in said
    assert "lacks their start or their end: jobC" in said
    assert "they use no GPU: jobD" in said


def test_alibaba_2020_without_the_table_of_jobs_knows_no_tenants(tmp_path: Path) -> None:
    tasks = (DATA / "pai" / "pai_task_table.csv").read_text()
    header = "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type\n"
    workload = load(write(tmp_path, header + tasks, "tasks.csv"))
    assert lines(workload) == [("jobB", "default", 0.0, 4, 30.0), ("jobA", "default", 110.0, 4, 1000.0)]
    assert "no pai_job_table.csv" in notes(workload)


def test_alibaba_2023_runs_from_scheduling_to_deletion() -> None:
    workload = load(DATA / "openb_pod_list_sample.csv")
    assert lines(workload) == [("pod-2", "default", 0.0, 8, 4500.0), ("pod-1", "default", 1000.0, 1, 300.0)]
    said = notes(workload)
    assert "rounded up to whole GPUs, in 1 jobs" in said
    assert "never scheduled: pod-3" in said
    assert "they use no GPU: pod-4" in said


def test_helios_takes_its_virtual_clusters_as_tenants() -> None:
    workload = load(DATA / "cluster_log.csv")
    assert lines(workload) == [("70", "vcy", 0.0, 1, 12.0), ("71", "vcx", 60.0, 8, 3600.0)]
    assert "they use no GPU: 72" in notes(workload)


@pytest.mark.parametrize(
    ("name", "submit_s", "duration_s"),
    [("seven", 7.0, 50.0), ("nine", 0.0, 50.0), ("ten", 7.0, 50.0), ("twelve", 33.0, 777.0)],
)
def test_gavel_divides_steps_by_the_measured_rate(name: str, submit_s: float, duration_s: float) -> None:
    workload = load(DATA / f"{name}.trace", throughputs=DATA / "rates.csv")
    assert lines(workload)[0] == ("0", "default", submit_s, 2, duration_s)  # 6000 steps at 120 a second
    assert (workload.apps[0].model, workload.apps[0].batch_size) == ("LM", 20)


def test_gavel_knows_models_without_a_batch_size_and_names_those_without_a_rate() -> None:
    workload = load(DATA / "nine.trace", throughputs=DATA / "rates.csv")
    assert lines(workload)[1:] == [("1", "default", 12.5, 1, 50.0)]  # 400 steps at 8 a second
    assert (workload.apps[1].model, workload.apps[1].batch_size) == ("A3C", 4)
    assert "1 jobs left out because the table has no rate for their model, batch size and GPUs: 2\n" in notes(workload)


def test_a_trace_with_run_times_needs_no_rates() -> None:
    assert lines(load(DATA / "twelve.trace"))[0][-1] == 777.0
    with pytest.raises(WorkloadError, match=r"nine.trace gives steps and no run times; put throughputs.csv beside it"):
        load(DATA / "nine.trace")


def test_rates_that_lie_beside_a_trace_are_found(tmp_path: Path) -> None:
    (tmp_path / "nine.trace").write_text((DATA / "nine.trace").read_text())
    (tmp_path / "throughputs.csv").write_text((DATA / "rates.csv").read_text())
    assert load(tmp_path / "nine.trace").apps == load(DATA / "nine.trace", throughputs=DATA / "rates.csv").apps


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("a,0,1,1e12", r"line 2: duration_s is '1e12'; give at most 1000000000 seconds$"),
        ("a,2e9,1,5", r"line 2: submit_s is '2e9'; give at most 1000000000 seconds$"),
        ("a,0,1e300,5", r"line 2: gpus is '1e300'; give at most 1000000000$"),
    ],
)
def test_what_no_clock_can_count_is_refused_with_its_line(tmp_path: Path, row: str, words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        load(write(tmp_path, f"job_id,submit_s,gpus,duration_s\n{row}\n"))
    assert lines(load(write(tmp_path, "job_id,submit_s,gpus,duration_s\na,1e9,1,1e9\n"))) == [
        ("a", "default", 1e9, 1, 1e9)
    ]


def test_what_no_clock_can_count_is_refused_by_job_where_times_are_worked_out(tmp_path: Path) -> None:
    pods = "name,num_gpu,gpu_milli,creation_time,deletion_time,scheduled_time\np,1,1000,0,3e9,5\n"
    with pytest.raises(WorkloadError, match=r"run time of job p is 3e\+09 s; 1000000000 seconds are the most"):
        load(write(tmp_path, pods))


HEAD = "job_id,submit_s,gpus,duration_s\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (HEAD + "a,0,1,5\nb,0,1,x\n", "trace.csv line 3: duration_s is 'x'; give a number"),
        (HEAD + "a,0,1.5,5\n", "trace.csv line 2: gpus is '1.5'; give a whole number"),
        (HEAD + "a,nan,1,5\n", "trace.csv line 2: submit_s is 'nan'; give a finite number"),
        (HEAD + "a,0,1,\n", "trace.csv line 2: duration_s is ''; give it a value"),
        (HEAD + ",0,1,5\n", "trace.csv line 2: job_id is ''; give it a value"),
        (HEAD + "a,0,1,5\na,1,1,5\n", "trace: job_id a comes twice; give each job an id of its own"),
        (HEAD + "a,-3,1,5\n", "trace: submit_s of job a is -3; count from 0"),
        (HEAD + "a,0,1,5,6\n", "trace.csv line 2: 5 fields for 4 columns; mend that line"),
        (
            HEAD + "a,0,0,5\n",
            "trace holds no job to simulate: 1 jobs left out because they use no GPU: a; "
            "give a trace with gpus and duration above 0",
        ),
    ],
)
def test_a_wrong_line_is_refused_by_number_field_and_mend(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(WorkloadError) as refused:
        load(write(tmp_path, text))
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("job_id,gpus\na,1\n", ("lacks the columns duration_s, submit_s",)),
        ("a,b\n1,2\n", ("no known format", "Philly")),
        ("", ("no known format",)),
        ('[{"jobid": 3}]', ("no Philly cluster_job_log", "jobid")),
        ('[{"jobid": "j", "submitted_time": "noon", "attempts": [{"start_time": "2017-10-10 00:00:00", '
         '"end_time": "2017-10-10 00:00:01"}]}]', ("line 1", "submitted_time is 'noon'", "2017-10-07 01:12:09")),
    ],
)  # fmt: skip
def test_an_unknown_file_is_refused_with_what_would_do(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(WorkloadError) as refused:
        load(write(tmp_path, text))
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_a_missing_file_and_senseless_limits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="cannot be read: No such file"):
        load(tmp_path / "none.csv")
    with pytest.raises(WorkloadError, match="first is 0"):
        load(DATA / "neutral.csv", first=0)
    with pytest.raises(WorkloadError, match="step_s is 0"):
        load(DATA / "neutral.csv", step_s=0)


def test_two_weeks_of_philly_are_read_whole() -> None:
    workload = load(shared("traces/philly/two_weeks.csv"))
    assert len(workload.apps) == workload.jobs == 31_709
    assert len({app.tenant for app in workload.apps}) == 11
    gpus = Counter(app.gpus for app in workload.apps)
    assert gpus == {1: 29_162, 2: 628, 4: 992, 8: 826, 16: 94, 24: 2, 32: 2, 6: 1, 7: 2}
    assert round(sum(app.gpus * app.jobs[0].duration_s for app in workload.apps) / 3600) == 600_165
    assert not any("left out" in note for note in workload.notes)
    submitted = [app.submit_s for app in workload.apps]
    assert submitted == sorted(submitted)
    assert submitted[0] == 115.0


@pytest.mark.parametrize(
    ("name", "jobs", "tenants", "gpu_hours"),
    [("astraea_fake_job", 500, 20, 2225), ("tiresias_60_job", 60, 1, 7)],
)
def test_the_small_traces_are_read_whole(name: str, jobs: int, tenants: int, gpu_hours: int) -> None:
    workload = load(shared(f"traces/synthetic-small/{name}.csv"))
    assert workload.jobs == jobs
    assert len({app.tenant for app in workload.apps}) == tenants
    used = sum(app.gpus * app.jobs[0].duration_s for app in workload.apps) / 3600
    assert round(used) == gpu_hours
    assert all(app.jobs[0].step_s == 1.0 for app in workload.apps)
