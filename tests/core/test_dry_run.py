"""Dry runs: what becomes of an app is told before it is submitted, as it then comes, and nothing changes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from app_agent.core.host import AppHost
from app_agent.core.spec import AppSpec
from arbiter.core import dry_run
from arbiter.core.dry_run import may_begin
from arbiter.core.state.gpu_time import TenantTerms
from arbiter.core.state.model import ArbiterSettings
from arbiter.ledger import Ledger
from arbiter.queries import Queries
from launch import views
from protocol.exit_codes import REFUSED, USAGE
from protocol.messages import (
    Answer,
    AppReport,
    Bid,
    Offer,
    OwnerId,
    Party,
    Probe,
    ProbeReply,
    Query,
    Refusal,
    Requirements,
    TenantId,
    Utility,
)
from tests.support.arbiter_site import SETTINGS, Site, wish, with_auction

BACKFILL = replace(SETTINGS, policy="backfill", node_timeout_s=1000.0, app_timeout_s=1000.0)
ZOE = Party("app", "zoe")


class Desk:
    """A site, and the owner zoe, who asks before she submits."""

    def __init__(self, settings: ArbiterSettings = BACKFILL, **nodes: int) -> None:
        self.site = Site(settings)
        for name, gpus in (nodes or {"n1": 4}).items():
            self.site.node(name, gpus)
        self.site.wait(6.0)
        self.host = AppHost(OwnerId("zoe"), tenant="team")
        self.queries = Queries(self.site.arbiter, Ledger(":memory:"))
        self.questions: list[Probe | Offer] = []

    def runs(self, app: str, gang: int, **more: object) -> list[str]:
        """Let an app come and train on what it gets."""
        self.site.play_round(self.site.app(app, gang=gang, demand=gang, **more) + self.site.wait(2.0))  # type: ignore[arg-type]
        gpus = self.site.held(app)
        if gpus:
            self.site.app(app, gang=gang, demand=gang, jobs=[wish(app, 0, gpus)], **more)  # type: ignore[arg-type]
        return gpus

    def answer(self, **fields: Any) -> Answer:
        """Ask for a dry run as an app agent's daemon does, and see that nothing has changed."""
        before, host = self.site.arbiter.snapshot(), self.host.snapshot()
        agent = self.host.draft(spec(**fields), "t", self.site.now)
        assert not isinstance(agent, str), agent
        (send,) = agent.restate(self.site.now)
        said: list[ProbeReply | Bid] = []
        while True:
            assert isinstance(send.message, AppReport)
            query = Query("q", "dry-run", report=send.message, said=tuple(said))
            rehearsal = self.queries.rehearsal(ZOE, query, self.site.now, lambda: False)
            assert rehearsal is not None
            forecast = rehearsal.run()
            ((answer),) = (each.message for each in self.queries.tell(ZOE, query, forecast, self.site.now))
            assert isinstance(answer, Answer)
            assert (self.site.arbiter.snapshot(), self.host.snapshot()) == (before, host)
            if forecast.question is None:
                return answer
            self.questions.append(forecast.question)
            said += [each.message for each in agent.hear(forecast.question, self.site.now)]  # type: ignore[misc]

    def ask(self, **fields: Any) -> dict[str, Any]:
        answer = self.answer(**fields)
        assert answer.error == ""
        document: dict[str, Any] = msgspec.json.decode(answer.document)
        return document


def spec(**fields: Any) -> AppSpec:
    wishes = {name: fields.pop(name) for name in list(fields) if name in Requirements.__struct_fields__}
    return AppSpec(
        trials=(("python", "train.py"),),
        cwd="/tmp",
        checkpoint_root="/tmp",
        requirements=Requirements(**wishes),
        **fields,
    )


def test_an_app_that_fits_is_told_the_gpus_and_how_they_lie() -> None:
    desk = Desk(n1=2, n2=4)
    assert len(desk.runs("ana-1", 1)) == 1
    told = desk.ask(gang=3)
    assert (told["starts"], told["nodes"], len(told["gpus"]), told["estimate"]) == (True, ["n2"], 3, False)
    assert {gpu["state"] for gpu in told["gpus"]} == {"free"}
    names = ", ".join(gpu["id"] for gpu in told["gpus"])
    assert views.forecast(told).startswith(f"It would start now, with 3 GPUs on n2, across its slots: {names}.")
    assert desk.runs("zoe-1", 3) == [gpu["id"] for gpu in told["gpus"]]


def test_an_app_that_waits_is_told_what_would_make_room_in_the_words_of_explain() -> None:
    desk = Desk()
    desk.runs("ana-1", 3)
    told = desk.ask(gang=2)
    assert (told["starts"], told["gpus"], told["level"]) == (False, [], None)
    assert told["binding"]["apps"] == ["ana-1"]
    desk.runs("zoe-1", 2)
    asked = Query("q", "explain", "zoe-1")
    inquiry = desk.queries.inquiry(asked, desk.site.now, lambda: False)
    assert inquiry is not None
    (send,) = desk.queries.ask(ZOE, asked, desk.site.now, found=(inquiry.binding(), inquiry.estimate))
    assert isinstance(send.message, Answer)
    explained = msgspec.json.decode(send.message.document)
    assert told["binding"]["apps"] == explained["binding"]["apps"]
    assert (
        told["binding"]["text"].partition(", its lease")[0] == explained["binding"]["text"].partition(", its lease")[0]
    )
    text = views.forecast(told)
    assert text.startswith("It would wait.\nReason: ")
    assert f"In its way: {told['binding']['text']}" in text


