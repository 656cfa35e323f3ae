"""Which site an arbiter may lead, and what becomes of what its journal does not know (`arbiter.core.members.site`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import pytest
from msgspec.structs import replace

from arbiter.core.arbiter import ABSENCE_BEATS, Arbiter, Configured, Effect
from arbiter.core.effects import EpochTaken, LeaseRecord, Note, Resign
from arbiter.core.members.site import EPOCH_MAX
from arbiter.core.state.model import ArbiterSettings, Draining, Free, Leased
from arbiter.ledger import Ledger
from protocol.core import Connected, Received, Tick
from protocol.messages import (
    Act,
    AppId,
    AppReport,
    GpuId,
    Holdings,
    JobWish,
    NodePlan,
    Party,
    ProbeReply,
    Requirements,
    RoundId,
    TenantId,
    device_of,
    seat,
)
from tests.support.arbiter_site import AUCTION, SETTINGS, Site, gpu_id, notes, sent, task, told_of, wish, with_auction

OURS, THEIRS = "s-ours", "s-theirs"


def a_site(settings: ArbiterSettings = SETTINGS, *, site: str = OURS, adopt: bool = False, alone: bool = False) -> Site:
    """An arbiter with a journal of this site, which has just begun to lead and knows no node."""
    made = Site(None)
    made.handle(Configured(settings, site, adopt=adopt, alone=alone))
    made.lead()
    return made


def resigned(effects: Sequence[Effect]) -> str:
    return "; ".join(effect.why for effect in effects if isinstance(effect, Resign))


def taken(effects: Sequence[Effect]) -> list[EpochTaken]:
    return [effect for effect in effects if isinstance(effect, EpochTaken)]


def running(site: Site, app: str = "ana-1", node: str = "n1", *, index: int = 0) -> str:
    """Let an app train on one GPU of a node, and return that GPU."""
    gpu = gpu_id(node, index)
    site.play_round(site.app(app, run="r", site=OURS) + site.wait(1.0))
    assert site.held(app) == [gpu]
    site.app(app, jobs=[wish(app, 0, [gpu])], run="r", site=OURS)
    report(site, node, {gpu: app})
    return gpu


def report(site: Site, node: str, uses: dict[str, str], *, site_id: str = OURS, **more: object) -> list[Effect]:
    """Report that tasks of these apps run on these GPUs."""
    tasks = [task(app, 0, [gpu]) for gpu, app in uses.items()]
    return site.node(node, tasks=tasks, used=list(uses), site=site_id, **more)  # type: ignore[arg-type]


def a_site_at_work(settings: ArbiterSettings = SETTINGS) -> Site:
    """A site of one node of two GPUs; ana trains on the first."""
    site = a_site(settings)
    site.node("n1", 2, site="")
    site.wait(20.0)
    report(site, "n1", {})
    running(site)
    return site


# --- who may lead ---------------------------------------------------------------------------------------------------


def test_a_first_start_says_nothing_until_a_node_of_another_site_could_have_spoken() -> None:
    site = a_site()
    effects = site.node("n1", 1, site="") + site.app("ana-1") + site.wait(9.0)
    assert sent(effects, NodePlan) == []
    plan = sent(site.wait(2.0), NodePlan)[-1]
    assert (plan.site, plan.incarnation) == (OURS, 1)


def test_alone_on_its_bus_an_arbiter_need_not_wait_for_others() -> None:
    site = a_site(alone=True)
    assert sent(site.node("n1", 1, site=""), NodePlan)[-1].site == OURS


def test_an_arbiter_without_a_journal_resigns_where_a_site_is_at_work_and_has_said_nothing() -> None:
    for alone in (False, True):
        site = a_site(alone=alone)
        effects = site.node("n1", 1, site=THEIRS, plan=(7, 3), tasks=[task("ana-1", 0, [gpu_id("n1", 0)])])
        why = resigned(effects)
        assert "node-n1 belongs to site s-theirs, and this arbiter's journal knows no site" in why
        assert "--adopt-site" in why
        assert sent(effects, NodePlan) == []
        assert site.arbiter.state.nodes == {}


def test_an_app_agent_of_another_site_is_reason_enough_to_resign() -> None:
    site = a_site()
    effects = site.app("ana-1", site=THEIRS)
    assert "app-ana belongs to site s-theirs" in resigned(effects)
    assert site.arbiter.state.apps == {}


def test_a_node_that_obeyed_an_arbiter_of_an_earlier_version_counts_as_anothers() -> None:
    assert "site of an earlier version" in resigned(a_site().node("n1", 1, site="", plan=(7, 3)))


def test_a_journal_of_an_earlier_version_gets_an_id_and_leads_on() -> None:
    site = Site()
    site.node("n1", 1)
    site.handle(Configured(SETTINGS, OURS))
    site.lead()
    effects = site.node("n1", 1, plan=(1, 1))
    assert resigned(effects) == ""
    assert sent(effects + site.wait(5.0), NodePlan)[-1].site == OURS


def test_one_node_of_another_site_is_refused_and_disturbs_nobody() -> None:
    site = a_site_at_work()
    effects = site.node("n2", 4, site=THEIRS, plan=(900, 5))
    assert "belongs to site s-theirs, and this arbiter leads site s-ours; refused" in notes(effects)
    assert sent(effects + site.wait(5.0), NodePlan)[-1].node == "n1"
    assert "n2" not in site.arbiter.state.nodes
    assert site.arbiter.state.epoch == 1
    assert site.held("ana-1")
    assert notes(site.node("n2", 4, site=THEIRS, plan=(900, 5))) == "", "said once"


def test_an_arbiter_that_hears_only_others_gives_up_its_lead() -> None:
    site = a_site_at_work()
    site.lead()
    effects = site.node("n9", 1, site=THEIRS) + site.wait(29.0)
    assert resigned(effects) == ""
    effects = site.wait(10.0)
    assert "node-n9 belongs to site s-theirs, and this arbiter's journal is of site s-ours" in resigned(effects)


# --- what nodes have seen and the journal has not -------------------------------------------------------------------


def restored_from(site: Site, backup: bytes, at: float) -> None:
    """Go on as an arbiter whose folder was restored from a backup that was made when its state was `backup`."""
    site.arbiter = Arbiter.restored(backup)
    site.now += at
    site.journal.clear()
    site.epoch = site.arbiter.state.epoch
    site.lead()


def test_an_older_journal_leads_on_beyond_what_nodes_have_seen_and_keeps_what_runs_there() -> None:
    site = a_site_at_work()
    backup = site.arbiter.snapshot()
    site.lead()
    site.lead()
    assert site.epoch == 3
    site.wait(5.0)
    report(site, "n1", {gpu_id("n1", 0): "ana-1"})
    second = running(site, "bob-1", index=1)
    newest = site.plans["n1"]
    uses = {gpu_id("n1", 0): "ana-1", second: "bob-1"}

    restored_from(site, backup, 30.0)
    assert "bob-1" not in site.arbiter.state.apps
    effects = report(site, "n1", uses, plan=(newest.epoch, newest.seq))
    assert taken(effects) == [EpochTaken(4, OURS)]
    assert "newer than ours (2): this journal is older than what nodes have seen; leading on in epoch 4" in notes(
        effects
    )
    effects += site.app("bob-1", jobs=[wish("bob-1", 0, [second])], run="r", site=OURS)
    assert sent(effects, NodePlan) == []
    effects = site.wait(12.0)
    assert site.held("bob-1") == [second]
    assert told_of(effects)[-1][0] == "bob-1"
    for plan in sent(effects, NodePlan):
        assert plan.epoch == 4
        assert plan.after >= newest.seq, "the node would refuse it, as it has obeyed that one"
        assert {(order.task, order.want) for order in plan.tasks} == {("ana-1.0-a0", "run"), ("bob-1.0-a0", "run")}


def test_a_restored_backup_says_nothing_before_it_has_listened_and_keeps_what_runs() -> None:
    """The arbiter of the backup led on in the same epoch, so no node would refuse the plans of the restored one."""
    site = a_site_at_work()
    backup = site.arbiter.snapshot()
    report(site, "n1", {gpu_id("n1", 0): "ana-1"})
    second = running(site, "bob-1", index=1)
    newest = site.plans["n1"]
    assert newest.epoch == 1

    site.arbiter = Arbiter.restored(backup)
    site.now += 30.0
    site.journal.clear()
    site.handle(Configured(SETTINGS, OURS, restored="a backup of yesterday"))
    effects = site.lead()
    assert site.arbiter.state.epoch == 2
    effects += report(site, "n1", {second: "bob-1"}, plan=(newest.epoch, newest.seq))
    effects += site.app("bob-1", jobs=[wish("bob-1", 0, [second])], run="r", site=OURS)
    effects += site.app("ana-1", run="r", site=OURS)
    assert sent(effects, NodePlan) == [], "it spoke before it had listened"
    assert "restored from a backup of yesterday; it listens before it says anything" in notes(effects)
    assert "ana-1.0-a0" not in site.arbiter.state.tasks, "its node has obeyed later plans, and has it no more"
    effects = site.wait(12.0)
    assert "1 leases go on that it did not know, 0 are over that it knew, 1 apps were new to it" in notes(effects)
    assert site.held("bob-1") == [second]
    plan = sent(effects, NodePlan)[0]
    assert plan.epoch == 2
    assert [(order.task, order.want) for order in plan.tasks] == [("bob-1.0-a0", "run")]
    assert site.arbiter.state.restored == ""
    site.lead()
    assert site.arbiter.state.listens_until is None, "it has listened once"


def test_a_restored_backup_gives_no_gpu_to_two_apps() -> None:
    site = a_site_at_work()
    gpu = gpu_id("n1", 0)
    backup, sent_seq = site.arbiter.snapshot(), site.plans["n1"].seq
    site.arbiter = Arbiter.restored(backup)
    site.now += 30.0
    site.journal.clear()
    site.handle(Configured(SETTINGS, OURS, restored="a backup of yesterday"))
    site.lead()
    report(site, "n1", {gpu: "bob-1"}, plan=(1, sent_seq + 5))
    site.app("bob-1", jobs=[wish("bob-1", 0, [gpu])], run="r", site=OURS)
    site.app("ana-1", run="r", site=OURS)
    effects = site.wait(12.0)
    assert site.held("bob-1") == [gpu]
    assert gpu not in site.held("ana-1")
    assert "1 leases go on that it did not know, 1 are over that it knew" in notes(effects)
    assert site.replayed(snapshot=backup) == site.arbiter.snapshot()


def test_an_arbiter_that_ends_while_it_listens_and_a_gpu_drains_can_be_started_again() -> None:
    """A start asserts that the state is in order, and no plan is said before listening has ended."""
    site = a_site_at_work()
    site.app("ana-1", state="finished", demand=0, run="r", site=OURS)
    assert isinstance(site.gpu_state(gpu_id("n1", 0)), Draining)
    site.handle(Configured(SETTINGS, OURS, restored="a backup of yesterday"))
    site.lead()
    assert site.arbiter.state.listens_until is not None
    Arbiter.restored(site.arbiter.snapshot()).validate()


def test_an_app_that_the_backup_holds_leaves_what_it_is_found_on() -> None:
    """It was released since, of which the journal does not know: the owner, who sees it held, releases it again."""
    site = a_site_at_work()
    gpu = gpu_id("n1", 0)
    site.hear(Party("app", "ana"), Act("act-1", "hold", "ana-1", site=OURS))
    report(site, "n1", {})
    site.handle(Configured(SETTINGS, OURS, restored="a backup of yesterday"))
    site.lead()
    report(site, "n1", {gpu: "ana-1"}, plan=(1, site.arbiter.state.nodes["n1"].plan_seq))
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])], run="r", site=OURS)
    effects = site.wait(12.0)
    state = site.gpu_state(gpu)
    assert isinstance(state, Draining)
    assert (state.lease.app, state.reason) == ("ana-1", "ana-1 is held by ana")
    assert [(order.task, order.want) for order in sent(effects, NodePlan)[-1].tasks] == [("ana-1.0-a0", "vacate")]


def test_no_lease_ends_while_an_arbiter_listens() -> None:
    ends = replace(SETTINGS, policy="las", policies={"las": {"tenure": "lease"}}, lease_s=6.0, admission_wait_s=19.0)
    site = a_site_at_work(ends)
    gpu = gpu_id("n1", 0)
    site.handle(Configured(ends, OURS, restored="a backup of yesterday"))
    site.lead()
    state = site.gpu_state(gpu)
    site.now += 17.0
    report(site, "n1", {gpu: "ana-1"})
    assert isinstance(state, Leased)
    assert state.lease.expires_at < site.now
    assert site.arbiter.state.listens_until is not None
    Arbiter.restored(site.arbiter.snapshot()).validate()
    site.wait(5.0)
    assert site.arbiter.state.listens_until is None
    assert site.held("ana-1") == [gpu]


def test_no_lease_ends_as_an_arbiter_that_adopts_its_own_site_has_listened() -> None:
    """Its journal was the site's all along, so that it is not behind; yet it could renew no lease meanwhile."""
    ends = replace(SETTINGS, policy="las", policies={"las": {"tenure": "lease"}}, lease_s=6.0, admission_wait_s=19.0)
    site = a_site_at_work(ends)
    site.handle(Configured(ends, OURS, adopt=True))
    site.lead()
    site.now += 17.0
    report(site, "n1", {gpu_id("n1", 0): "ana-1"})
    assert (site.arbiter.state.behind, site.arbiter.state.listens_until is None) == (False, False)
    site.wait(5.0)
    assert site.arbiter.state.listens_until is None
    assert site.held("ana-1") == [gpu_id("n1", 0)]


