"""Which site a node agent obeys, and how it is heard again after another party has spoken in its name."""

from __future__ import annotations

from msgspec.structs import replace

from node_agent.core.agent import NodeAgent
from node_agent.core.events import Adopted, Complaint, NodeFacts, RememberFence, RememberIncarnation, StartWorker
from node_agent.core.plan_news import INCARNATION_MAX
from protocol.core import Received
from protocol.messages import ARBITER, NodePlan, NodeReport, Party
from tests.support.arbiter_site import SETTINGS, sent
from tests.support.arbiter_site import Site as ArbiterSite
from tests.support.node_harness import MIB, NODE, Bench, task_order

A = "ada-1.0-a0"
FACTS = NodeFacts(NODE, "r1", "boot", 7, 2.0, idle_bytes_max=0, parked_bytes_max=512 * MIB)


def a_bench(*, site: str = "", fence: tuple[int, int] = (0, 0), leaves_site: bool = False) -> Bench:
    bench = Bench(fresh=True)
    bench.core = NodeAgent(FACTS, fence, site=site, leaves_site=leaves_site)
    bench.say(Adopted(()))
    bench.measure()
    return bench


def report(bench: Bench) -> NodeReport:
    bench.wait(3.0)
    found = bench.report()
    assert found is not None
    return found


# --- the site -------------------------------------------------------------------------------------------------------


def test_a_node_belongs_to_the_site_of_its_first_plan_writes_it_down_and_says_so() -> None:
    bench = a_bench()
    assert report(bench).site == ""
    effects = bench.plan(task_order(A, 0), site="s-ours")
    assert effects[0] == RememberFence(1, 1, "s-ours")
    assert bench.all(StartWorker)
    assert report(bench).site == "s-ours"


def test_no_plan_is_obeyed_of_an_arbiter_that_does_not_know_what_was_obeyed_here() -> None:
    bench = a_bench(site="s-ours", fence=(3, 9))
    bench.epoch, bench.seq = 4, 7
    bench.plan(task_order(A, 0), site="s-ours", after=7)
    complaint = bench.only(Complaint).sentence
    assert "its arbiter knows the plans up to 7 only, and this node has obeyed plan 9 of epoch 3" in complaint
    assert not bench.all(StartWorker)
    told = report(bench)
    assert (told.epoch, told.plan_seq) == (3, 9)
    bench.plan(task_order(A, 0), site="s-ours", after=7)
    bench.plan(task_order(A, 0), site="s-ours", after=7)
    assert bench.seq > 9
    assert not bench.all(Complaint), "once is enough"
    assert not bench.all(StartWorker), "numbers of an arbiter that has forgotten some catch up"
    bench.epoch = 5
    bench.plan(task_order(A, 0), site="s-ours", after=9)
    assert bench.all(StartWorker)
    bench.plan(task_order(A, 0), site="s-ours", after=0)
    assert bench.core.state.plans_refused == 3, "within an epoch nothing is forgotten"


def test_an_arbiter_of_an_earlier_version_does_not_say_what_it_knows_and_is_obeyed() -> None:
    bench = a_bench(site="s-ours", fence=(3, 9))
    bench.epoch = 4
    bench.plan(task_order(A, 0), site="s-ours")
    assert bench.all(StartWorker)


def test_a_plan_of_another_site_is_refused_at_any_epoch_with_one_sentence_that_names_the_mend() -> None:
    bench = a_bench(site="s-ours", fence=(3, 9))
    bench.epoch = 1000
    bench.plan(task_order(A, 0), site="s-theirs")
    complaint = bench.only(Complaint).sentence
    assert "refused a plan of site s-theirs, as this node is of s-ours" in complaint
    assert "gpu-arbiter node-agent --config node.toml --adopt-site" in complaint
    assert not bench.all(RememberFence)
    assert not bench.all(StartWorker)
    bench.plan(task_order(A, 0), site="s-theirs")
    assert not bench.all(Complaint), "once is enough"
    bench.plan(task_order(A, 0))
    assert "an arbiter that names no site" in bench.only(Complaint).sentence
    assert bench.core.state.plans_refused == 3
    assert (report(bench).site, report(bench).epoch) == ("s-ours", 3)


