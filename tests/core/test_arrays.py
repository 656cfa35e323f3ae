"""Arrays: one app with a job for each index, at most so many at a time."""

from __future__ import annotations

from itertools import product

import pytest
from msgspec.structs import replace

from app_agent.core import search
from app_agent.core.host import Accepted, Cancel, Declined, record_of
from app_agent.core.model import Done, Dropped, Failed, Stopping, Waiting
from app_agent.core.reporting import ARRAY_INDEX, WAITING_TOLD
from app_agent.core.spec import AT_ONCE_MAX, array_of, array_text, mistake
from arbiter.core.arbiter import Arbiter
from arbiter.core.leases.plans import WHEREABOUTS_MAX
from arbiter.ledger import Ledger
from arbiter.queries import Queries
from protocol.core import Received, Send
from protocol.messages import (
    ARBITER,
    JOBS_MAX,
    AppId,
    Grant,
    Holdings,
    JobId,
    Measured,
    Party,
    Query,
    ReadLog,
    RoundId,
    TaskId,
)
from tests.core.test_app_host import host_of, submit
from tests.core.test_claim_audit import LEFT_S, Court, running
from tests.support.app_harness import Bench, exited, spec_of, status, terms
from tests.support.arbiter_site import SETTINGS, Site, gpu_id, task, wish


@pytest.mark.parametrize(
    ("text", "indices", "at_most"),
    [
        ("0-3", (0, 1, 2, 3), 0),
        ("0-19%4", tuple(range(20)), 4),
        ("7", (7,), 0),
        ("9,1,3-5", (1, 3, 4, 5, 9), 0),
        ("0-20:5", (0, 5, 10, 15, 20), 0),
        ("1-3,2-4%2", (1, 2, 3, 4), 2),
    ],
)
def test_an_array_is_written_as_slurm_writes_it(text: str, indices: tuple[int, ...], at_most: int) -> None:
    assert array_of(text) == (indices, at_most)
    assert array_of(array_text(indices)) == (indices, 0)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "is no array"),
        ("a-b", "is no array"),
        ("3-1", "the smaller one first"),
        ("0-9:0", "a step of 1 or more"),
        ("0-9%", "write a number"),
        ("0-9%0", "write a number"),
        ("0-5000", f"the most of one array|{JOBS_MAX} at most"),
        ("0-999999999", f"{JOBS_MAX}"),
        ("-1", "is no array"),
    ],
)
def test_what_is_no_array_is_refused_with_the_mend(text: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        array_of(text)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"array": (1, 0)}, "smallest first"),
        ({"array": (1, 1)}, "smallest first"),
        ({"array_at_most": 2}, "there is no array"),
        ({"array": (0, 1), "trials": (("a",), ("b",))}, "leave one of them out"),
        ({"array": (0, 1), "metric": "loss"}, "leave them out"),
    ],
)
def test_fields_that_contradict_an_array_are_refused(changes: dict[str, object], word: str) -> None:
    assert word in str(mistake(spec_of(**changes)))


def test_its_jobs_are_named_by_their_indices_and_find_them_in_their_environment() -> None:
    bench = Bench(array=(3, 7), gang=2)
    assert [wish.job for wish in bench.report.jobs] == ["ada-1.3", "ada-1.7"]
    launch = bench.wish(7).launch
    assert (launch.env[ARRAY_INDEX], launch.command) == ("7", bench.wish(3).launch.command)
    assert launch.checkpoint_dir.endswith("/7")
    assert (bench.report.gang, bench.report.demand_max, bench.report.array) == (2, 4, 2)


def test_at_most_so_many_run_at_a_time_and_the_next_begins_when_one_has_ended() -> None:
    bench = Bench(array=tuple(range(5)), array_at_most=2)
    assert bench.report.demand_max == 2
    bench.grant("n1g0 n1g1")
    assert (bench.wished(0), bench.wished(1)) == ((0, "n1g0"), (0, "n1g1"))
    bench.holdings("n1g0 n1g1", exited("ada-1.0-a0", "n1g0", "finished"), status("ada-1.1-a0", "n1g1"))
    assert (bench.wished(1), bench.wished(2)) == ((0, "n1g1"), (0, "n1g0"))
    assert bench.report.demand_max == 2
    assert bench.report.array_over == 1


