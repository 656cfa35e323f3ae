"""The benchmark of a whole site: its document in a tiny form on a real broker, and how its figures are reckoned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from arbiter.core.effects import RoundRecord
from benchmarks.site import planned
from benchmarks.sites.cores import Course, Used, shares, used_by
from benchmarks.sites.crowd import CROWDING, SPARE_NODE, Crowd
from benchmarks.sites.figures import depth, goals, grants_of, queues_of, rounds_told, timed
from benchmarks.sites.record import Account, Record, Span
from protocol.core import Send
from protocol.messages import ARBITER, AppId, GpuId, Holdings, LeaseId, LeaseTerms, NodeId, NodePlan, ProbeReply
from tests.support import rabbitmq
from tests.support.needs import lack
from tests.support.traces import ROOT

APP = AppId("o0-1")


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.broker
def test_a_tiny_site_tells_of_its_rounds_its_daemons_and_its_queues() -> None:
    if not rabbitmq.available():
        lack("rabbitmq-server is not installed; see scripts/ensure-rabbitmq.sh")
    sizes = ("--nodes", "3", "--gpus", "2", "--apps", "6", "--rounds", "1", "--tries", "2", "--policy", "fifo")
    command = [sys.executable, "benchmarks/site.py", *sizes, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["schema"] == "bench-site/v1"
    assert (told["site"]["gpus_in_all"], told["enrolment"]["nodes"], told["enrolment"]["apps"]) == (6, 4, 6)
    rounds = told["rounds"]
    assert rounds["count"] > 0
    assert 0.0 < rounds["p50_s"] <= rounds["p95_s"] <= rounds["max_s"]
    assert {*rounds["phases"]} == {"probe", "offer", "decide", "grant", "obey"}
    assert rounds["phases"]["grant"]["messages"] > 0.0 == rounds["phases"]["probe"]["messages"]
    assert {*told["daemons"]} == {"arbiter", "broker", "node agents", "app agents"}
    assert all(each["cpu_share"] > 0.0 and each["rss_mib"] > 10.0 for each in told["daemons"].values())
    assert all(each["waited_share"] > 0.0 for each in told["daemons"].values())
    assert 0.0 < rounds["arbiter_ran"]["p50_s"] <= rounds["arbiter_ran"]["p95_s"] < told["watched_s"]
    assert [len(each.split()) for each in told["load"]] == [3, 3]
    assert {*told["queues"]} == {"before", "after", "arbiter_max", "lanes"}
    assert told["submit_to_grant"]["tries"] == 2
    assert told["submit_to_grant"]["in_vain"] == 0
    assert {*told["goals"][0]} == {"name", "goal", "ours", "met"}
    assert told["restated_per_s"]["NodeReport"] > 0.0


def record(*, took_s: float) -> RoundRecord:
    return RoundRecord(7, 100.0, took_s, (APP,), (APP,), (), (GpuId("g"),), (), proven=True, facts={})


def test_a_round_lasts_until_the_last_grant_is_heard_and_each_phase_until_the_next_begins() -> None:
    heard = {
        "Probe": Span(100.1, 100.2),
        "ProbeReply": Span(100.1, 100.3),
        "Offer": Span(100.5, 100.6),
        "Bid": Span(100.6, 101.0),
    }
    found = timed(record(took_s=1.5), heard, [101.6, 102.0, 109.0])
    assert found.phases == pytest.approx({"probe": 0.5, "offer": 0.5, "decide": 0.5, "grant": 0.5})
    assert found.seconds == pytest.approx(2.0)


def test_a_round_uses_what_the_arbiter_used_until_the_last_grant_is_heard() -> None:
    course = Course()
    for at, ran_s, waited_s in ((100.0, 1.0, 0.0), (101.0, 1.5, 0.2), (103.0, 2.5, 2.2)):
        course.note(at, Used(ran_s, waited_s))
    found = timed(record(took_s=0.5), {}, [102.0, 109.0], course.between)
    assert found.used == Used(pytest.approx(0.25), pytest.approx(0.1)), "109 is too late to be a grant of this round"
    granted = timed(record(took_s=1.5), {}, [102.0], course.between)
    assert granted.used == Used(pytest.approx(1.0), pytest.approx(1.2)), "half of the two seconds in which all was used"
    assert shares({"arbiter": course}, 101.0, 103.0) == {"arbiter": {"cpu_share": 0.5, "waited_share": 1.0}}
    told = rounds_told([found, granted], gpus=1, accounts=[])
    assert (told["arbiter_ran"]["max_s"], told["arbiter_waited"]["max_s"]) == pytest.approx((1.0, 1.2))


def test_what_a_process_has_used_is_of_all_its_threads(tmp_path: Path) -> None:
    for thread, words in (("7", "1000000000 500000000 3"), ("8", "250000000 0 1")):
        (tmp_path / "7" / "task" / thread).mkdir(parents=True)
        (tmp_path / "7" / "task" / thread / "schedstat").write_text(words)
    (tmp_path / "7" / "task" / "9").mkdir()  # a thread that has just ended
    assert used_by(7, tmp_path) == Used(pytest.approx(1.25), pytest.approx(0.5))


def test_a_new_lease_is_of_the_round_that_was_decided_last() -> None:
    first, second = record(took_s=1.0), replace(record(took_s=1.0), round=8, at=110.0)
    assert grants_of([second, first], [100.5, 101.5, 110.5, 111.2]) == {7: [101.5, 110.5], 8: [111.2]}


def test_a_round_without_questions_is_all_decision() -> None:
    found = timed(record(took_s=0.25), {})
    assert found.phases == pytest.approx({"probe": 0.0, "offer": 0.0, "decide": 0.25, "grant": 0.0})
    nobody = timed(record(took_s=0.25), {"Probe": Span(100.1, 100.2)})
    assert nobody.phases["probe"] == pytest.approx(0.25)


def test_messages_are_those_of_all_drivers_for_each_round() -> None:
    nodes, apps = Account.opened(), Account.opened()
    nodes.news["NodePlan"] = 6
    apps.news["Probe"], apps.news["ProbeReply"], apps.restated["AppReport"] = 4, 2, 100
    rounds = [timed(record(took_s=took_s), {}) for took_s in (0.1, 0.3)]
    told = rounds_told(rounds, gpus=2, accounts=[nodes, apps])
    assert told["messages"] == 6.0
    assert told["phases"]["probe"]["messages"] == told["phases"]["obey"]["messages"] == 3.0
    assert told["whole"]["count"] == 2
    assert rounds_told(rounds, gpus=3, accounts=[nodes, apps])["whole"]["count"] == 0


def test_what_is_said_again_is_no_news() -> None:
    noted = Record()
    plan, holdings = NodePlan(NodeId("n0"), 1, 4, (), ()), Holdings(APP, 1, 1, (), ())
    noted.hear(plan)
    noted.hear(plan)
    noted.hear(holdings)
    noted.hear(Holdings(APP, 1, 2, (), (), acked=9))
    noted.hear(Holdings(APP, 1, 3, (LeaseTerms(LeaseId("o0-1/1"), GpuId("g"), NodeId("n0"), "r", "s", 1, 9.0),), ()))
    noted.say(Send(ARBITER, ProbeReply(APP, 7, 1.0)))
    account = noted.take()
    assert account.news == {"NodePlan": 1, "Holdings": 2, "ProbeReply": 1}
    assert account.restated == {"NodePlan": 1, "Holdings": 1}
    assert {*account.rounds[7]} == {"ProbeReply"}
    assert len(account.grants) == 1
    assert APP in noted.granted
    assert noted.take() == Account.opened()


def test_queues_are_read_as_the_broker_lists_them() -> None:
    queues = queues_of("Listing queues\narbiter.inbox\t3\nnode.n0\t5\n")
    assert queues == {"arbiter.inbox": 3, "node.n0": 5}
    assert depth(queues) == {"messages": 8, "deepest": "node.n0", "deepest_messages": 5}
    assert depth({"a": 0}) == depth({}) == {"messages": 0, "deepest": "", "deepest_messages": 0}


def test_a_queue_that_grows_misses_its_goal() -> None:
    def of(after: int, lanes: int = 0) -> bool:
        told = {
            "queues": {"before": {"messages": 10}, "after": {"messages": after}, "lanes": {"messages": lanes}},
            "rounds": {"p95_s": 0.5, "arbiter_ran": {"p95_s": 0.6}},
            "submit_to_grant": {"p95_s": None},
        }
        rounds, ran, grants, queues = goals(told, agents=20)
        assert (rounds["met"], ran["met"], grants["met"]) == (True, False, False), "no time at all meets no goal"
        return bool(queues["met"])

    assert of(30)
    assert not of(31)
    assert not of(30, lanes=1)


def test_the_crowd_asks_for_more_than_there_is_and_its_later_apps_as_its_earlier_ones() -> None:
    crowd = Crowd(nodes=30, gpus=4, apps=25)
    specs = [spec for owner in crowd.owners for spec in crowd.specs_of(owner)]
    assert len(specs) == 25
    asked = sum(spec.gang * len(spec.trials) for spec in specs)
    assert 30 * 4 < asked < 2 * CROWDING * 30 * 4
    assert [len(crowd.specs_of(owner)) for owner in crowd.owners] == [10, 10, 5]
    assert crowd.gang_of(AppId("o2-6")) == crowd.gang_of(AppId("o2-1")) == crowd.specs_of(crowd.owners[2])[0].gang
    assert crowd.gang_of(AppId("spare-3")) == 1
    assert crowd.node_parties[-1] == SPARE_NODE
    assert sum(spec.gpus for spec in crowd.node_specs) == 31 * 4


def test_a_size_that_cannot_be_is_named() -> None:
    command = [sys.executable, "benchmarks/site.py", "--nodes", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 2
    assert "--nodes is 0; give 1 or more" in done.stderr


def test_a_beat_in_which_a_node_would_be_lost_is_refused_with_the_range(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        planned(["--beat-s", "21"])
    assert "--beat-s is 21; give 0.1 to 20 seconds" in capsys.readouterr().err
    plan, _ = planned(["--beat-s", "20"])
    assert plan.settings.beat_s == plan.told["beat_s"] == 20.0