@with_auction
def test_a_gpu_that_has_changed_hands_since_the_backup_stays_with_who_is_on_it() -> None:
    site = a_site_at_work(AUCTION)
    backup, gpu = site.arbiter.snapshot(), gpu_id("n1", 0)
    restored_from(site, backup, 30.0)
    report(site, "n1", {gpu: "bob-1"}, plan=(40, 7))
    site.app("bob-1", jobs=[wish("bob-1", 0, [gpu])], run="r", site=OURS)
    site.app("ana-1", run="r", site=OURS)
    effects = site.wait(12.0)
    assert site.held("bob-1") == [gpu]
    assert site.held("ana-1") == []
    (over,) = [effect for effect in effects if isinstance(effect, LeaseRecord)]
    assert (over.app, over.gpu) == ("ana-1", gpu)
    (order,) = sent(effects, NodePlan)[-1].tasks
    assert (order.task, order.want) == ("bob-1.0-a0", "run")


@pytest.mark.parametrize(("alone", "over"), [("ana-1", 2), ("bob-1", 1)])
def test_an_app_that_has_its_gpus_to_itself_shares_none_with_an_app_of_the_backup(alone: str, over: int) -> None:
    """bob is found on seats of the GPUs of which ana has others in the backup, and one of the two shares none."""
    kinds = {app: {"gang": 2, "demand": 2, "spans": True} if app == alone else {} for app in ("ana-1", "bob-1")}
    site = a_site(replace(SETTINGS, sharing="timeslice", seats=2))
    site.node("n1", 2, site="")
    site.wait(20.0)
    report(site, "n1", {})
    site.app("ana-1", run="r", site=OURS, **kinds["ana-1"])  # type: ignore[arg-type]
    site.wait(1.0)
    assert len(site.held("ana-1")) == over
    backup, sent_seq = site.arbiter.snapshot(), site.plans["n1"].seq
    site.arbiter = Arbiter.restored(backup)
    site.handle(Configured(site.arbiter.state.settings, OURS, restored="a backup of yesterday"))
    site.lead()
    found = [seat(GpuId(gpu_id("n1", index)), 1) for index in (0, 1)][: 3 - over]
    site.node("n1", tasks=[task("bob-1", 0, found)], used=found, site=OURS, plan=(1, sent_seq + 5))
    site.app("bob-1", jobs=[wish("bob-1", 0, found)], run="r", site=OURS, **kinds["bob-1"])  # type: ignore[arg-type]
    said = notes(site.wait(12.0))
    assert site.held("bob-1") == found
    assert {device_of(GpuId(gpu)) for gpu in site.held("ana-1")} & {device_of(gpu) for gpu in found} == set()
    assert f"{len(found)} leases go on that it did not know, 1 are over that it knew" in said


