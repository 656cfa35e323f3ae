"""Receipts: an app that lost GPUs reads for which app, why, what that cost, and what it got back."""

from __future__ import annotations

from typing import Any

import msgspec

from arbiter.core.arbiter import Arbiter
from arbiter.core.effects import EventRecord, LossRecord, Record
from arbiter.ledger import Ledger
from arbiter.queries import Queries
from arbiter.receipts import receipts_of
from launch import views
from protocol.messages import Act, Answer, AppId, EventKind, GpuId, Measured, NodeId, Party, Query, TaskId, TenantId
from tests.core.test_decisions import contended
from tests.support.arbiter_site import Site, gpu_id, task, wish

ANA = Party("app", "ana")


def explained(site: Site, app: str = "ana-1") -> dict[str, Any]:
    """What `explain` says, from a ledger that a restart has written anew."""
    ledger, again = Ledger(":memory:"), Arbiter()
    for now, event in site.journal:
        for effect in again.handle(event, now):
            if isinstance(effect, Record):
                ledger.write(effect)
    (send,) = Queries(again, ledger).ask(ANA, Query("q", "explain", app), site.now)
    assert isinstance(send.message, Answer)
    assert send.message.error == ""
    return msgspec.json.decode(send.message.document)  # type: ignore[no-any-return]


def taken() -> Site:
    """ana-1 trains on GPU 0 of n1, and the round gives that GPU to bob-1; its task is told to leave."""
    site, decided = contended({0: "bob-1", 1: "ana-1"})
    gpu = gpu_id("n1", 0)
    site.app("ana-1", demand=2, jobs=[wish("ana-1", 0, [gpu])])
    ran = Measured(ran_s=40.0, unsaved_s=30.0)
    site.node("n1", tasks=[task("ana-1", 0, [gpu], can_checkpoint=True, measured=ran)], used=[gpu])
    site.handle(decided)
    site.decides_late = False
    return site


def test_a_receipt_names_the_winner_the_reason_and_what_is_still_missing() -> None:
    site = taken()
    (receipt,) = explained(site)["receipts"]
    assert (receipt["gpus"], receipt["nodes"], receipt["for"]) == ([gpu_id("n1", 0)], ["n1"], ["bob-1"])
    assert receipt["why"] == f"round {site.arbiter.state.round} gave it to bob-1"
    assert (receipt["missing"], receipt["away_s"], receipt["returned"]) == (1, None, [])
    assert views.receipt(receipt) == (
        f"1 GPU on n1 for bob-1 (round {site.arbiter.state.round} gave it to bob-1); "
        "it cost less than a second of GPU time; it has got none back yet"
    )


def test_a_receipt_tells_what_leaving_and_lost_work_cost_and_when_as_many_gpus_were_back() -> None:
    site, gpu = taken(), gpu_id("n1", 0)
    began = site.now
    site.now += 4.0
    vacating = task("ana-1", 0, [gpu], "vacating", measured=Measured(ran_s=44.0, unsaved_s=34.0))
    site.node("n1", tasks=[vacating], used=[gpu])
    (receipt,) = explained(site)["receipts"]
    assert receipt["draining_gpu_seconds"] == 4.0, "it is being left, and costs more with each second"
    site.now += 2.0
    over = task("ana-1", 0, [gpu], "exited", outcome="preempted", measured=Measured(ran_s=46.0, unsaved_s=12.0))
    site.node("n1", tasks=[over])
    site.app("ana-1", demand=2, jobs=[wish("ana-1", 0, [], attempt=1)])
    site.node("n1")
    assert site.held("bob-1") == [gpu], "the scene"
    site.now += 20.0
    site.node("n1")
    site.app("bob-1", state="finished")
    site.app("ana-1", demand=2, jobs=[wish("ana-1", 0, [], attempt=1)])
    site.node("n1")
    site.wait(2.0)
    assert len(site.held("ana-1")) == 2, "the scene: it has as many again"
    (receipt,) = explained(site)["receipts"]
    assert (receipt["draining_gpu_seconds"], receipt["lost_gpu_seconds"], receipt["missing"]) == (6.0, 12.0, 0)
    (back,) = receipt["returned"]
    assert receipt["away_s"] == back["at_s"] - began
    sentence = views.receipt(receipt)
    assert "it cost 6s until they were empty and 12s of work to do again of GPU time" in sentence
    assert "; it had one again after " in sentence
    assert views.explanation(explained(site), site.now).count("GPUs taken from it, newest first:") == 1


def test_each_preemption_has_its_own_receipt_and_an_act_has_no_winner() -> None:
    site, gpu = taken(), gpu_id("n1", 0)
    site.node("n1", tasks=[task("ana-1", 0, [gpu], "exited", outcome="preempted")])
    site.app("bob-1", demand=2)
    site.node("n1")
    assert site.held("bob-1") == [gpu], "the scene"
    site.hear(Party("app", "bob"), Act("act-1", "hold", "bob-1"))
    (receipt,) = explained(site, "bob-1")["receipts"]
    assert (receipt["for"], receipt["why"]) == ([], "held by its owner")
    assert len(explained(site)["receipts"]) == 1


def test_an_app_from_which_nothing_was_taken_has_no_receipt() -> None:
    site = taken()
    assert explained(site, "bob-1")["receipts"] == []


def event(kind: EventKind, at: float, node: str, *gpus: str, by: str | None = None) -> EventRecord:
    why = f"{', '.join(gpus)} on {node}: in the way"
    return EventRecord(0, at, kind, why, AppId("a-1"), TenantId("t"), NodeId(node), gpus=tuple(map(GpuId, gpus)), by=by)


def loss(at: float, gpu: str, seconds: float) -> LossRecord:
    return LossRecord(TaskId("a-1.0-a0"), at, AppId("a-1"), TenantId("t"), NodeId("n1"), (GpuId(gpu),), seconds)


def test_what_is_taken_at_one_moment_is_one_receipt_whatever_the_node_and_the_winner() -> None:
    events = [event("preempted", 5.0, "n1", "g1", by="b-1"), event("preempted", 5.0, "n2", "g2", "g3", by="c-1")]
    events += [event("granted", 7.0, "n1", "g1"), event("granted", 9.0, "n3", "g8", "g9")]
    (told,) = receipts_of(events, (), ())
    assert (told.gpus, told.nodes, told.winners, told.why) == (
        ("g1", "g2", "g3"),
        ("n1", "n2"),
        ("b-1", "c-1"),
        "in the way",
    )
    assert (told.missing, told.away_s, [each.gpus for each in told.returned]) == (0, 4.0, [("g1",), ("g8", "g9")])


def test_grants_count_for_the_oldest_preemption_first() -> None:
    events = [event("preempted", at, "n1", gpu) for at, gpu in ((1.0, "g1"), (2.0, "g2"))]
    first, second = receipts_of([*events, event("granted", 6.0, "n1", "g2")], (), ())
    assert (first.away_s, second.away_s) == (5.0, None)


def test_a_loss_on_a_gpu_that_the_app_was_granted_again_is_no_cost_of_the_preemption() -> None:
    events = [event("preempted", 1.0, "n1", "g1"), event("granted", 4.0, "n1", "g1")]
    (told,) = receipts_of(events, (), [loss(2.0, "g1", 8.0), loss(6.0, "g1", 100.0), loss(3.0, "g2", 50.0)])
    assert told.lost_gpu_s == 8.0