def test_a_job_that_has_begun_goes_before_those_that_have_not() -> None:
    bench = Bench(array=tuple(range(4)), array_at_most=2)
    bench.grant("n1g0 n1g1")
    bench.holdings("n1g0 n1g1", status("ada-1.0-a0", "n1g0"), status("ada-1.1-a0", "n1g1", step=5))
    bench.holdings("n1g0", exited("ada-1.0-a0", "n1g0", "finished"), exited("ada-1.1-a0", "n1g1", "preempted", step=5))
    assert bench.wished(1) == (1, "n1g0")
    assert bench.wished(2) == (0, "")


def test_its_record_says_which_jobs_have_ended_and_how() -> None:
    bench = Bench(array=(1, 2, 3, 5, 6, 7), max_restarts=0)
    assert record_of(bench.agent.app).ended == {}
    bench.grant("n1g0")
    for number in (1, 2, 3):
        bench.holdings("n1g0", exited(f"ada-1.{number}-a0", "n1g0", "finished"))
    bench.holdings("n1g0", exited("ada-1.5-a0", "n1g0", "failed", exit_code=3, reason="no data"))
    bench.agent.cancel_job(JobId("ada-1.7"), 0.0)
    assert record_of(bench.agent.app).ended == {"finished": "1-3", "failed": "5", "cancelled": "7"}
    assert record_of(Bench().agent.app).ended == {}


def test_it_has_finished_when_all_of_its_jobs_have() -> None:
    bench = Bench(array=(1, 2))
    bench.grant("n1g0")
    bench.holdings("n1g0", exited("ada-1.1-a0", "n1g0", "finished"))
    assert bench.report.state == "active"
    bench.holdings("n1g0", exited("ada-1.2-a0", "n1g0", "finished"))
    assert (bench.report.state, bench.report.reason) == ("finished", "")


def test_it_has_failed_once_all_have_ended_and_one_has_failed() -> None:
    bench = Bench(array=(1, 2, 3), max_restarts=0)
    bench.grant("n1g0")
    bench.holdings("n1g0", exited("ada-1.1-a0", "n1g0", "failed", exit_code=3, reason="no data"))
    bench.holdings("n1g0", exited("ada-1.2-a0", "n1g0", "finished"))
    assert bench.report.state == "active", "the others go on"
    bench.holdings("n1g0", exited("ada-1.3-a0", "n1g0", "failed", exit_code=5, reason="no disk"))
    over = bench.agent.state.over
    assert over is not None
    assert (over.state, over.exit_code) == ("failed", 5)
    assert over.reason == "2 of 3 jobs failed, the first because ada-1.1 failed: no data"


def test_one_of_its_jobs_can_be_cancelled_and_the_others_go_on() -> None:
    host = host_of()
    app = submit(host, array=(4, 5))
    assert host.handle(Cancel("q", app, f"{app}.4"), 1.0)[0] == Accepted("q", app)
    jobs = host.state.apps[app].jobs
    assert (jobs[0].state, jobs[1].state) == (Dropped(), Waiting(0))
    assert host.records()[0].state == "waiting"
    assert search._failures(host._agents[app].app) == "its owner cancelled 1 of 2 jobs"
    host.handle(Cancel("q", app, f"{app}.5"), 2.0)
    assert (host.records()[0].state, host.records()[0].reason) == (
        "cancelled",
        "all of its jobs were cancelled by its owner",
    )


def test_a_job_that_runs_is_stopped_before_its_gpu_goes_to_the_next() -> None:
    bench = Bench(array=(0, 1), array_at_most=1)
    bench.grant("n1g0")
    bench.holdings("n1g0", status("ada-1.0-a0", "n1g0"))
    bench._keep(bench.agent.cancel_job(bench.agent.state.jobs[0].id, bench.now))
    assert isinstance(bench.agent.state.jobs[0].state, Stopping)
    assert bench.wished(1) == (0, ""), "its process may still be there"
    bench.holdings("n1g0", exited("ada-1.0-a0", "n1g0", "stopped"))
    assert bench.wished(1) == (0, "n1g0")