def test_an_app_that_is_found_beside_another_one_is_its_guest() -> None:
    site = a_site(replace(SETTINGS, sharing="timeslice", seats=2))
    site.node("n1", 1, site="")
    site.wait(20.0)
    gpu = running(site)
    found = seat(GpuId(gpu), 1)
    site.handle(Configured(site.arbiter.state.settings, OURS, restored="a backup of yesterday"))
    site.lead()
    report(site, "n1", {gpu: "ana-1", found: "bob-1"}, plan=(1, site.plans["n1"].seq + 5))
    site.app("bob-1", jobs=[wish("bob-1", 0, [found])], run="r", site=OURS)
    site.wait(12.0)
    states = site.gpu_state(gpu), site.gpu_state(found)
    assert [isinstance(each, Leased) and (each.lease.app, each.lease.guest) for each in states] == [
        ("ana-1", False),
        ("bob-1", True),
    ]


def test_what_has_changed_while_an_arbiter_listened_is_said_as_that_ends() -> None:
    site = a_site_at_work()
    gpu = gpu_id("n1", 0)
    site.handle(Configured(SETTINGS, OURS, adopt=True))
    site.lead()
    report(site, "n1", {gpu: "ana-1"})
    assert sent(site.app("ana-1", state="finished", demand=0, run="r", site=OURS), NodePlan) == []
    state = site.gpu_state(gpu)
    assert isinstance(state, Draining)
    listens_until = site.arbiter.state.listens_until
    assert listens_until is not None
    site.arbiter.state.beat_at = site.now = listens_until  # no beat restates it
    plans = sent(site.handle(Tick()), NodePlan)
    assert site.arbiter.state.listens_until is None
    assert [plan.seq for plan in plans if plan.node == "n1"] == [state.plan_seq]
    site.arbiter.validate()


def test_a_task_that_no_app_wishes_there_is_not_adopted() -> None:
    site = a_site_at_work()
    restored_from(site, site.arbiter.snapshot(), 30.0)
    first, second = gpu_id("n1", 0), gpu_id("n1", 1)
    report(site, "n1", {first: "ana-1", second: "bob-1"}, plan=(40, 7))
    site.app("bob-1", jobs=[wish("bob-1", 0, [second], attempt=1)], run="r", site=OURS)
    site.wait(12.0)
    assert isinstance(site.gpu_state(first), Leased)
    assert isinstance(site.gpu_state(second), Free)


