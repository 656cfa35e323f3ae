"""submitit's own scripts on a site with real processes: its examples, its errors, and a preemption without loss."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.thread_site import ThreadSite, thread_site

if find_spec("submitit") is None:
    pytest.skip("submitit missing: pip install 'gpu-arbiter[submitit]'", allow_module_level=True)

import submitit

from app_agent.client import Client
from app_agent.control import ChangesRequest, Control
from app_agent.integrations import submitit_job
from app_agent.integrations.submitit import GpuArbiterJob, app_of

#: The first example of submitit's README, but for the name of the cluster.
README = """
import submitit

def add(a, b):
    return a + b

# executor is the submission interface (logs are dumped in the folder)
executor = submitit.AutoExecutor(folder="log_test", cluster="gpuarbiter")
# set timeout in min, and partition for running the job
executor.update_parameters(timeout_min=1, slurm_partition="dev")
job = executor.submit(add, 5, 7)  # will compute add(5, 7)
print(job.job_id)  # ID of your job

output = job.result()  # waits for completion and returns output
assert output == 12  # 5 + 7 = 12...  your addition was computed in the cluster
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadSite]:
    with thread_site(tmp_path_factory.mktemp("submitit")) as running:
        yield running


@pytest.fixture(autouse=True)
def url(site: ThreadSite, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GPU_ARBITER_URL", f"unix://{site.socket}")
    monkeypatch.chdir(tmp_path)
    GpuArbiterJob.watcher.clear()


@pytest.fixture
def executor(tmp_path: Path) -> submitit.AutoExecutor:
    return submitit.AutoExecutor(folder=tmp_path / "log_test", cluster="gpuarbiter")


def until(reached: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def local(text: str, name: str) -> Any:
    """What `text` defines under `name`, as in a script: submitit sends it by value."""
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(textwrap.dedent(text), space)
    return space[name]


add = local("def add(a, b):\n    return a + b", "add")


# --- submitit's examples --------------------------------------------------------------------------------------------


def test_the_example_of_the_readme_runs_with_the_name_of_the_cluster_alone_changed(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(README)
    done = subprocess.run((sys.executable, "example.py"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Client().app(done.stdout.strip()).wait(PATIENCE_S).state == "finished"


def test_a_host_with_an_app_agent_is_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert submitit.AutoExecutor(folder=tmp_path).cluster == "gpuarbiter"
    monkeypatch.setenv("GPU_ARBITER_URL", f"unix://{tmp_path}/none.sock")
    assert submitit.AutoExecutor(folder=tmp_path).cluster == "local"


def test_an_array_gives_a_result_for_each_pair(executor: submitit.AutoExecutor) -> None:
    jobs = executor.map_array(add, [1, 2, 3], [10, 20, 30])
    assert [job.result() for job in jobs] == [11, 22, 33]
    until(lambda: {job.state for job in jobs} == {"COMPLETED"})  # a result is there before its process has ended
    app = app_of(jobs[0].job_id)
    assert [job.job_id for job in jobs] == [f"{app}_{index}" for index in range(3)], "one app for all"
    assert Client().app(app).record().ended == {"finished": "0-2"}


def test_each_job_of_an_array_has_an_end_of_its_own(executor: submitit.AutoExecutor, tmp_path: Path) -> None:
    act = local(
        """
        def act(how, folder):
            import os, time, submitit
            from pathlib import Path
            if how == "die":
                os._exit(3)
            while how == "wait" and not Path(folder, "go").exists():
                time.sleep(0.01)
            return how, submitit.JobEnvironment().job_id
        """,
        "act",
    )
    executor.update_parameters(gpuarbiter_array_parallelism=1)
    how = ["die", "end", "wait", "wait", "never"]
    died, ended, waits, cancelled, never = jobs = executor.map_array(act, how, [str(tmp_path)] * 5)
    assert ended.result() == ("end", ended.job_id)
    died.wait()
    until(lambda: waits.state == "RUNNING")
    assert [job.state for job in jobs] == ["FAILED", "COMPLETED", "RUNNING", "PENDING", "PENDING"]
    assert [job.done() for job in jobs] == [True, True, False, False, False]
    cancelled.cancel()
    with pytest.raises(submitit.core.utils.UncompletedJobError, match="state: CANCELLED"):
        cancelled.result()
    assert waits.state == "RUNNING"
    (tmp_path / "go").touch()
    assert waits.result() == ("wait", waits.job_id)
    assert never.result() == ("never", never.job_id)


def test_a_hundred_jobs_are_watched_by_one_thread_that_asks_for_changes_only(
    executor: submitit.AutoExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = executor.submit(time.sleep, 600)
    try:
        executor.update_parameters(gpuarbiter_after=[first.job_id])
        jobs = executor.map_array(add, range(100), range(100))
        assert jobs[99].state == "PENDING"
        asked: list[tuple[object, ...]] = []
        ask = Control._ask
        monkeypatch.setattr(Control, "_ask", lambda self, *some, **more: asked.append(some) or ask(self, *some, **more))
        for _ in range(5):
            assert {job.state for job in jobs} == {"PENDING"}
            assert not any(job.done() for job in jobs)
        assert {type(request) for request, *_ in asked} <= {ChangesRequest}, "asked for changes only"
        assert len(asked) < 20, "a thousand looks; once for each change that was told meanwhile"
        jobs[0].cancel()
        jobs[0].wait()
    finally:
        first.cancel()  # else it keeps its GPU from the tests that follow
    for job in jobs:
        job.wait()
    assert {job.state for job in jobs} == {"CANCELLED"}
    assert sum(thread.name == "gpu-arbiter-submitit" for thread in threading.enumerate()) <= 1


def test_jobs_of_a_batch_come_as_they_complete(executor: submitit.AutoExecutor) -> None:
    with executor.batch():
        jobs = [executor.submit(add, number, 1) for number in range(4)]
    done = submitit.helpers.as_completed(jobs, timeout=PATIENCE_S, poll_frequency=0.05)
    assert sorted(job.result() for job in done) == [1, 2, 3, 4]


# --- what a job tells -----------------------------------------------------------------------------------------------


def test_a_job_finds_its_environment(executor: submitit.AutoExecutor, tmp_path: Path) -> None:
    tell = local(
        """
        def tell():
            import os, submitit
            env = submitit.JobEnvironment()
            return env.cluster, env.job_id, env.num_tasks, env.global_rank, str(env.paths.stdout), os.getcwd()
        """,
        "tell",
    )
    job = executor.submit(tell)
    assert job.result() == ("gpuarbiter", job.job_id, 1, 0, str(job.paths.stdout), str(tmp_path))


def test_output_is_in_the_files_that_submitit_names_and_the_log_says_where(executor: submitit.AutoExecutor) -> None:
    speak = local("def speak():\n    import sys\n    print('out')\n    print('err', file=sys.stderr)", "speak")
    job = executor.submit(speak)
    job.wait()
    assert "out\n" in job.stdout()
    assert "err\n" in job.stderr()
    assert "err\n" not in job.stdout()
    log = [line.strip() for line in Client().app(job.job_id).logs()]
    assert log == [f"output is in {job.paths.stdout}", f"output is in {job.paths.stderr}"]
    executor.update_parameters(stderr_to_stdout=True)
    job = executor.submit(speak)
    job.wait()
    assert {"out", "err"} <= set(job.stdout().split())
    assert job.stderr() is None


def test_an_exception_is_told_with_its_trace_and_is_not_repeated(executor: submitit.AutoExecutor) -> None:
    job = executor.submit(add, 1, "x")
    assert isinstance(job.exception(), submitit.core.utils.FailedJobError)
    with pytest.raises(submitit.core.utils.FailedJobError, match="unsupported operand"):
        job.result()
    until(lambda: job.state == "FAILED")
    record = Client().app(job.job_id).record()
    assert len(record.tasks) == 1
    assert "TypeError: unsupported operand" in record.reason


def test_a_cancelled_job_is_done_without_a_result(executor: submitit.AutoExecutor) -> None:
    job = executor.submit(time.sleep, 600)
    until(lambda: job.state == "RUNNING")
    assert not job.done()
    job.cancel()
    with pytest.raises(submitit.core.utils.UncompletedJobError, match="CANCELLED"):
        job.result()
    assert job.done()


def test_a_job_read_from_a_pickle_is_the_same_job(executor: submitit.AutoExecutor) -> None:
    job = executor.submit(add, 2, 3)
    job.wait()
    GpuArbiterJob.watcher.clear()
    other = pickle.loads(pickle.dumps(job))
    until(lambda: other.state == "COMPLETED")
    assert (other.job_id, other.result()) == (job.job_id, 5)


def test_a_job_of_which_nothing_is_known_is_done_and_says_so(executor: submitit.AutoExecutor, tmp_path: Path) -> None:
    job = GpuArbiterJob(folder=tmp_path, job_id="me-none1")
    assert job.done()
    with pytest.raises(submitit.core.utils.UncompletedJobError, match=r"MISSING[\s\S]*there is no app me-none1"):
        job.result()


def test_parameters_reach_the_app(executor: submitit.AutoExecutor) -> None:
    tell = local("def tell():\n    import os\n    return os.environ['GPU_ARBITER_GPUS'], os.environ['A']", "tell")
    executor.update_parameters(
        name="mine", gpus_per_node=2, cpus_per_task=1, mem_gb=0.5, gpuarbiter_env={"A": "b"}, gpuarbiter_setup=["A=c"]
    )
    job = executor.submit(tell)
    assert job.result() == ("2", "c")
    assert Client().app(job.job_id).record().name == "mine"


def test_a_job_past_its_limit_has_timed_out(site: ThreadSite, tmp_path: Path) -> None:
    executor = submitit.AutoExecutor(folder=tmp_path / "log", cluster="gpuarbiter")
    executor.update_parameters(gpuarbiter_timeout_min=0.02)
    with pytest.raises(submitit.core.utils.UncompletedJobError, match=r"TIMEOUT[\s\S]*time limit of 1.2 s"):
        executor.submit(time.sleep, 600).result()


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"tasks_per_node": 2}, "tasks_per_node is 2, and a job of gpu-arbiter is one process.*torchrun"),
        ({"nodes": 2}, "nodes is 2, and a job of gpu-arbiter is one process.*torchrun"),
        ({"gpus_per_node": 0}, "gpus_per_node is 0.*give 1 or more"),
        ({"gpuarbiter_partition": "dev"}, "Unknown argument 'partition' for executor 'gpuarbiter'"),
        ({"gpuarbiter_setup": "module load cuda"}, r"setup is 'module load cuda'; give a list.*\['module load cuda'\]"),
    ],
)
def test_a_parameter_without_a_meaning_here_is_refused_by_name(
    executor: submitit.AutoExecutor, parameters: dict[str, Any], says: str
) -> None:
    with pytest.raises((ValueError, NameError, TypeError), match=says):
        executor.update_parameters(**parameters)


def test_what_the_site_refuses_is_a_failed_submission(executor: submitit.AutoExecutor) -> None:
    executor.update_parameters(gpus_per_node=3)
    with pytest.raises(submitit.core.utils.FailedSubmissionError, match="gpus is 3, and the largest node has 2"):
        executor.submit(add, 1, 2)
    executor.update_parameters(gpus_per_node=1, gpuarbiter_tenant="Team A")
    with pytest.raises(submitit.core.utils.FailedSubmissionError, match="tenant is 'Team A'"):
        executor.submit(add, 1, 2)


# --- preemption -----------------------------------------------------------------------------------------------------

#: Counts to 100 and tells where it began; `checkpoint` is submitit's.
COUNTING = """
import time, submitit

class Counting(submitit.helpers.Checkpointable):
    def __init__(self):
        self.count, self.begins = 0, []

    def __call__(self, folder, last):
        from pathlib import Path
        self.begins.append(self.count)
        while self.count < last or not Path(folder, "go").exists():
            self.count += 1
            Path(folder, "count").write_text(str(self.count))
            time.sleep(0.01)
        return self.begins, self.count

    def checkpoint(self, folder, last):
        return submitit.helpers.DelayedSubmission(self, folder, last)
"""


def events() -> list[str]:
    with Control() as control:
        return [event["what"] for event in control.query("events")["events"]]


def tasks_of(job: GpuArbiterJob) -> list[str]:
    return list(Client().app(job.job_id).record().tasks)


def count_of(folder: Path) -> int:
    file = folder / "count"
    return int(file.read_text() or 0) if file.exists() else 0


@pytest.mark.parametrize("how", ["requeue", "hold"])
def test_a_preempted_callable_goes_on_from_its_checkpoint(
    site: ThreadSite, executor: submitit.AutoExecutor, tmp_path: Path, how: str
) -> None:
    job = executor.submit(local(COUNTING, "Counting")(), str(tmp_path), 50)
    until(lambda: count_of(tmp_path) > 20)
    if how == "requeue":
        job._interrupt()
    else:
        with Control() as control:
            control.act("hold", job.job_id)
            until(lambda: not Client().app(job.job_id).record().gpus)
            control.act("release", job.job_id)
    until(
        lambda: len(Client().app(job.job_id).record().tasks) and "-a1" in str(Client().app(job.job_id).record().tasks)
    )
    (tmp_path / "go").touch()
    (first, second), count = job.result()
    assert first == 0
    assert second > 20
    assert count >= max(second, 50)
    record = Client().app(job.job_id).wait(PATIENCE_S)
    assert (record.state, record.steps_lost) == ("finished", 0)
    assert f"{job.job_id}.0-a0 on n1, preempted (saved and left as it was told)" in events()


def test_preempted_jobs_of_an_array_go_on_each_from_its_own_checkpoint(
    executor: submitit.AutoExecutor, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    jobs = executor.map_array(local(COUNTING, "Counting")(), map(str, folders), [50, 60])
    until(lambda: min(map(count_of, folders)) > 20)
    jobs[0]._interrupt()
    app = app_of(jobs[0].job_id)
    until(lambda: set(Client().app(app).record().tasks) == {f"{app}.0-a1", f"{app}.1-a1"})
    for folder in folders:
        (folder / "go").touch()
    for job, last in zip(jobs, (50, 60), strict=True):
        (first, second), count = job.result()
        assert (first, second > 20, count >= last) == (0, True, True)


def test_a_callable_that_misses_the_first_signal_saves_at_sigterm(
    executor: submitit.AutoExecutor, tmp_path: Path
) -> None:
    deaf = "import signal; self.begins or signal.signal(signal.SIGUSR2, signal.SIG_IGN)"
    counting = COUNTING.replace("from pathlib import Path\n", f"from pathlib import Path\n        {deaf}\n")
    executor.update_parameters(gpuarbiter_grace_s=0.5)
    job = executor.submit(local(counting, "Counting")(), str(tmp_path), 50)
    until(lambda: count_of(tmp_path) > 20)
    job._interrupt()
    until(lambda: tasks_of(job) == [f"{job.job_id}.0-a1"])
    (tmp_path / "go").touch()
    begins, _ = job.result()
    assert begins[1] > 20


def test_a_plain_function_that_is_preempted_begins_again(executor: submitit.AutoExecutor, tmp_path: Path) -> None:
    append = local(
        """
        def append(folder):
            import time
            from pathlib import Path
            with Path(folder, "begun").open("a") as file:
                file.write("x")
            while not Path(folder, "go").exists():
                time.sleep(0.01)
            return Path(folder, "begun").read_text()
        """,
        "append",
    )
    job = executor.submit(append, str(tmp_path))
    until((tmp_path / "begun").exists)
    job._interrupt()
    until(lambda: tasks_of(job) == [f"{job.job_id}.0-a1"])
    (tmp_path / "go").touch()
    assert job.result() == "xx"


def test_a_forked_child_that_is_terminated_saves_nothing(executor: submitit.AutoExecutor) -> None:
    parent = local(
        """
        import submitit

        class Parent(submitit.helpers.Checkpointable):
            def __call__(self):
                import multiprocessing, time
                fork = multiprocessing.get_context("fork")
                here, there = fork.Pipe()
                child = fork.Process(target=lambda: (there.send("begun"), time.sleep(600)))
                child.start()
                here.recv()
                child.terminate()
                child.join()
                return child.exitcode

            def checkpoint(self):
                raise AssertionError("a child saves")
        """,
        "Parent",
    )
    assert executor.submit(parent()).result() == -signal.SIGTERM


def test_a_job_whose_result_was_written_as_it_was_cut_off_is_not_run_again(
    executor: submitit.AutoExecutor, tmp_path: Path
) -> None:
    job = executor.submit(add, 1, 2)
    job.wait()
    job.paths.submitted_pickle.unlink()
    environment = os.environ | {"SUBMITIT_EXECUTOR": "gpuarbiter", "GPU_ARBITER_JOB": f"{job.job_id}.0"}
    line = (sys.executable, "-m", "app_agent.integrations.submitit_job", str(job.paths.folder))
    assert subprocess.run(line, env=environment, check=False).returncode == 0


def test_a_checkpoint_that_was_cut_off_is_put_right(tmp_path: Path) -> None:
    old, new = tmp_path / "1_submitted.pkl", tmp_path / "1_submitted.pkl.save_tmp"
    old.write_text("old")
    new.write_text("half")
    submitit_job._settle(old)
    assert (old.read_text(), new.exists()) == ("old", False)
    old.rename(new)  # submitit removes the old one before it renames the new one
    submitit_job._settle(old)
    assert (old.read_text(), new.exists()) == ("old", False)