def test_a_plan_of_its_own_site_is_obeyed_after_a_restart() -> None:
    bench = a_bench(site="s-ours", fence=(1, 0))
    bench.plan(task_order(A, 0), site="s-ours")
    assert bench.all(StartWorker)


def test_a_node_that_leaves_its_site_obeys_the_next_one_whose_epochs_are_lower() -> None:
    bench = a_bench(site="s-old", fence=(1000, 50), leaves_site=True)
    told = report(bench)
    assert (told.site, told.epoch, told.plan_seq) == ("", 0, 0), "as a node that is new"
    bench.plan(task_order(A, 0), site="s-new")
    assert bench.all(StartWorker)
    assert bench.all(RememberFence) == [RememberFence(1, 1, "s-new")]
    bench.epoch = 2000
    bench.plan(site="s-old")
    assert bench.only(Complaint)


def test_a_node_that_was_to_leave_its_site_and_hears_it_again_obeys_no_older_plan_of_it() -> None:
    bench = a_bench(site="s-old", fence=(2, 50), leaves_site=True)
    bench.plan(task_order(A, 0), site="s-old")  # of epoch 1
    assert not bench.all(StartWorker)
    bench.epoch = 3
    bench.plan(task_order(A, 0), site="s-old")
    assert bench.all(StartWorker)


# --- the incarnation ------------------------------------------------------------------------------------------------


def test_a_node_agent_counts_on_from_a_forged_incarnation() -> None:
    """A forged report of incarnation 2^51 took the node out, over restarts of both sides."""
    bench = a_bench()
    bench.plan(incarnation=7)
    assert not bench.all(RememberIncarnation)
    forged = 2**51
    effects = bench.plan(incarnation=forged)
    assert RememberIncarnation(forged + 1) in effects
    found = bench.report()
    assert found is not None, "it says so at once"
    assert found.incarnation == forged + 1
    assert f"incarnation {forged}" in bench.only(Complaint).sentence
    bench.plan(incarnation=forged + 1)
    assert not bench.all(RememberIncarnation)


def test_it_does_so_although_the_plan_is_an_old_one() -> None:
    bench = a_bench(fence=(5, 5))
    bench.plan(incarnation=2**40)
    assert bench.core.state.plans_refused == 1
    assert report(bench).incarnation == 2**40 + 1


def test_an_incarnation_beyond_all_counting_changes_nothing_nor_does_another_sites() -> None:
    bench = a_bench(site="s-ours")
    bench.plan(site="s-ours", incarnation=INCARNATION_MAX)
    bench.plan(site="s-theirs", incarnation=1000)
    assert report(bench).incarnation == 7


def test_the_next_start_counts_on_too() -> None:
    bench = Bench(fresh=True)
    bench.core = NodeAgent(replace(FACTS, incarnation=2**51 + 2))
    bench.say(Adopted(()))
    bench.measure()
    bench.plan(incarnation=2**51 + 1)
    assert report(bench).incarnation == 2**51 + 2


def test_after_a_forged_report_the_arbiter_hears_the_node_again_within_a_beat() -> None:
    bench, site = a_bench(), ArbiterSite(SETTINGS)

    def speak() -> None:
        effects = site.hear(Party("node", NODE), report(bench)) + site.wait(SETTINGS.beat_s + 0.1)
        for plan in sent(effects, NodePlan):
            bench.say(Received(ARBITER, plan))

    speak()
    forged = int(site.now) + 10**9
    site.node(NODE, 2, incarnation=forged)
    assert site.arbiter.state.nodes[NODE].incarnation == forged
    for _ in range(3):
        speak()
    known = site.arbiter.state.nodes[NODE]
    assert known.incarnation == forged + 1 == report(bench).incarnation
    assert known.report_seq > 0
