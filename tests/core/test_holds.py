"""Apps that are held: they leave as under preemption, and get nothing until they are released. Requeued ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from arbiter.core.arbiter import Arbiter
from arbiter.core.effects import ActRecord
from arbiter.core.leases import leases
from arbiter.core.members import holds
from arbiter.core.rounds import seats
from arbiter.core.rounds.views import make_view
from arbiter.core.state.index import Index
from arbiter.core.state.model import Draining, Toll
from arbiter.core.turn import Turn
from arbiter.ledger import Ledger
from arbiter.queries import Queries
from protocol.core import Send
from protocol.messages import (
    Act,
    ActKind,
    Answer,
    AppId,
    GpuId,
    Holdings,
    JobId,
    Measured,
    OwnerId,
    Party,
    Preempt,
    Query,
)
from tests.core.test_decisions import contended
from tests.support.arbiter_site import SETTINGS, Effect, Site, gpu_id, task, wish

ANA, BOB, ROOT = (Party("app", name) for name in ("ana", "bob", "root"))


def act(site: Site, sender: Party, kind: ActKind, target: str = "ana-1", number: int = 1) -> list[Effect]:
    return site.hear(sender, Act(f"act-{sender.id}-{kind}-{number}", kind, target))


def answer(effects: Sequence[Effect]) -> tuple[str, object]:
    """The state that an act has led to, or the sentence and code of its refusal."""
    (said,) = [effect.message for effect in effects if isinstance(getattr(effect, "message", None), Answer)]  # type: ignore[union-attr]
    document = msgspec.json.decode(said.document)
    return (said.error, document["code"]) if said.error else (document["state"], document["app"])


def listed(site: Site, app: str = "ana-1") -> dict[str, Any]:
    """What `explain` tells of an app."""
    (send,) = Queries(site.arbiter, Ledger(":memory:")).ask(ANA, Query("q", "explain", app), site.now)
    assert isinstance(send.message, Answer)
    return msgspec.json.decode(send.message.document)  # type: ignore[no-any-return]


def running(**settings: object) -> tuple[Site, str]:
    """ana-1 runs on the only GPU."""
    site = Site(replace(SETTINGS, admins=(OwnerId("root"),), **settings))
    site.node("n1", 1)
    site.play_round(site.app("ana-1") + site.wait(0))
    (gpu,) = site.held("ana-1")
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])])
    site.node("n1", tasks=[task("ana-1", 0, [gpu])], used=[gpu])
    return site, gpu


def leave(site: Site, gpu: str) -> None:
    """The task of ana-1 has saved and left; its app agent still wants a GPU."""
    site.node("n1", tasks=[task("ana-1", 0, [gpu], "exited", outcome="preempted")], used=[])
    site.app("ana-1", jobs=[])
    site.node("n1")


def test_an_app_that_is_held_saves_and_leaves_as_under_preemption() -> None:
    site, gpu = running()
    effects = act(site, ANA, "hold")
    assert answer(effects) == ("held", "ana-1")
    (told,) = [effect.message for effect in effects if isinstance(getattr(effect, "message", None), Preempt)]  # type: ignore[union-attr]
    assert (told.app, told.reason) == ("ana-1", "held by its owner")
    assert isinstance(site.arbiter.state.gpus[gpu].state, Draining)
    assert site.arbiter.state.apps[AppId("ana-1")].tally.preemptions == 1
    assert site.arbiter.state.counts.preemptions == {"act": 1}
    assert listed(site)["state"] == "leaving"
    leave(site, gpu)
    assert site.holder(gpu) is None
    told_now = listed(site)
    assert (told_now["state"], told_now["want"], told_now["waits_for"]["kind"]) == ("held", 1, "release")
    assert told_now["waiting_for"] == "it is held by its owner, and gets no GPU until `gpu-arbiter release ana-1`"


def test_an_app_that_is_held_gets_nothing_whatever_it_reports_until_it_is_released() -> None:
    site, gpu = running()
    act(site, ANA, "hold")
    leave(site, gpu)
    for _ in range(5):
        site.node("n1")
        site.play_round(site.app("ana-1") + site.wait(1))
    assert site.holder(gpu) is None
    assert site.arbiter.state.history.apps[AppId("ana-1")].demand == 0, "nothing is due to it"
    assert answer(act(site, ANA, "release")) == ("released", "ana-1")
    assert site.arbiter.state.history.apps[AppId("ana-1")].demand == 1
    site.play_round(site.app("ana-1") + site.wait(1))
    assert site.held("ana-1") == [gpu]
    assert site.replayed() == site.arbiter.snapshot()


def test_the_app_agent_is_told_at_once_that_its_app_is_held_and_that_it_is_released() -> None:
    site, _ = running()
    site.app("bob-1")
    for kind, by in (("hold", "bob"), ("release", "")):
        said = [
            effect.message.held_by
            for effect in act(site, BOB, kind, "bob-1")
            if isinstance(effect, Send) and isinstance(effect.message, Holdings) and effect.message.app == "bob-1"
        ]
        assert said == [by]


def test_the_gpu_of_an_app_that_is_held_goes_to_the_next() -> None:
    site, gpu = running()
    site.app("bob-1")
    act(site, ANA, "hold")
    leave(site, gpu)
    site.play_round(site.app("bob-1") + site.wait(1))
    assert site.held("bob-1") == [gpu]


def test_a_gpu_that_an_app_has_won_is_promised_to_it_no_more_once_it_is_held() -> None:
    site, gpu = running()
    site.app("bob-1")
    turn = Turn(site.arbiter.state, site.now, Index(site.arbiter.state))
    leases.revoke(turn, turn.state.gpus[GpuId(gpu)], "it is given to bob-1", promised_to=AppId("bob-1"))
    holds.hold(turn, turn.state.apps[AppId("bob-1")], "bob", "held by its owner")
    state = turn.state.gpus[GpuId(gpu)].state
    assert isinstance(state, Draining)
    assert state.promised_to is None


def test_a_round_that_is_being_decided_gives_nothing_to_an_app_that_was_held_meanwhile() -> None:
    site, decided = contended({0: "ana-1", 1: "bob-1"})
    act(site, BOB, "hold", "bob-1")
    site.handle(decided)
    states = [site.gpu_state(gpu_id("n1", index)) for index in (0, 1)]
    assert site.held("bob-1") == []
    assert not any(isinstance(state, Draining) and state.promised_to == "bob-1" for state in states)


def test_the_hold_outlives_the_arbiter_and_what_was_done_is_a_row_of_the_ledger() -> None:
    site, gpu = running()
    (record,) = [effect for effect in act(site, ANA, "hold") if isinstance(effect, ActRecord)]
    assert (record.actor, record.kind, record.target, record.outcome) == ("ana", "hold", "ana-1", "held by its owner")
    leave(site, gpu)
    again = Arbiter.restored(site.arbiter.snapshot())
    assert again.state.apps[AppId("ana-1")].held_by == "ana"
    assert "hold by app-ana: held by its owner" in site.told("ana-1")


def test_what_is_so_already_is_answered_and_not_done_again() -> None:
    site, _gpu = running()
    assert answer(act(site, ANA, "release")) == ("released", "ana-1")
    act(site, ANA, "hold")
    effects = act(site, ANA, "hold")
    assert answer(effects) == ("held", "ana-1")
    assert not any(isinstance(effect, ActRecord) for effect in effects)
    assert site.arbiter.state.apps[AppId("ana-1")].demand_wished == 1, "the wish is not lost"


def test_policies_are_told_when_an_app_was_released_last() -> None:
    site, gpu = running()

    def told() -> float:
        turn = Turn(site.arbiter.state, site.now, Index(site.arbiter.state))
        (view,) = make_view(turn, seats.shown(turn), {}).apps
        return view.released_at

    act(site, ANA, "hold")
    leave(site, gpu)
    site.wait(30)
    act(site, ANA, "release")
    released_at = site.now
    site.wait(5)
    act(site, ANA, "release", number=2)
    assert told() == released_at > 0.0, "a second release changes nothing"
    act(site, ANA, "hold", number=2)
    act(site, ANA, "release", number=3)
    assert told() == site.now
    assert Arbiter.restored(site.arbiter.snapshot()).state.apps[AppId("ana-1")].released_at == site.now


def test_an_owner_holds_ones_own_apps_and_an_administrator_all_of_them() -> None:
    site, _gpu = running()
    assert answer(act(site, BOB, "hold")) == ("ana-1 belongs to ana; only ana and administrators may hold it", 7)
    assert answer(act(site, ROOT, "hold")) == ("held", "ana-1")
    why, code = answer(act(site, ANA, "release"))
    assert (why, code) == ("ana-1 is held by the administrator root; only administrators may release it", 7)
    assert listed(site)["waiting_for"].startswith("it is held by the administrator root, ")
    assert answer(act(site, ROOT, "release")) == ("released", "ana-1")


def test_an_app_that_is_over_cannot_be_held_and_one_that_is_held_can_be_cancelled() -> None:
    site, _gpu = running()
    act(site, ANA, "hold")
    assert answer(act(site, ANA, "cancel")) == ("cancelled", "ana-1")
    assert answer(act(site, ANA, "hold", number=2)) == ("ana-1 is over, so it cannot be held", 1)
    assert answer(act(site, ANA, "release", number=2)) == ("ana-1 is over, so it cannot be released", 1)
    assert listed(site)["state"] == "cancelled"


# --- requeue --------------------------------------------------------------------------------------------------------


def test_an_app_that_is_requeued_leaves_its_gpu_and_waits_behind_all_others() -> None:
    site, gpu = running()
    site.app("bob-1")
    effects = act(site, ANA, "requeue")
    assert answer(effects) == ("requeued", "ana-1")
    (told,) = [effect.message for effect in effects if isinstance(getattr(effect, "message", None), Preempt)]  # type: ignore[union-attr]
    assert told.reason == "requeued by its owner"
    (record,) = [effect for effect in effects if isinstance(effect, ActRecord)]
    assert (record.kind, record.outcome) == ("requeue", "requeued by its owner")
    leave(site, gpu)
    site.play_round(site.app("bob-1") + site.wait(1))
    assert (site.held("bob-1"), site.held("ana-1")) == ([gpu], [])
    site.app("bob-1", state="finished", demand=0)
    site.node("n1")
    site.play_round(site.app("ana-1") + site.wait(1))
    assert site.held("ana-1") == [gpu], "it goes on once the others have had their turn"
    assert site.replayed() == site.arbiter.snapshot()
    site.arbiter.validate()


def test_the_same_requeue_again_is_answered_again_and_done_once() -> None:
    site, gpu = running()
    act(site, ANA, "requeue")
    leave(site, gpu)
    site.play_round(site.app("ana-1") + site.wait(1))
    assert site.held("ana-1") == [gpu], "no other app waits"
    effects = act(site, ANA, "requeue")
    assert answer(effects) == ("requeued", "ana-1")
    assert site.held("ana-1") == [gpu]
    assert not any(isinstance(effect, ActRecord) for effect in effects)


def test_an_app_without_a_gpu_has_nothing_to_requeue() -> None:
    site, _gpu = running()
    site.app("bob-1")
    assert answer(act(site, BOB, "requeue", "bob-1")) == ("bob-1 has no GPU, so there is nothing to requeue", 1)
    act(site, ANA, "cancel")
    assert answer(act(site, ANA, "requeue")) == ("ana-1 is over, so it cannot be requeued", 1)


def test_the_work_that_an_act_would_throw_away_is_told_of_each_task() -> None:
    site, gpu = running()

    def at_risk_s(**figures: Any) -> float:
        site.node("n1", tasks=[task("ana-1", 0, [gpu], **figures)], used=[gpu])
        site.now += 3.0
        (told,) = listed(site)["tasks"]
        return float(told["at_risk_s"])

    measured = Measured(ran_s=60.0, unsaved_s=40.0)
    assert at_risk_s(measured=measured) == 43.0, "the time since the report counts, too"
    assert at_risk_s(measured=measured, can_checkpoint=True) == 0.0
    assert at_risk_s(measured=measured, cooperative=True) == 0.0
    assert at_risk_s(measured=measured, cooperative=True, helpless=True) == 43.0
    assert at_risk_s(measured=Measured()) == 0.0, "it has had no GPU yet"
    app = site.arbiter.state.apps[AppId("ana-1")]
    site.arbiter.state.apps[app.id] = replace(app, tolls={JobId("ana-1.0"): Toll(50.0, 50.0, 50.0)})
    site.arbiter = Arbiter.restored(site.arbiter.snapshot())
    assert at_risk_s(measured=measured, cooperative=True) == 43.0, "its driver did not spare what it lost before"