def test_a_plan_beyond_the_newest_that_was_sent_says_that_the_journal_forgot_some() -> None:
    """A power cut takes back what was not on the disk yet, epochs never; the numbers of plans of one epoch it may."""
    site = a_site_at_work()
    sent_seq = site.arbiter.state.nodes["n1"].plan_seq
    effects = report(site, "n1", {gpu_id("n1", 0): "ana-1"}, plan=(1, sent_seq + 1))
    assert taken(effects) == [EpochTaken(2, OURS)]


def after_a_power_cut(site: Site, backup: bytes, epoch: int = 0) -> Sequence[Effect]:
    """Go on with a journal that has lost the last moments, while the node went on as it was told.

    Those were of the same epoch, or also of later ones: the newest `epoch` is known from elsewhere.
    """
    site.arbiter = Arbiter.restored(backup)
    site.now += 5.0
    site.journal.clear()
    site.epoch = max(epoch, site.arbiter.state.epoch)
    return site.lead()


def test_a_journal_that_has_lost_its_last_moments_is_told_so_and_keeps_what_was_begun_then() -> None:
    site = a_site_at_work()
    backup = site.arbiter.snapshot()
    second = running(site, "bob-1", index=1)
    newest = site.plans["n1"]
    uses = {gpu_id("n1", 0): "ana-1", second: "bob-1"}

    (plan,) = sent(after_a_power_cut(site, backup), NodePlan)
    assert (plan.epoch, newest.epoch) == (2, 1)
    assert plan.after < newest.seq, "its node cannot tell that this arbiter knows too little"
    effects = report(site, "n1", uses, plan=(newest.epoch, newest.seq))
    words = f"n1 knows plan {newest.seq} of epoch 1, and ours knows its plans up to {plan.after}"
    assert words in notes(effects)
    effects += site.app("bob-1", jobs=[wish("bob-1", 0, [second])], run="r", site=OURS)
    assert sent(effects, NodePlan) == [], "it spoke before it had listened"
    effects = site.wait(12.0)
    assert site.held("bob-1") == [second]
    for plan in sent(effects, NodePlan):
        assert (plan.epoch, plan.after) == (3, newest.seq)
        assert plan.seq > newest.seq
        assert {(order.task, order.want) for order in plan.tasks} == {("ana-1.0-a0", "run"), ("bob-1.0-a0", "run")}
    assert site.replayed(snapshot=backup) == site.arbiter.snapshot()


def ended(site: Site, app: str) -> LeaseRecord:
    """Let an app be granted the second GPU of n1 and finish; return the record of its lease."""
    running(site, app, index=1)
    effects = site.app(app, state="finished", demand=0, run="r", site=OURS)
    effects += report(site, "n1", {gpu_id("n1", 0): "ana-1"})
    (record,) = [effect for effect in effects if isinstance(effect, LeaseRecord)]
    return record


def test_no_lease_gets_the_id_of_one_that_the_journal_has_lost() -> None:
    """The ledger keeps the first record of each id, so it lacked the lease that came after the power cut."""
    site = a_site_at_work()
    site.handle(Configured(SETTINGS, OURS, epoch_in_ids=True))
    backup = site.arbiter.snapshot()
    lost = ended(site, "bob-1")
    newest = site.plans["n1"]
    after_a_power_cut(site, backup)
    report(site, "n1", {gpu_id("n1", 0): "ana-1"}, plan=(newest.epoch, newest.seq))
    site.wait(12.0)
    site.now += 10.0
    later = ended(site, "bob-1")
    with closing(Ledger(":memory:")) as ledger:
        ledger.write(lost, later)
        assert [lease.start for lease in reversed(ledger.leases(limit=9))] == [lost.start, later.start]
    assert later.lease == f"bob-1/{site.arbiter.state.epoch}.{site.arbiter.state.leases_made}"
    assert site.replayed(snapshot=backup) == site.arbiter.snapshot()


def test_what_an_older_version_has_decided_is_replayed_with_the_ids_that_it_gave() -> None:
    """Its last records are written again at a start, and a lease under two ids would count twice."""
    site = a_site_at_work()
    assert ended(site, "bob-1").lease == "bob-1/2"
    site.handle(Configured(SETTINGS, OURS, epoch_in_ids=True))
    assert ended(site, "cyd-1").lease == "cyd-1/1.3"


def test_a_journal_that_has_lost_a_whole_epoch_is_told_so() -> None:
    """The epoch that the node has seen is newer than the journal's, and older than the one that is led in."""
    site = a_site_at_work()
    backup = site.arbiter.snapshot()
    site.lead()
    second = running(site, "bob-1", index=1)
    newest = site.plans["n1"]
    after_a_power_cut(site, backup, newest.epoch)
    assert (newest.epoch, site.arbiter.state.epoch) == (2, 3)
    assert taken(report(site, "n1", {second: "bob-1"}, plan=(newest.epoch, newest.seq))) == [EpochTaken(4, OURS)]
    site.app("bob-1", jobs=[wish("bob-1", 0, [second])], run="r", site=OURS)
    site.wait(12.0)
    assert site.held("bob-1") == [second]


@pytest.mark.parametrize("away_s", [1.0, 60.0])
def test_an_arbiter_that_ends_while_it_listens_with_an_older_journal_listens_again(away_s: float) -> None:
    site = a_site_at_work()
    backup = site.arbiter.snapshot()
    second = running(site, "bob-1", index=1)
    newest, uses = site.plans["n1"], {gpu_id("n1", 0): "ana-1", second: "bob-1"}
    after_a_power_cut(site, backup)
    report(site, "n1", uses, plan=(newest.epoch, newest.seq))
    assert site.arbiter.state.listens_until is not None
    site.now += away_s
    site.arbiter, site.epoch = Arbiter.restored(site.arbiter.snapshot()), site.arbiter.state.epoch
    assert sent(site.lead(), NodePlan) == []
    assert sent(report(site, "n1", uses, plan=(newest.epoch, newest.seq)), NodePlan) == []
    site.app("bob-1", jobs=[wish("bob-1", 0, [second])], run="r", site=OURS)
    orders = sent(site.wait(12.0), NodePlan)[-1].tasks
    assert {(order.task, order.want) for order in orders} == {("ana-1.0-a0", "run"), ("bob-1.0-a0", "run")}