def test_where_nothing_is_in_play_it_is_said_who_holds_the_gpus() -> None:
    desk = Desk(n1=2)
    desk.runs("ana-1", 2)
    told = desk.ask()
    assert (told["starts"], told["reason"]) == (False, "")
    assert told["waiting_for"].startswith("all 2 GPUs in service are held by other apps")


def test_before_any_node_has_enrolled_the_app_would_wait_for_one() -> None:
    desk = Desk(BACKFILL, n1=0)
    desk.site.arbiter.state.nodes.clear()
    assert "no node has enrolled yet" in desk.ask()["waiting_for"]


def test_an_interactive_app_is_told_which_app_makes_room_for_it() -> None:
    desk = Desk(replace(BACKFILL, interactive_share=1.0))
    held = desk.runs("ana-1", 4)
    told = desk.ask(kind="interactive")
    assert told["starts"]
    ((gpu),) = told["gpus"]
    assert (gpu["app"], gpu["state"]) == ("ana-1", "leased")
    assert gpu["id"] in held
    assert f"First ana-1 leaves {gpu['id']}." in views.forecast(told)


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        (replace(BACKFILL, tenants=(TenantTerms(TenantId("vision")),), tenants_only=True), {}),
        (replace(BACKFILL, tenants=(TenantTerms(TenantId("team"), members=(OwnerId("ana"),)),)), {}),
        (replace(BACKFILL, apps_max=0), {}),
        (replace(BACKFILL, classes=("batch",)), {"kind": "interactive"}),
        (BACKFILL, {"gang": 5}),
        (BACKFILL, {"priority": 7}),
    ],
    ids=["tenant", "member", "apps_max", "class", "too large", "priority"],
)
def test_a_refusal_is_told_in_the_words_and_with_the_code_that_the_submission_gets(
    settings: ArbiterSettings, fields: dict[str, Any]
) -> None:
    desk = Desk(settings)
    answer = desk.answer(**fields)
    agent = desk.host.draft(spec(**fields), "t", desk.site.now)
    assert not isinstance(agent, str)
    effects = desk.site.hear(ZOE, agent.restate(desk.site.now)[0].message)
    (refusal,) = (each.message for each in effects if isinstance(getattr(each, "message", None), Refusal))
    assert isinstance(refusal, Refusal)
    assert answer.error == refusal.reason
    assert msgspec.json.decode(answer.document)["code"] == REFUSED


def test_before_apps_are_admitted_a_refusal_that_will_come_is_told() -> None:
    site = Desk(replace(BACKFILL, admission_wait_s=60.0))
    assert "5" in site.answer(gang=5).error


@with_auction
def test_in_an_auction_the_apps_own_agent_bids() -> None:
    desk = Desk(replace(BACKFILL, policy="themis"))
    told = desk.ask(gang=2, steps_total=100, step_serial_s=1.0)
    assert [type(question) for question in desk.questions] == [Probe, Offer]
    assert (told["starts"], told["estimate"], len(told["gpus"])) == (True, False, 2)


@with_auction
def test_the_bids_of_others_are_guessed_and_that_is_said() -> None:
    desk = Desk(replace(BACKFILL, policy="themis", round_pause_s=30.0), n1=5)
    desk.runs("bob-1", 1)
    desk.site.app("ana-1", gang=4, demand=4, left_s=1e6, left_gpu_s=4e6)  # it waits for the pause after a round
    told = desk.ask(gang=4, steps_total=10, step_serial_s=1.0)
    assert told["estimate"]
    assert "ana-1" in told["guessed"]
    assert "guessed from what the apps last reported" in views.forecast(told)


def test_under_oasis_the_price_of_a_booking_is_told() -> None:
    desk = Desk(replace(BACKFILL, policy="oasis"))
    worth = Utility(50.0, 0.0, 0.0)
    told = desk.ask(steps_total=100, step_serial_s=1.0, utility=worth)
    assert told["starts"]
    assert told["booking"]["worth"] > told["booking"]["price"] >= 0.0
    assert f"Booking: {told['booking']['text']}" in views.forecast(told)


def test_with_very_many_apps_only_the_round_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dry_run, "TRIED_APPS_MAX", 1)
    desk = Desk()
    desk.runs("ana-1", 4)
    told = desk.ask()
    assert (told["starts"], told["binding"]) == (False, None)


def test_nobody_asks_in_the_name_of_another() -> None:
    desk = Desk()
    agent = desk.host.draft(spec(), "t", desk.site.now)
    assert not isinstance(agent, str)
    report = agent.restate(desk.site.now)[0].message
    assert isinstance(report, AppReport)
    mallory = Party("app", "mallory")
    query = Query("q", "dry-run", report=report)
    rehearsal = desk.queries.rehearsal(mallory, query, desk.site.now, lambda: False)
    assert rehearsal is not None
    (send,) = desk.queries.tell(mallory, query, rehearsal.run(), desk.site.now)
    assert isinstance(send.message, Answer)
    assert send.message.error == "app-mallory may not speak for the app zoe-1"


def test_a_dry_run_without_an_app_is_refused() -> None:
    desk = Desk()
    query = Query("q", "dry-run")
    assert desk.queries.rehearsal(ZOE, query, desk.site.now, lambda: False) is None
    (send,) = desk.queries.ask(ZOE, query, desk.site.now)
    assert isinstance(send.message, Answer)
    assert msgspec.json.decode(send.message.document)["code"] == USAGE


def test_no_dry_run_begins_while_a_round_or_a_sale_is_open() -> None:
    desk = Desk()
    assert may_begin(desk.site.arbiter.state)
    desk.site.decides_late = True
    desk.site.app("ana-1")
    desk.site.wait(2.0)
    assert not may_begin(desk.site.arbiter.state)
    desk.site.decide()
    assert may_begin(desk.site.arbiter.state)