def test_a_job_of_a_search_and_one_that_there_is_not_cannot_be_cancelled() -> None:
    host = host_of()
    lone, array = submit(host), submit(host, array=(1, 2))
    (why,) = host.handle(Cancel("q", lone, f"{lone}.0"), 1.0)
    assert isinstance(why, Declined)
    assert f"`gpu-arbiter cancel {lone}` ends it all" in why.reason
    (why,) = host.handle(Cancel("q", array, f"{array}.9"), 1.0)
    assert isinstance(why, Declined)
    assert why.missing


def test_a_job_that_is_over_is_told_as_it_ended_when_it_is_cancelled() -> None:
    host = host_of()
    app = submit(host, array=(4, 5))
    host.handle(Received(ARBITER, Grant(app, RoundId(1), 1, 1, (terms("n1g0"),))), 1.0)
    done = replace(exited("ada-1.4-a0", "n1g0", "finished"), job=JobId("ada-1.4"))
    host.handle(Received(ARBITER, Holdings(app, 1, 2, (terms("n1g0"),), (done,), acked=2)), 2.0)
    for job, state in (("4", "finished"), ("5", "cancelled")):
        host.handle(Cancel("q", app, f"{app}.{job}"), 3.0)
        assert host.state_of_job(app, f"{app}.{job}") == state
    (why,) = host.handle(Cancel("q", app, f"{app}."), 4.0)
    assert isinstance(why, Declined), "a dot and nothing behind it is no app"


def test_the_nodes_of_all_jobs_are_remembered_for_their_output() -> None:
    site = Site(SETTINGS)
    site.node("n1", 1)
    gpu = gpu_id("n1", 0)
    for number, attempt in product(range(200), (0, 1)):
        site.play_round(site.app("ana-1", jobs=[wish("ana-1", number, [gpu], attempt=attempt)], array=200))
        site.node("n1", tasks=[task("ana-1", number, [gpu], attempt=attempt)], used=[gpu])
        site.node("n1", tasks=[task("ana-1", number, [gpu], "exited", attempt=attempt, outcome="failed")], used=[])
        assert site.arbiter.state.apps[AppId("ana-1")].ran[-1] == (f"ana-1.{number}-a{attempt}", "n1")
    again = Arbiter.restored(site.arbiter.snapshot())
    assert again.state.apps[AppId("ana-1")].ran == site.arbiter.state.apps[AppId("ana-1")].ran, "in the order of age"
    ran = dict(site.arbiter.state.apps[AppId("ana-1")].ran)
    assert {f"ana-1.{number}-a1" for number in range(200)} <= ran.keys()
    assert len(ran) <= 200 + WHEREABOUTS_MAX


def test_the_output_of_a_job_that_ended_long_ago_is_fetched_from_its_node() -> None:
    site = Site(SETTINGS)
    site.node("n1", 1)
    gpu, jobs = gpu_id("n1", 0), WHEREABOUTS_MAX + 20
    for number in range(jobs):
        site.play_round(site.app("ana-1", jobs=[wish("ana-1", number, [gpu])], array=jobs))
        site.node("n1", tasks=[task("ana-1", number, [gpu])], used=[gpu])
        site.node("n1", tasks=[task("ana-1", number, [gpu], "exited", outcome="finished")], used=[])
    site.app("ana-1", state="finished", array=jobs, array_over=jobs)
    queries = Queries(site.arbiter, Ledger(":memory:"))
    for number in (7, jobs - 1):
        (fetch,) = queries.ask(Party("app", "ana"), Query("q", "log", f"ana-1.{number}"), site.now)
        assert fetch == Send(Party("node", "n1"), ReadLog("q", TaskId(f"ana-1.{number}-a0"), 0))


def test_what_an_array_says_of_jobs_that_have_not_begun_is_no_false_claim() -> None:
    assert Court().round(running(), left_gpu_s=8 * LEFT_S, left_s=8 * LEFT_S, array=8) == ()


def test_what_an_array_says_of_its_last_job_is_compared_but_not_how_long_all_of_it_takes() -> None:
    late = {"array": 8, "array_over": 7, "demand": 8}
    assert Court().round(running(), left_gpu_s=LEFT_S, left_s=LEFT_S, **late) == ()
    (claim,) = Court().round(running(), left_gpu_s=2 * LEFT_S, left_s=LEFT_S, **late)
    assert (claim.what, claim.ratio) == ("left_gpu_s", 2.0)