def test_a_journal_that_has_lost_the_word_of_a_new_node_is_told_so_and_keeps_what_runs_there() -> None:
    site = a_site_at_work()
    backup = site.arbiter.snapshot()
    site.node("n2", 1, site="")
    running(site, "cyd-1", index=1)
    gpu = running(site, "bob-1", "n2")
    newest = site.plans["n2"]
    after_a_power_cut(site, backup)
    assert taken(site.node("n3", 1, site="")) == [], "it is new to the site"
    assert taken(report(site, "n2", {gpu: "bob-1"}, plan=(newest.epoch, newest.seq))) == [EpochTaken(3, OURS)]
    site.app("bob-1", jobs=[wish("bob-1", 0, [gpu])], run="r", site=OURS)
    report(site, "n1", {gpu_id("n1", 0): "ana-1"})
    site.wait(12.0)
    assert site.held("bob-1") == [gpu]
    assert [(order.task, order.want) for order in site.plans["n2"].tasks] == [("bob-1.0-a0", "run")]


def a_silent_node_on_which_an_app_has_a_forgotten_gpu(*, known: bool) -> tuple[Site, JobWish, NodePlan]:
    """Bob trains on n2, which the journal does not know if it was cut off before that came; all others have spoken."""
    site = a_site_at_work()
    before = site.arbiter.snapshot()
    site.node("n2", 1, site="")
    backup = site.arbiter.snapshot() if known else before
    running(site, "cyd-1", index=1)
    job = wish("bob-1", 0, [running(site, "bob-1", "n2")])
    newest = site.plans["n1"]
    after_a_power_cut(site, backup)
    uses = {gpu_id("n1", 0): "ana-1", gpu_id("n1", 1): "cyd-1"}
    report(site, "n1", uses, plan=(newest.epoch, newest.seq))
    site.app("bob-1", jobs=[job], run="r", site=OURS)
    assert sent(site.wait(12.0), Holdings) == [], "bob's app agent began the job anew, beside the task on n2"
    return site, job, site.plans["n2"]


@pytest.mark.parametrize("known", [True, False])
def test_a_journal_that_has_lost_its_end_waits_for_a_node_that_is_silent(known: bool) -> None:
    site, job, newest = a_silent_node_on_which_an_app_has_a_forgotten_gpu(known=known)
    effects = report(site, "n2", {job.gpus[0]: "bob-1"}, plan=(newest.epoch, newest.seq))
    assert [(words.app, words.tasks[0].task) for words in sent(effects, Holdings) if words.app == "bob-1"] == [
        ("bob-1", "bob-1.0-a0")
    ]
    assert site.held("bob-1") == list(job.gpus)


@pytest.mark.parametrize("known", [True, False])
def test_a_node_that_stays_silent_is_waited_for_no_longer_than_until_it_is_lost(known: bool) -> None:
    site, _, _ = a_silent_node_on_which_an_app_has_a_forgotten_gpu(known=known)
    report(site, "n1", {gpu_id("n1", 0): "ana-1", gpu_id("n1", 1): "cyd-1"})
    effects = site.wait(SETTINGS.node_timeout_s - 12.0)
    assert {words.app: words.leases for words in sent(effects, Holdings)}["bob-1"] == ()
    assert site.held("ana-1") == [gpu_id("n1", 0)]
    assert ("n2: lost: silent for 30 s" in notes(effects)) == known
    site.arbiter.validate()


@pytest.mark.parametrize("silent", [False, True])
def test_no_attempt_begins_by_an_older_journal_before_its_app_has_spoken(silent: bool) -> None:
    """World 1813000648: the app's agent had vanished, and its first attempt began again beside a later one."""
    site = a_site_at_work()
    first, second = gpu_id("n1", 0), gpu_id("n2", 0)
    site.node("n2", 1, site="")
    backup, ours = site.arbiter.snapshot(), site.plans["n1"].seq

    def report_both() -> Sequence[Effect]:
        """Report that the first attempt is over and that the third lives, unless its node is silent."""
        effects = site.node("n1", site=OURS, plan=(1, ours + 3))
        if not silent:
            third = task("ana-1", 0, [second], attempt=2)
            effects += site.node("n2", tasks=[third], used=[second], site=OURS, plan=(1, ours + 3))
        return effects

    after_a_power_cut(site, backup)
    for _ in range(3):
        effects = [*report_both(), *site.wait(11.0)]
        assert all(plan.tasks == () for plan in sent(effects, NodePlan) if plan.epoch > 2), "it ordered an old attempt"
    assert site.arbiter.state.listens_until is None
    assert site.replayed(snapshot=backup) == site.arbiter.snapshot()
    site.node("n2", site=OURS)
    assert site.plans["n1"].tasks == (), "its journal knows no better now"
    site.app("ana-1", jobs=[wish("ana-1", 0, [first], attempt=3)], run="r", site=OURS)
    assert [(order.task, order.want) for order in site.plans["n1"].tasks] == [("ana-1.0-a3", "run")]


@pytest.mark.parametrize("voice", ["the arbiter was away", "an answer", "a report that came before"])
def test_no_attempt_begins_by_an_older_journal_as_long_as_its_app_has_told_no_newer_wish(voice: str) -> None:
    site = a_site_at_work()
    site.node("n2", 1, site="")
    backup, ours = site.arbiter.snapshot(), site.plans["n1"].seq
    known = [event for _, event in site.journal if isinstance(event, Received) and isinstance(event.message, AppReport)]
    after_a_power_cut(site, backup)
    site.node("n1", site=OURS, plan=(1, ours + 3))
    site.now += 1.0
    match voice:
        case "an answer":
            site.hear(Party("app", "ana"), ProbeReply(AppId("ana-1"), RoundId(1), 2.0))
        case "a report that came before":
            site.handle(known[-1])
        case _:
            site.now += (ABSENCE_BEATS + 1) * SETTINGS.beat_s
    effects: list[Effect] = []
    for _ in range(3):
        for name in ("n1", "n2"):
            effects += site.node(name, site=OURS, plan=(1, ours + 3))
        effects += site.wait(5.0)
    assert site.arbiter.state.listens_until is None
    assert all(plan.tasks == () for plan in sent(effects, NodePlan) if plan.epoch > 2)


def an_app_that_a_power_cut_has_taken_from_the_journal() -> tuple[Site, JobWish, NodePlan]:
    """Bob trains on the second GPU of n1, which has not spoken yet."""
    site = a_site_at_work()
    backup = site.arbiter.snapshot()
    gpu = running(site, "bob-1", index=1)
    newest = site.plans["n1"]
    after_a_power_cut(site, backup)
    return site, wish("bob-1", 0, [gpu]), newest


def test_an_app_with_gpus_that_the_journal_does_not_know_has_the_arbiter_listen_before_it_gives_it_others() -> None:
    site, job, newest = an_app_that_a_power_cut_has_taken_from_the_journal()
    effects = site.app("bob-1", jobs=[job], run="r", site=OURS)
    assert taken(effects) == [EpochTaken(3, OURS)]
    (note,) = [effect for effect in effects if isinstance(effect, Note) and effect.subject == "rounds"]
    assert note.what.startswith(f"bob-1 has {job.gpus[0]}, and ours does not know that app: this journal is older")
    assert sent(site.wait(1.0), Holdings) == []
    report(site, "n1", {gpu_id("n1", 0): "ana-1", job.gpus[0]: "bob-1"}, plan=(newest.epoch, newest.seq))
    site.wait(12.0)
    assert site.held("bob-1") == list(job.gpus)
    assert ("bob-1.0-a0", "run") in [(order.task, order.want) for order in site.plans["n1"].tasks]


def a_known_app_whose_last_grant_a_power_cut_has_taken() -> tuple[Site, list[JobWish], NodePlan]:
    """Ana trains on both GPUs of n1; the journal knows of the first only, and n1 has not spoken yet."""
    site = a_site_at_work()
    first, second = gpu_id("n1", 0), gpu_id("n1", 1)
    backup = site.arbiter.snapshot()
    site.app("ana-1", demand=2, jobs=[wish("ana-1", 0, [first])], run="r", site=OURS)
    site.wait(2.0)
    assert site.held("ana-1") == [first, second]
    jobs = [wish("ana-1", index, [gpu]) for index, gpu in enumerate((first, second))]
    site.app("ana-1", demand=2, jobs=jobs, run="r", site=OURS)
    newest = site.plans["n1"]
    after_a_power_cut(site, backup)
    assert site.held("ana-1") == [first]
    return site, jobs, newest


def test_a_known_app_with_a_gpu_whose_grant_is_lost_has_the_arbiter_listen_before_it_gives_it_to_others() -> None:
    """It answered the app without that lease, so that the job was begun anew; and a round gave the GPU to another."""
    site, jobs, newest = a_known_app_whose_last_grant_a_power_cut_has_taken()
    effects = site.app("ana-1", demand=2, jobs=jobs, run="r", site=OURS)
    assert taken(effects) == [EpochTaken(3, OURS)]
    assert f"rounds: ana-1 has {gpu_id('n1', 1)}, and ours does not know these leases: this journal" in notes(effects)
    effects = site.app("bob-1", run="r", site=OURS) + site.wait(2.0)
    assert sent(effects, Holdings) == []
    tasks = [task("ana-1", index, job.gpus) for index, job in enumerate(jobs)]
    used = [gpu for job in jobs for gpu in job.gpus]
    site.node("n1", tasks=tasks, used=used, site=OURS, plan=(newest.epoch, newest.seq))
    site.wait(12.0)
    assert (site.held("ana-1"), site.held("bob-1")) == (used, [])
    assert [(order.task, order.want) for order in site.plans["n1"].tasks] == [
        ("ana-1.0-a0", "run"),
        ("ana-1.1-a0", "run"),
    ]


@pytest.mark.parametrize("why", ["it leaves the GPU", "it is parked there", "it is another app"])
def test_a_known_app_that_proves_nothing_of_the_journal_has_no_arbiter_listen(why: str) -> None:
    site, jobs, _newest = a_known_app_whose_last_grant_a_power_cut_has_taken()
    if "leaves" in why:
        jobs = [replace(jobs[0], attempt=1)]
        site.hear(Party("app", "ana"), Act("act-1", "hold", "ana-1", site=OURS))
        assert isinstance(site.gpu_state(jobs[0].gpus[0]), Draining)
    if "parked" in why:  # world 82049: so says the app once its lease is over, and its task parked
        jobs = [jobs[0], replace(jobs[1], suspended=True)]
    run = "another" if "another" in why else "r"
    assert taken(site.app("ana-1", demand=2, jobs=jobs, run=run, site=OURS)) == []


def test_an_old_report_that_comes_late_proves_nothing_of_the_journal() -> None:
    site, jobs, _newest = a_known_app_whose_last_grant_a_power_cut_has_taken()
    site.app("ana-1", demand=2, jobs=jobs[:1], run="r", site=OURS)
    site.seqs["app-ana-1"] -= 1
    assert taken(site.app("ana-1", demand=2, jobs=jobs, run="r", site=OURS)) == []


@pytest.mark.parametrize("next_job", [0, 1])
def test_an_app_that_has_not_heard_yet_that_it_lost_a_gpu_proves_nothing_of_the_journal(next_job: int) -> None:
    """Nor does the next job that it begins there meanwhile, as in world 1795783840."""
    site = a_site_at_work()
    gpu = gpu_id("n1", 0)
    site.hear(Party("app", "ana"), Act("act-1", "hold", "ana-1", site=OURS))
    report(site, "n1", {})
    assert isinstance(site.gpu_state(gpu), Free)
    site.lead()
    assert taken(site.app("ana-1", jobs=[wish("ana-1", next_job, [gpu])], run="r", site=OURS)) == []