def test_a_report_of_a_thousand_jobs_tells_those_that_have_begun_and_a_few_that_come_next() -> None:
    bench = Bench(array=tuple(range(1000)), gang=2)
    assert len(bench.report.jobs) == WAITING_TOLD
    assert bench.report.demand_max == 2 * AT_ONCE_MAX
    bench.grant("n1g0 n1g1")
    assert bench.wished(0) == (0, "n1g0 n1g1")
    bench.holdings("n1g0 n1g1", exited("ada-1.0-a0", "n1g0 n1g1", "preempted", step=4))
    assert bench.wished(0) == (1, "n1g0 n1g1"), "one that has begun is told in any case"


def test_how_long_it_takes_is_told_by_waves_of_jobs_as_long_as_those_that_are_known() -> None:
    bench = Bench(array=tuple(range(8)), array_at_most=2, steps_total=0)
    bench.grant("n1g0 n1g1")
    bench.holdings("n1g0 n1g1", status("ada-1.0-a0", "n1g0", step=9, step_s=1.0, total_steps=100))
    bench.tick()
    assert bench.report.left_gpu_s == 90 + 7 * 100
    assert bench.report.left_s == 100 + 3 * 100
    assert bench.report.basis == "measured"


# --- time limits ----------------------------------------------------------------------------------------------------


def test_a_job_that_has_had_its_time_is_stopped_and_fails() -> None:
    bench = Bench(time_limit_s=60.0)
    bench.grant("n1g0")
    bench.holdings("n1g0", status("ada-1.0-a0", "n1g0", step=3, measured=Measured(ran_s=59.0)))
    assert bench.wished() == (0, "n1g0")
    bench.holdings("n1g0", status("ada-1.0-a0", "n1g0", step=4, measured=Measured(ran_s=60.5)))
    assert bench.report.jobs == (), "its task is to be stopped"
    assert bench.report.state == "active"
    bench.holdings("n1g0", exited("ada-1.0-a0", "n1g0", "stopped", measured=Measured(ran_s=61.0)))
    over = bench.agent.state.over
    assert over is not None
    assert (over.state, over.exit_code) == ("failed", 124)
    assert over.reason == "ada-1.0 ran for its time limit of 60 s"


def test_the_time_of_earlier_attempts_counts_and_that_of_waiting_does_not() -> None:
    bench = Bench(time_limit_s=60.0)
    bench.grant("n1g0")
    bench.holdings("n1g0", status("ada-1.0-a0", "n1g0", step=3, measured=Measured(ran_s=50.0)))
    bench.preempt("n1g0")
    bench.holdings("", exited("ada-1.0-a0", "n1g0", "preempted", step=3, measured=Measured(ran_s=52.0)))
    bench.tick(1000.0)
    bench.grant("n1g1")
    bench.holdings("n1g1", status("ada-1.0-a1", "n1g1", step=4, measured=Measured(ran_s=7.0)))
    assert bench.wished() == (1, "n1g1")
    bench.holdings("n1g1", status("ada-1.0-a1", "n1g1", step=4, measured=Measured(ran_s=8.0)))
    assert isinstance(bench.agent.state.jobs[0].state, Stopping)
    bench.holdings("n1g1", exited("ada-1.0-a1", "n1g1", "finished", measured=Measured(ran_s=8.0)))
    assert isinstance(bench.agent.state.jobs[0].state, Done), "it ended by itself before it was stopped"


def test_each_job_of_an_array_has_the_time_for_itself() -> None:
    bench = Bench(array=(0, 1), array_at_most=1, time_limit_s=60.0)
    bench.grant("n1g0")
    bench.holdings("n1g0", status("ada-1.0-a0", "n1g0", measured=Measured(ran_s=61.0)))
    bench.holdings("n1g0", exited("ada-1.0-a0", "n1g0", "stopped"))
    assert isinstance(bench.agent.state.jobs[0].state, Failed)
    bench.holdings("n1g0", status("ada-1.1-a0", "n1g0", measured=Measured(ran_s=10.0)))
    assert bench.wished(1) == (0, "n1g0")
    assert bench.quietly() == replace(bench.report, seq=0)
    assert AppId("ada-1") == bench.report.app