@pytest.mark.parametrize("leads_anew", [False, True])
def test_an_app_whose_word_of_a_gpu_was_lost_until_it_had_lost_that_gpu_proves_nothing_of_the_journal(
    leads_anew: bool,
) -> None:
    """World 1795820908: its first report with the GPU was lost, and the second came when the lease had ended."""
    site = a_site_at_work()
    site.app("ana-1", demand=2, jobs=[wish("ana-1", 0, [gpu_id("n1", 0)])], run="r", site=OURS)
    site.wait(2.0)
    second = gpu_id("n1", 1)
    assert second in site.held("ana-1")
    site.lead()
    site.hear(Party("app", "ana"), Act("act-1", "hold", "ana-1", site=OURS))
    report(site, "n1", {gpu_id("n1", 0): "ana-1"})
    assert isinstance(site.gpu_state(second), Free)
    if leads_anew:
        site.lead()
    jobs = [wish("ana-1", 0, [gpu_id("n1", 0)]), wish("ana-1", 1, [second])]
    assert taken(site.app("ana-1", demand=2, jobs=jobs, run="r", site=OURS)) == []


@pytest.mark.parametrize("spoke", [False, True])
def test_an_app_that_was_cut_off_since_it_lost_a_gpu_proves_nothing_of_the_journal(spoke: bool) -> None:
    """World 1817013340: it lost another GPU meanwhile, by when the first counted as one that it knew to be lost."""
    site = a_site_at_work()
    first, second = gpu_id("n1", 0), gpu_id("n1", 1)
    site.app("ana-1", demand=2, jobs=[wish("ana-1", 0, [first])], run="r", site=OURS)
    site.wait(2.0)
    assert site.held("ana-1") == [first, second]
    site.hear(Party("app", "ana"), Act("act-1", "hold", "ana-1", site=OURS))
    report(site, "n1", {first: "ana-1"})
    assert isinstance(site.gpu_state(second), Free)
    site.wait(SETTINGS.node_timeout_s + 1.0)
    if spoke:
        site.app("ana-1", demand=2, jobs=[wish("ana-1", 0, [first])], run="r", site=OURS)
    report(site, "n1", {})
    assert isinstance(site.gpu_state(first), Free)
    site.lead()
    late = [wish("ana-1", 0, [first]), wish("ana-1", 1, [second])]
    assert bool(taken(site.app("ana-1", demand=2, jobs=late, run="r", site=OURS))) == spoke


def test_reports_of_an_app_that_waited_while_no_arbiter_led_prove_nothing_of_the_journal() -> None:
    """The first did not know of the GPU yet, and the second had a job there; by then the lease had long ended."""
    site = a_site_at_work()
    first, second = gpu_id("n1", 0), gpu_id("n1", 1)
    site.app("ana-1", demand=2, jobs=[wish("ana-1", 0, [first])], run="r", site=OURS)
    site.wait(2.0)
    report(site, "n1", {first: "ana-1"}, sick=[second])
    report(site, "n1", {first: "ana-1"}, sick=[second])
    assert isinstance(site.gpu_state(second), Free)
    site.now += SETTINGS.node_timeout_s + 1.0
    site.lead()
    site.app("ana-1", demand=2, jobs=[wish("ana-1", 0, [first])], run="r", site=OURS)
    both = [wish("ana-1", 0, [first]), wish("ana-1", 1, [second])]
    assert taken(site.app("ana-1", demand=2, jobs=both, run="r", site=OURS)) == []


@pytest.mark.parametrize("why", ["it has no GPU", "it is of another site", "it comes late"])
def test_an_app_that_proves_nothing_of_the_journal_has_no_arbiter_listen(why: str) -> None:
    site, job, _newest = an_app_that_a_power_cut_has_taken_from_the_journal()
    if why == "it comes late":
        site.now += 1000.0
    jobs = [replace(job, gpus=())] if why == "it has no GPU" else [job]
    assert taken(site.app("bob-1", jobs=jobs, run="r", site="s-other" if "another" in why else OURS)) == []
    assert site.arbiter.state.epoch == 2


def test_an_app_agent_that_speaks_for_an_app_of_others_has_no_arbiter_listen() -> None:
    site, job, _newest = an_app_that_a_power_cut_has_taken_from_the_journal()
    words = AppReport(AppId("bob-1"), TenantId("team"), "x", 9, "active", 1, 1, (job,), Requirements(), site=OURS)
    assert taken(site.hear(Party("app", "eve"), words)) == []


def test_a_journal_that_has_lost_its_last_moments_forgets_what_ended_then() -> None:
    """It would order the same attempt once more, and its node would begin it anew."""
    site = a_site_at_work()
    backup, newest = site.arbiter.snapshot(), site.plans["n1"]
    after_a_power_cut(site, backup)
    site.app("ana-1", run="r", site=OURS)
    report(site, "n1", {}, plan=(newest.epoch, newest.seq + 3))
    assert "ana-1.0-a0" not in site.arbiter.state.tasks
    plan = sent(site.wait(12.0), NodePlan)[-1]
    assert [order for order in plan.tasks if order.task == "ana-1.0-a0"] == []


def three_nodes_after_a_power_cut() -> tuple[Site, dict[str, int]]:
    """A site of n1, where ana trains, n2 and n3, and the number of the newest plan that its journal knows of each."""
    site = a_site_at_work()
    for node in ("n2", "n3"):
        site.node(node, 1, site=OURS)
    site.wait(5.0)
    sent_seqs = {str(name): node.plan_seq for name, node in site.arbiter.state.nodes.items()}
    after_a_power_cut(site, site.arbiter.snapshot())
    return site, sent_seqs


def test_each_node_that_knows_more_is_told_from_those_that_do_not() -> None:
    site, sent_seqs = three_nodes_after_a_power_cut()
    report(site, "n1", {gpu_id("n1", 0): "ana-1"}, plan=(1, sent_seqs["n1"]))
    assert site.arbiter.state.epoch == 2, "n1 has heard of nothing that the journal does not know"
    site.node("n2", 1, site=OURS, plan=(1, sent_seqs["n2"] + 1))
    assert site.arbiter.state.epoch == 3
    site.node("n3", 1, site=OURS, plan=(1, sent_seqs["n3"] + 7))
    assert site.arbiter.state.epoch == 3, "once is enough"
    plans = {plan.node: plan for plan in sent(site.wait(25.0), NodePlan)}
    assert plans["n2"].after == sent_seqs["n2"] + 1
    assert plans["n3"].after == sent_seqs["n3"] + 7


def test_a_node_that_obeyed_this_arbiter_before_another_showed_it_a_newer_epoch_goes_on_obeying() -> None:
    """n1 and n2 have lost nothing, and obey epoch 2; then n3 tells of a plan that a power cut took from the journal."""
    site, sent_seqs = three_nodes_after_a_power_cut()
    effects = report(site, "n1", {gpu_id("n1", 0): "ana-1"}, plan=(1, sent_seqs["n1"]))
    effects += site.wait(5.0)
    obeyed = site.plans["n1"]
    assert obeyed.epoch == 2
    site.node("n3", 1, site=OURS, plan=(1, sent_seqs["n3"] + 7))
    assert site.arbiter.state.epoch == 3
    report(site, "n1", {gpu_id("n1", 0): "ana-1"}, plan=(obeyed.epoch, obeyed.seq))
    site.wait(25.0)
    assert (site.plans["n1"].epoch, site.plans["n1"].after >= obeyed.seq) == (3, True)


def test_one_nodes_word_of_a_newer_epoch_makes_no_other_node_deaf() -> None:
    site = a_site_at_work()
    site.node("n2", 1, site=OURS)
    site.wait(5.0)
    obeyed = site.plans["n1"]
    site.node("n2", 1, site=OURS, plan=(40, 7))
    assert site.arbiter.state.epoch == 41
    report(site, "n1", {gpu_id("n1", 0): "ana-1"}, plan=(obeyed.epoch, obeyed.seq))
    site.wait(25.0)
    assert (site.plans["n1"].epoch, site.plans["n1"].after >= obeyed.seq) == (41, True)


def test_a_node_that_tells_of_more_and_more_of_an_old_epoch_does_not_move_the_site_on_each_time() -> None:
    site = a_site_at_work()
    after_a_power_cut(site, site.arbiter.snapshot())
    report(site, "n1", {gpu_id("n1", 0): "ana-1"})
    site.wait(SETTINGS.node_timeout_s + 1.0)
    for more in range(3):
        report(site, "n1", {gpu_id("n1", 0): "ana-1"}, plan=(1, 90 + more))
    assert site.arbiter.state.epoch == 2
    assert site.plans["n1"].after == 92


def test_a_plan_that_no_arbiter_can_have_sent_is_refused() -> None:
    site = a_site_at_work()
    effects = report(site, "n1", {}, plan=(1, EPOCH_MAX + 1))
    assert "which no arbiter has sent; refused" in notes(effects)
    assert site.arbiter.state.epoch == 1


def test_a_round_goes_on_when_a_late_node_shows_a_newer_epoch() -> None:
    site = a_site_at_work()
    for _ in range(4):
        site.wait(10.0)
        report(site, "n1", {gpu_id("n1", 0): "ana-1"})
    site.decides_late = True
    site.play_round(site.app("bob-1", run="r", site=OURS) + site.wait(1.0))
    assert site.undecided
    report(site, "n1", {gpu_id("n1", 0): "ana-1"}, plan=(40, 7))
    assert site.arbiter.state.epoch == 41
    site.decide()
    assert site.held("bob-1") == [gpu_id("n1", 1)]


def test_an_epoch_and_an_incarnation_that_cannot_be_are_refused() -> None:
    site = a_site_at_work()
    effects = report(site, "n1", {}, plan=(EPOCH_MAX + 1, 1))
    assert "which no arbiter has given out; refused" in notes(effects)
    for made_up in (2**53, 2**52, 2**40):
        effects = report(site, "n1", {}, incarnation=made_up)
        assert f"reports incarnation {made_up}, which no node agent has; refused" in notes(effects)
    assert site.arbiter.state.epoch == 1
    assert site.held("ana-1")
    assert (
        sent(report(site, "n1", {gpu_id("n1", 0): "ana-1"}, incarnation=7) + site.wait(5.0), NodePlan)[-1].incarnation
        == 7
    )


# --- adoption after a loss ------------------------------------------------------------------------------------------


def test_adoption_takes_the_sites_id_and_leases_what_runs_to_whose_it_is() -> None:
    site = a_site(site="s-new", adopt=True)
    gpu, other = gpu_id("n1", 0), gpu_id("n1", 1)
    effects = site.node("n1", 2, site=THEIRS, plan=(900, 5), tasks=[task("ana-1", 0, [gpu])], used=[gpu])
    assert resigned(effects) == ""
    assert taken(effects) == [EpochTaken(1, THEIRS), EpochTaken(901, THEIRS)]
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])], run="r", site=THEIRS)
    site.app("bob-1", run="r")
    effects = site.play_round(site.wait(10.5))
    plan = sent(effects, NodePlan)[-1]
    assert (plan.site, plan.epoch) == (THEIRS, 901)
    assert [(order.task, order.want) for order in plan.tasks] == [("ana-1.0-a0", "run")]
    assert site.held("ana-1") == [gpu]
    assert site.held("bob-1") == [other]
    assert "keeps GPU-n1-0 on n1, where ana-1.0-a0 was found" in site.told("ana-1")


def test_an_arbiter_that_adopts_one_site_refuses_a_second() -> None:
    site = a_site(site="s-new", adopt=True)
    site.node("n1", 1, site=THEIRS, plan=(900, 5))
    effects = site.node("n2", 1, site="s-third", plan=(7, 5))
    assert "belongs to site s-third, and this arbiter leads site s-theirs; refused" in notes(effects)
    assert site.arbiter.state.epoch == 901


def test_a_replay_takes_the_same_epochs_and_adopts_the_same_tasks() -> None:
    site = a_site(site="s-new", adopt=True)
    gpu = gpu_id("n1", 0)
    site.node("n1", 1, site=THEIRS, plan=(900, 5), tasks=[task("ana-1", 0, [gpu])], used=[gpu])
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])], run="r", site=THEIRS)
    site.wait(20.0)
    assert site.held("ana-1") == [gpu]
    assert site.replayed() == site.arbiter.snapshot()


def test_without_ids_no_site_is_told_from_another() -> None:
    site = Site(None)
    site.handle(Configured(SETTINGS))
    site.handle(Connected(1))
    site.epoch = 1
    assert sent(site.node("n1", 1, site=THEIRS), NodePlan)[-1].site == ""
