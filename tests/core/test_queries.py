"""What users are told: apps, nodes, rounds, and why an app waits."""

from __future__ import annotations

import asyncio
import base64
import sqlite3
import zlib
from collections.abc import Coroutine, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
from msgspec.structs import replace

from arbiter import daemon, ledger, queries, round_inputs
from arbiter.config import ArbiterConfig
from arbiter.core.arbiter import Configured, Event
from arbiter.core.effects import AppRecord, Decide, LeaseRecord, RoundRecord
from arbiter.core.registry import POLICIES, tables
from arbiter.core.rounds import losses
from arbiter.core.rounds import views as round_views
from arbiter.core.seam import GpuNames, Outcome
from arbiter.core.state.gpu_time import TenantTerms
from arbiter.core.state.model import ArbiterSettings
from arbiter.ledger import Ledger
from arbiter.queries import Queries
from launch import views
from protocol.codec import encode
from protocol.core import Send
from protocol.exit_codes import FAILED, NOT_PERMITTED, TIMED_OUT
from protocol.journal.sqlite import SqliteJournal
from protocol.messages import (
    ARBITER,
    Answer,
    AppId,
    GpuId,
    LeaseId,
    LogChunk,
    NodeId,
    OpenTerminal,
    Party,
    Query,
    ReadLog,
    TaskId,
    TenantId,
    TerminalDoor,
)
from protocol.release import release
from tests.support.arbiter_site import AUCTION, SETTINGS, Effect, Site, gpu_id, task, wish, with_auction

pytestmark = with_auction

ANA = Party("app", "ana")


class Counter:
    """A site with a ledger that performs the records, and a queries."""

    def __init__(self, settings: ArbiterSettings = SETTINGS) -> None:
        self.site = Site(settings)
        self.ledger = Ledger(":memory:")
        self.queries = Queries(self.site.arbiter, self.ledger)

    def note(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Decide):
                self.ledger.keep(effect)
            if isinstance(effect, RoundRecord | LeaseRecord | AppRecord):
                self.ledger.write(effect)
                self.ledger.write(effect)  # twice: a restart may record again

    def ask(self, kind: str, target: str = "") -> dict[str, Any]:
        query = Query("q1", kind, target)  # type: ignore[arg-type]
        found = {each.record.round: each.explained() for each in self.queries.unexplained(query)}
        explained = {number: outcome for number, outcome in found.items() if outcome is not None}
        (send,) = self.queries.ask(ANA, query, self.site.now, explained=explained)
        assert isinstance(send.message, Answer)
        assert send.message.error == "", send.message.error
        return msgspec.json.decode(send.message.document)  # type: ignore[no-any-return]


def test_a_ledger_that_cannot_be_read_costs_the_answers_that_need_it_only(tmp_path: Path) -> None:
    counter = Counter()
    file = tmp_path / "ledger.db"
    counter.ledger = Ledger(file)
    counter.queries = Queries(counter.site.arbiter, counter.ledger)
    counter.ledger.write(AppRecord(AppId("bob-1"), TenantId("vision"), 2.0, 0.0, 60.0, 50.0, 40.0, 30.0))
    counter.site.node("n1", 1)
    counter.site.app("ana-1")
    with sqlite3.connect(file) as database:
        database.execute("INSERT INTO rounds VALUES (1, 0.0, x'c1')")
    (send,) = counter.queries.ask(ANA, Query("q1", "rounds", ""), counter.site.now)
    assert isinstance(send.message, Answer)
    assert "ledger.db" in send.message.error
    assert "move the file away" in send.message.error
    assert [app["id"] for app in counter.ask("apps")["apps"]] == ["ana-1"]


def test_what_daemons_say_of_themselves_is_told_with_their_clocks() -> None:
    counter = Counter()
    counter.queries.hear(Party("node", "n1"), "1.2.0", counter.site.now + 7.5, counter.site.now)
    counter.queries.hear(ANA, "", 0.0, counter.site.now - 3.0)
    counter.queries.hear(Party("node", "n1"), "1.3.0", counter.site.now - 2.5, counter.site.now)
    told = counter.ask("nodes", "daemons")
    assert (told["schema"], told["release"]) == ("daemons/v1", release())
    assert told["daemons"] == [
        {"role": "app", "id": "ana", "release": "", "clock_ahead_s": None, "last_heard_s": 3.0},
        {"role": "node", "id": "n1", "release": "1.3.0", "clock_ahead_s": -2.5, "last_heard_s": 0.0},
    ]
    assert "daemons" not in counter.ask("nodes")


def test_no_more_daemons_are_remembered_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "HEARD_MAX", 2)
    counter = Counter()
    for owner in ("ana", "bob", "ana", "eve"):
        counter.queries.hear(Party("app", owner), "1.0.0", 0.0, 0.0)
    assert [each["id"] for each in counter.ask("nodes", "daemons")["daemons"]] == ["ana", "eve"]


def contended() -> Counter:
    """One GPU, won by ana in round 1; bob waits."""
    counter = Counter(AUCTION)
    site = counter.site
    site.node("n1", 1)
    counter.note(site.play_round(site.app("ana-1") + site.wait(0)))
    gpu = gpu_id("n1", 0)
    counter.note(site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])]))
    counter.note(site.node("n1", tasks=[task("ana-1", 0, [gpu], step=7)], used=[gpu]))
    counter.note(site.app("bob-1"))
    site.now += 85
    counter.note(site.node("n1", tasks=[task("ana-1", 0, [gpu], step=9)], used=[gpu]))
    effects = site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])]) + site.wait(5.5)
    effects += site.rho("ana-1", 60.0) + site.rho("bob-1", 1.0)
    counter.note(effects + site.bid("ana-1", {1: 0.5}))
    return counter


def test_apps_are_listed_with_what_they_hold_and_have_had() -> None:
    ana, bob = contended().ask("apps")["apps"]
    assert (ana["id"], ana["state"], ana["gpus"]) == ("ana-1", "running", [gpu_id("n1", 0)])
    assert (ana["grants"], ana["renewals"]) == (1, 1)
    assert ana["gpu_seconds"] > 85
    assert ana["tasks"][0]["step"] == 9
    assert (bob["state"], bob["gpus"], bob["jct_s"]) == ("waiting", [], None)


def test_who_was_preempted_is_leaving_and_then_waits_with_what_it_has_saved() -> None:
    counter = contended()
    site, gpu = counter.site, gpu_id("n1", 0)
    site.now += 60
    site.node("n1", tasks=[task("ana-1", 0, [gpu], "vacating", step=60, saved_step=50, total_steps=400)], used=[gpu])
    site.wait(60.0)
    assert not site.held("ana-1")
    (ana, _) = counter.ask("apps")["apps"]
    assert (ana["state"], ana["saved"]) == ("leaving", {"steps": 0, "total_steps": 0})
    over = task("ana-1", 0, [gpu], "exited", step=60, saved_step=60, total_steps=400, outcome="preempted")
    site.node("n1", tasks=[over], used=[])
    site.app("ana-1", jobs=[], releases=[])
    site.node("n1")
    (ana, _) = counter.ask("apps")["apps"]
    assert (ana["state"], ana["saved"], ana["tasks"]) == ("waiting", {"steps": 61, "total_steps": 400}, [])
    assert site.replayed() == site.arbiter.snapshot()


@pytest.mark.parametrize(("step", "said"), [(-1, "is running"), (0, "is running at step 0")])
def test_of_a_task_that_has_not_said_its_step_none_is_told(step: int, said: str) -> None:
    counter = Counter()
    site, gpu = counter.site, gpu_id("n1", 0)
    site.node("n1", 1)
    site.play_round(site.app("ana-1") + site.wait(0))
    site.node("n1", tasks=[task("ana-1", 0, [gpu], "running", step=step)], used=[gpu])
    assert [line.rpartition(" on n1 ")[2] for line in site.told("ana-1").splitlines() if " on n1 " in line] == [said]


def test_an_explanation_names_who_won_instead() -> None:
    told = contended().ask("explain", "bob-1")
    assert told["schema"] == "explain/v1"
    newest = told["rounds"][0]
    assert newest["winners"] == [{"app": "ana-1", "gpus": 1}]
    assert newest["got"] == 0
    assert newest["reason"]
    assert any("submitted" in line["what"] for line in told["story"])


@pytest.mark.parametrize(
    ("policy", "until"),
    [
        ("themis", " until leases end"),
        ("fifo", ", and under fifo no app gives one up before the end"),
        ("srtf", ""),  # its round has looked, and tells thousands of waiting apps nothing of their own
    ],
)
def test_who_comes_while_others_hold_everything_is_told_so_before_any_round(
    policy: str, until: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_views, "REASONS_MAX", 0)
    counter = Counter(replace(SETTINGS, policy=policy))
    site = counter.site
    site.node("n1", 1)
    counter.note(site.play_round(site.app("ana-1") + site.wait(0)))
    counter.note(site.app("bob-1"))
    told = counter.ask("explain", "bob-1")
    assert (told["waiting_for"], told["rounds"]) == (f"the only GPU in service is held by other apps{until}", [])
    assert counter.ask("explain", "ana-1")["waiting_for"] == ""
    monkeypatch.undo()
    assert contended().ask("explain", "bob-1")["waiting_for"] == "", "a round has decided about it"


def test_an_explanation_says_that_the_round_is_being_decided() -> None:
    counter = contended()
    site, gpu = counter.site, gpu_id("n1", 0)
    site.now += 80
    site.node("n1", tasks=[task("ana-1", 0, [gpu])], used=[gpu])
    site.app("ana-1", jobs=[wish("ana-1", 0, [gpu])])
    site.app("bob-1")
    assert counter.ask("explain", "bob-1")["waiting_for"] == ""
    site.decides_late = True
    site.play_round(site.wait(11))
    for app in ("ana-1", "bob-1"):
        told = counter.ask("explain", app)
        assert told["waiting_for"] == f"the auction of round {site.arbiter.state.round} is being solved"
        assert told["next_round_s"] is None
    site.decide()
    told = counter.ask("explain", "bob-1")
    assert "being solved" not in told["waiting_for"]
    assert told["next_round_s"] is not None


def lost_to_ana() -> Counter:
    """One GPU for which both bid, and ana won it."""
    counter = Counter(replace(AUCTION, policies=tables("themis", fairness_knob=0.0)))
    site = counter.site
    site.app("ana-1")
    site.app("bob-1")
    counter.note(site.node("n1", 1) + site.wait(1.0))
    effects = site.rho("ana-1", 8.0) + site.rho("bob-1", 9.0)
    effects += site.bid("ana-1", {1: 1.0}, none=8.0) + site.bid("bob-1", {1: 6.0}, none=9.0)
    counter.note(effects)
    return counter


def test_what_would_have_won_is_worked_out_when_a_person_asks() -> None:
    counter = lost_to_ana()
    (_, kept) = counter.ledger.rounds(limit=1)[0].outcomes
    assert kept.loss is not None
    assert "an estimate" in kept.reason
    told = counter.ask("explain", "bob-1")
    sentence = (
        "a rho of 1.124 instead of 6 with 1 GPU more would have won them; "
        "it comes before the auctions once it has waited for 3600 s"
    )
    assert told["rounds"][0]["reason"].endswith(sentence)
    assert told["story"][-1]["what"].endswith(sentence)
    assert "an estimate" not in told["story"][-1]["what"]


@contextmanager
def the_daemon(counter: Counter) -> Iterator[daemon._Performer]:
    """The daemon's part beside the core, with the inputs and the record of the lost round."""
    asked, book = counter.ledger.inputs(1), Ledger(":memory:")
    assert asked is not None
    with TemporaryDirectory() as folder, closing(SqliteJournal.of(f"{folder}/journal.sqlite", Event)) as journal:
        performer = daemon._Performer(counter.site.arbiter, journal, book, ArbiterConfig())
        performer._shell = SimpleNamespace(now=lambda: counter.site.now)  # type: ignore[assignment]
        asyncio.run(performer._perform([asked]))
        book.write(counter.ledger.rounds(limit=1)[0])
        yield performer


def explained_by(performer: daemon._Performer, app: str = "bob-1") -> dict[str, Any]:
    answer = performer._answer(ANA, Query("q1", "explain", app))
    assert isinstance(answer, Coroutine)
    (send,) = asyncio.run(answer)
    return msgspec.json.decode(send.message.document)  # type: ignore[no-any-return]


def test_the_daemon_keeps_the_inputs_and_holds_a_lost_auction_again_in_a_thread_and_once() -> None:
    sentence = (
        "a rho of 1.124 instead of 6 with 1 GPU more would have won them; "
        "it comes before the auctions once it has waited for 3600 s"
    )
    with the_daemon(lost_to_ana()) as performer:
        assert explained_by(performer)["rounds"][0]["reason"].endswith(sentence)
        with mock.patch.object(losses, "explained", side_effect=AssertionError("held again")):
            assert explained_by(performer)["rounds"][0]["reason"].endswith(sentence)


def test_an_auction_that_cannot_be_held_again_costs_no_other_part_of_the_answer() -> None:
    with the_daemon(lost_to_ana()) as performer:
        whole = explained_by(performer)
    with (
        the_daemon(lost_to_ana()) as performer,
        mock.patch.object(losses, "explained", side_effect=KeyError("a field of another version")),
    ):
        told = explained_by(performer)
    assert "an estimate" in told["rounds"][0]["reason"]
    assert whole["binding"]
    assert told["binding"] == whole["binding"]


def test_long_after_the_question_no_auction_is_held_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "LOST_S", -1.0)
    with the_daemon(lost_to_ana()) as performer:
        told = explained_by(performer)
    assert "an estimate" in told["rounds"][0]["reason"]
    assert told["binding"], "it was tried out first"


def written(counter: Counter, number: int) -> Decide | None:
    """The inputs of a round as the file has them: the newest are also kept in memory."""
    return Ledger._on_tables(counter.ledger._tables).inputs(number)


def test_inputs_of_apps_that_name_a_kind_are_read_as_they_were_and_hold_its_gpus_once() -> None:
    counter = lost_to_ana()
    asked = counter.ledger.inputs(1)
    assert asked is not None
    kind = GpuNames(GpuId(f"GPU-n{number:04}-0") for number in range(1000))
    apps = tuple(replace(app, only=kind, by_kind=True) for app in asked.view.apps)
    many = tuple(replace(apps[0], app=AppId(f"zoe-{number}")) for number in range(50))
    bound = replace(apps[0], app=AppId("zed-1"), only=(kind[3],), by_kind=False)
    view = replace(asked.view, apps=(*apps, *many, bound), holders=(apps[1], replace(bound, only=None)))
    counter.ledger.keep(replace(asked, round=2, view=view))
    found = written(counter, 2)
    assert found == replace(asked, round=2, view=view)
    assert found is not None
    assert len({id(app.only) for app in found.view.apps[:-1]}) == 1
    plain = zlib.decompress(round_inputs.pack(found))
    assert len(plain) < 10 * len(kind) * len(kind[0]), "52 apps name it"


def test_inputs_that_the_version_before_wrote_are_read() -> None:
    counter = lost_to_ana()
    asked = counter.ledger.inputs(1)
    assert asked is not None
    plain = zlib.decompress(round_inputs.pack(asked))
    counter.ledger._tables.write(("UPDATE inputs SET packed = ? WHERE round = 1", [(plain,)]))
    assert written(counter, 1) == asked


def test_inputs_with_a_number_that_cannot_be_written_are_left_out() -> None:
    counter = lost_to_ana()
    asked = counter.ledger.inputs(1)
    assert asked is not None
    counter.ledger.keep(replace(asked, round=2, view=replace(asked.view, seed=20_261_125_180_000 * 1_000_003)))
    assert written(counter, 2) is None


def test_inputs_of_a_journal_before_go_when_rounds_are_numbered_anew() -> None:
    counter = lost_to_ana()
    asked = counter.ledger.inputs(1)
    assert asked is not None
    counter.ledger.keep(replace(asked, round=90))
    counter.ledger.keep(replace(asked, round=2))
    assert written(counter, 90) is None
    assert written(counter, 2) is not None


def test_a_round_whose_inputs_are_not_kept_any_more_is_told_in_its_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = lost_to_ana()
    asked = counter.ledger.inputs(1)
    assert asked is not None
    for number in range(2, 2 + ledger.INPUTS_MAX):
        counter.ledger.keep(replace(asked, round=number))
    assert counter.ledger.inputs(1) is None
    assert "an estimate" in counter.ask("explain", "bob-1")["rounds"][0]["reason"]


def test_a_round_that_ends_otherwise_when_it_is_held_again_explains_nothing() -> None:
    counter = lost_to_ana()
    (record,), asked, bob = counter.ledger.rounds(limit=1), counter.ledger.inputs(1), AppId("bob-1")
    assert asked is not None
    told = losses.outcome_of(record, bob)
    assert losses.explained(asked, record, bob) != told
    otherwise = tuple(replace(outcome, gpus=()) for outcome in record.outcomes)
    assert losses.explained(asked, replace(record, outcomes=otherwise), bob) == told


def test_inputs_that_another_version_has_written_explain_nothing(tmp_path: Path) -> None:
    book = Ledger(tmp_path / "ledger.db")
    with sqlite3.connect(tmp_path / "ledger.db") as database:
        database.execute("INSERT INTO inputs VALUES (1, x'c1')")
    assert book.inputs(1) is None


def test_the_explanation_of_a_gpu_is_its_story() -> None:
    told = contended().ask("explain", gpu_id("n1", 0))
    assert any("granted to ana-1" in line["what"] for line in told["story"])


def test_an_explanation_of_nothing_names_the_next_step() -> None:
    counter = contended()
    (send,) = counter.queries.ask(ANA, Query("q", "explain", "zoe-9"), counter.site.now)
    assert isinstance(send.message, Answer)
    assert "gpu-arbiter ps" in send.message.error


def test_nodes_are_listed_with_the_state_of_every_gpu() -> None:
    (node,) = contended().ask("nodes")["nodes"]
    assert (node["id"], node["state"]) == ("n1", "up")
    assert (node["gpus"][0]["state"], node["gpus"][0]["app"]) == ("leased", "ana-1")
    assert node["gpus"][0]["tasks"] == ["ana-1.0-a0"]
    assert "ana-1.0-a0" in views.nodes_table({"nodes": [node]}, 0.0).splitlines()[-1].split()


def test_shares_say_what_each_tenant_is_due_and_has_had() -> None:
    counter = contended()
    document = counter.ask("shares")
    assert (document["schema"], document["gpus"]) == ("shares/v1", 1)
    (team,) = document["tenants"]
    had = counter.ask("apps", "ana-1")["apps"][0]["gpu_seconds"]
    assert (team["tenant"], team["weight"], team["quota_gpus"], team["held_gpus"]) == ("team", 1.0, 1.0, 1.0)
    assert (team["wanted_gpus"], team["apps"]) == (2, 2)
    assert team["gpu_seconds"] == pytest.approx(had)
    assert team["ltgf"] == pytest.approx(had / team["fair_gpu_seconds"])


def test_shares_by_owner_are_the_sums_over_apps_of_the_state_and_of_the_ledger() -> None:
    counter = contended()
    counter.ledger.write(
        AppRecord(AppId("ana-maria-kqz7"), TenantId("team"), 1.0, 0.0, 9.0, 7.0, 14.0, 5.0, lost_gpu_s=2.0)
    )
    counter.ledger.write(AppRecord(AppId("bob-0"), TenantId("team"), 1.0, 0.0, 9.0, 7.0, 14.0, 5.0))
    counter.ledger.write(AppRecord(AppId("ana-1"), TenantId("team"), 1.0, 0.0, 9.0, 1e6, 1e6, 1e6))  # not over yet
    assert "owners" not in counter.ask("shares")
    document = counter.ask("shares", "owner")
    ana, maria, bob = document["owners"]
    had = counter.ask("apps", "ana-1")["apps"][0]["gpu_seconds"]
    fair, bob_fair = (
        counter.site.arbiter.state.history.of_app(AppId(app), counter.site.now).fair_gpu_s for app in ("ana-1", "bob-1")
    )
    assert (ana["owner"], ana["apps"], ana["held_gpus"], ana["wanted_gpus"]) == ("ana", 1, 1.0, 1)
    assert (ana["gpu_seconds"], ana["fair_gpu_seconds"]) == (pytest.approx(had), pytest.approx(fair))
    assert maria == {
        "owner": "ana-maria", "wanted_gpus": 0, "held_gpus": 0.0, "apps": 0, "gpu_seconds": 7.0,
        "lost_gpu_seconds": 2.0, "fair_gpu_seconds": 14.0, "ltgf": 0.5,
    }  # fmt: skip
    assert (bob["apps"], bob["gpu_seconds"]) == (1, 7.0)
    assert bob["fair_gpu_seconds"] == pytest.approx(bob_fair + 14.0)
    told = views.owners_table(document).splitlines()
    assert told[0].split() == ["OWNER", "WANT", "HELD", "APPS", "GPU-H", "FAIR-GPU-H", "LOST-GPU-H", "LTGF"]
    assert told[-1] == "since 1970-01-01T00:16:40.000Z"
    assert "older than this program" in views.owners_table({"tenants": []})


def test_what_an_app_waits_for_is_told_by_id() -> None:
    counter = contended()
    ana, bob = counter.ask("apps")["apps"]
    assert (ana["waits_for"], bob["waits_for"]) == (None, {"kind": "apps", "ids": ["ana-1"]})
    row = views.apps_table({"apps": [ana, bob]}).splitlines()[-1]
    assert row.split()[-1] == "ana-1"
    counter.site.node("n2", 1)
    assert counter.ask("apps")["apps"][1]["waits_for"] == {"kind": "round", "ids": []}


def test_the_apps_whose_leases_end_first_are_named_until_their_gpus_are_enough() -> None:
    counter = Counter(replace(SETTINGS, policy="las"))
    site = counter.site
    site.node("n1", 4)
    for app in ("ana-1", "bob-1", "eve-1"):
        counter.note(site.play_round(site.app(app) + site.wait(1)))
    assert [app["gpus"] != [] for app in counter.ask("apps")["apps"]] == [True] * 3
    site.app("zoe-1", gang=2, demand=2)
    waits = counter.ask("apps", "zoe-1")["apps"][0]["waits_for"]
    assert waits == {"kind": "round", "ids": []}, "one GPU is free"
    counter.note(site.play_round(site.app("kim-1") + site.wait(1)))
    waits = counter.ask("apps", "zoe-1")["apps"][0]["waits_for"]
    assert waits == {"kind": "apps", "ids": ["ana-1", "bob-1"]}


def test_an_app_waits_for_a_node_where_there_is_none_and_for_a_gpu_where_none_is_in_service() -> None:
    counter = Counter()
    counter.site.app("ana-1")
    assert counter.ask("apps")["apps"][0]["waits_for"] == {"kind": "node", "ids": []}
    counter.site.node("n1", 0)
    assert counter.ask("apps")["apps"][0]["waits_for"] == {"kind": "gpu", "ids": []}


def test_shares_say_since_when_time_is_counted_and_that_quotas_are_more_than_there_is() -> None:
    terms = (TenantTerms(TenantId("nlp"), quota=80), TenantTerms(TenantId("vision"), 2.0))
    counter = Counter(replace(SETTINGS, tenants=terms))
    counter.site.node("n1", 4)
    document = counter.ask("shares")
    assert document["since"] == "1970-01-01T00:16:40.000Z", "when the site began, at 1000 s"
    assert [(each["quota_gpus_named"], each["quota_gpus"]) for each in document["tenants"]] == [(80, 4.0), (None, 0.0)]
    assert "the quotas are of 80 GPUs, and there are 4: each is cut in proportion" in views.shares_table(document)
    counter.site.node("n2", 76)
    assert "the quotas are" not in views.shares_table(counter.ask("shares"))


def test_an_app_is_listed_with_its_long_term_fairness() -> None:
    ana, bob = contended().ask("apps")["apps"]
    # ana had the GPU for all the time, of which half was fair once bob had come
    assert ana["ltgf"] == pytest.approx(ana["gpu_seconds"] / ana["fair_gpu_seconds"])
    assert ana["ltgf"] > 1.5
    assert bob["ltgf"] == 0.0


def test_rounds_and_leases_come_from_the_ledger_and_from_what_is_still_held() -> None:
    counter = contended()
    told = counter.ask("rounds")
    assert told["count"] == len(told["rounds"]) == counter.site.arbiter.state.round
    assert [lease["app"] for lease in counter.ask("leases")["leases"]] == ["ana-1"]
    counter.note(counter.site.app("ana-1", state="finished", demand=0))
    counter.note(counter.site.node("n1"))
    leases = counter.ask("leases")["leases"]
    assert [lease["app"] for lease in leases] == ["ana-1"], "told once, by the ledger, now that the lease is over"
    assert leases[0]["to"] - leases[0]["from"] > 85


def round_of(number: int, apps: int, *, gpus: int = 2) -> RoundRecord:
    """A round after which so many apps were told why they got nothing, and two others got a GPU."""
    lost = tuple(Outcome(AppId(f"bob-{app}"), (), f"bid and lost: {'what others bid ' * 8}") for app in range(apps))
    won = tuple(Outcome(AppId(f"ana-{app}"), (gpu_id("n1", app),), "won", won=1) for app in range(gpus))
    offered = tuple(gpu_id("n1", index) for index in range(gpus))
    return RoundRecord(number, 60.0 * number, 0.5, (), (), (), offered, lost + won, proven=True, facts={})


def pages(counter: Counter, kind: str, limit: int = 0) -> list[list[dict[str, Any]]]:
    """All pages of a list, as a client fetches them."""
    told: list[list[dict[str, Any]]] = []
    offset: int | None = 0
    while offset is not None:
        query = Query("q1", kind, "", offset, limit)  # type: ignore[arg-type]
        (send,) = counter.queries.ask(ANA, query, counter.site.now)
        assert isinstance(send.message, Answer)
        assert send.message.error == "", send.message.error
        assert len(encode(send.message, sender=ARBITER, id="m1")) <= queries.PAGE_BYTES_MAX + 1000
        document = msgspec.json.decode(send.message.document)
        told.append(document[kind])
        assert document["next_offset"] in (None, offset + len(told[-1]))
        offset = document["next_offset"]
    return told


def test_rounds_come_in_pages_when_no_message_carries_them_all() -> None:
    counter = Counter()
    for number in range(1, 301):
        counter.ledger.write(round_of(number, 100))
    told = pages(counter, "rounds")
    assert len(told) > 3
    assert [entry["round"] for page in told for entry in page] == list(range(300, 0, -1))
    assert [entry["round"] for entry in pages(counter, "rounds", 7)[0]] == list(range(300, 293, -1))


def test_a_round_about_more_apps_than_a_message_carries_is_told_with_those_that_won() -> None:
    counter = Counter()
    counter.ledger.write(round_of(1, 30_000))
    ((entry,),) = pages(counter, "rounds")
    assert [outcome["app"] for outcome in entry["outcomes"] if outcome["gpus"]] == ["ana-0", "ana-1"]
    assert entry["outcomes_left_out"] + len(entry["outcomes"]) == 30_002


def test_leases_come_in_pages_those_held_now_first() -> None:
    counter = contended()
    for number in range(12_000):
        gone = LeaseRecord(LeaseId(f"L{number}"), AppId("bob-1"), gpu_id("n1", 0), NodeId("n1"), 0.0, number + 1.0, "")
        counter.ledger.write(gone)
    told = [entry for page in pages(counter, "leases") for entry in page]
    assert [entry["app"] for entry in told[:2]] == ["ana-1", "bob-1"]
    assert [entry["lease"] for entry in told[1:]] == [f"L{number}" for number in reversed(range(12_000))]


def test_apps_and_nodes_come_in_pages_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "PAGE_BYTES_MAX", 20_000)
    counter = Counter()
    for number in range(8):
        counter.site.node(f"n{number}", 16)
    for number in range(40):
        counter.site.app(f"ana-{number}")
    told = pages(counter, "apps")
    assert len(told) > 1
    assert sorted(app["id"] for page in told for app in page) == sorted(f"ana-{number}" for number in range(40))
    assert [app["id"] for app in pages(counter, "apps", 2)[1]] == [app["id"] for app in told[0][2:4]]
    nodes = pages(counter, "nodes")
    assert len(nodes) > 1
    assert [node["id"] for page in nodes for node in page] == [f"n{number}" for number in range(8)]


def test_a_log_is_fetched_from_the_node_that_has_it_and_returned_to_who_asked() -> None:
    counter = contended()
    (fetch,) = counter.queries.ask(ANA, Query("q7", "log", "ana-1", offset=3), counter.site.now)
    assert fetch == Send(Party("node", "n1"), ReadLog("q7", TaskId("ana-1.0-a0"), 3))
    (answer,) = counter.queries.deliver(
        Party("node", "n1"), LogChunk("q7", TaskId("ana-1.0-a0"), 3, b"loss 0.1\n", 12, ended=False)
    )
    assert answer.to == ANA
    assert isinstance(answer.message, Answer)
    document = msgspec.json.decode(answer.message.document)
    assert base64.b64decode(document["data"]) == b"loss 0.1\n"
    assert counter.queries.deliver(Party("node", "n1"), LogChunk("q7", TaskId("x"), 0, b"", 0, ended=True)) == []


DOOR = TerminalDoor("q8", TaskId("ana-1.0-a0"), "gpu-1", 7073, "0f" * 24, "5e" * 32, boot_id="b00t")


def test_the_way_to_a_terminal_comes_from_the_node_that_has_it_and_is_told_to_the_owner_who_asked() -> None:
    counter = contended()
    (ask,) = counter.queries.ask(ANA, Query("q8", "terminal", "ana-1"), counter.site.now)
    assert ask == Send(Party("node", "n1"), OpenTerminal("q8", TaskId("ana-1.0-a0")))
    (answer,) = counter.queries.deliver(Party("node", "n1"), DOOR)
    assert answer.to == ANA
    assert isinstance(answer.message, Answer)
    told = msgspec.json.decode(answer.message.document)
    assert told == {"schema": "terminal/v1", "task": "ana-1.0-a0"} | {
        field: getattr(DOOR, field) for field in ("address", "port", "token", "fingerprint", "boot_id")
    }


def test_the_terminal_of_an_app_is_for_its_owner_only() -> None:
    counter = contended()
    (no,) = counter.queries.ask(Party("app", "bob"), Query("q8", "terminal", "ana-1"), counter.site.now)
    assert isinstance(no.message, Answer)
    assert no.message.error == "the terminal of ana-1 is for ana only"
    assert msgspec.json.decode(no.message.document)["code"] == NOT_PERMITTED
    assert counter.queries.deliver(Party("node", "n1"), DOOR) == []


def test_no_other_node_can_answer_for_the_node_that_was_asked() -> None:
    counter = contended()
    counter.queries.ask(ANA, Query("q8", "terminal", "ana-1"), counter.site.now)
    assert counter.queries.deliver(Party("node", "n2"), replace(DOOR, address="evil")) == []
    assert counter.queries.deliver(Party("node", "n1"), DOOR)


@pytest.mark.parametrize(("soon", "code"), [(False, FAILED), (True, TIMED_OUT)])
def test_a_node_without_a_way_to_a_terminal_says_why_and_whether_to_ask_again(soon: bool, code: int) -> None:
    counter = contended()
    counter.queries.ask(ANA, Query("q8", "terminal", "ana-1"), counter.site.now)
    no = TerminalDoor("q8", TaskId("ana-1.0-a0"), error="it has no terminal", soon=soon)
    (answer,) = counter.queries.deliver(Party("node", "n1"), no)
    assert isinstance(answer.message, Answer)
    assert answer.message.error == "it has no terminal"
    assert msgspec.json.decode(answer.message.document)["code"] == code


def spread() -> Counter:
    """An app whose one job lies on two nodes, and has been on one node alone before."""
    counter = Counter()
    site = counter.site
    site.node("n1", 1)
    site.node("n2", 1)
    site.app("mary-ann-1")
    app = site.arbiter.state.apps[AppId("mary-ann-1")]
    nodes = {"mary-ann-1.0-a9": "n2", "mary-ann-1.0-a10": "n1", "mary-ann-1.0-a10.1": "n2"}
    ran = {TaskId(name): NodeId(node) for name, node in nodes.items()}
    site.arbiter.state.apps[app.id] = replace(app, ran=ran)
    return counter


@pytest.mark.parametrize(
    ("target", "task", "node"),
    [
        ("mary-ann-1", "mary-ann-1.0-a10", "n1"),
        ("mary-ann-1.0", "mary-ann-1.0-a10", "n1"),
        ("mary-ann-1.0-a10", "mary-ann-1.0-a10", "n1"),
        ("mary-ann-1.0-a10.1", "mary-ann-1.0-a10.1", "n2"),
        ("mary-ann-1.0-a9", "mary-ann-1.0-a9", "n2"),
    ],
)
def test_the_log_of_a_job_on_several_nodes_is_that_of_its_first_part_and_each_part_has_a_name(
    target: str, task: str, node: str
) -> None:
    counter = spread()
    (fetch,) = counter.queries.ask(Party("app", "mary-ann"), Query("q", "log", target), counter.site.now)
    assert fetch == Send(Party("node", node), ReadLog("q", TaskId(task), 0))


@pytest.mark.parametrize("target", ["mary-ann-1.0-a10.2", "mary-ann-1.1", "mary-ann-1.0-a1", "mary", "mary-ann-1."])
def test_a_part_that_is_not_known_has_no_log(target: str) -> None:
    counter = spread()
    (send,) = counter.queries.ask(Party("app", "mary-ann"), Query("q", "log", target), counter.site.now)
    assert isinstance(send.message, Answer)
    assert f"no node has output of {target}" in send.message.error


def test_the_output_of_an_app_is_for_its_owner_only() -> None:
    counter = contended()
    (send,) = counter.queries.ask(Party("app", "bob"), Query("q", "log", "ana-1"), counter.site.now)
    assert isinstance(send.message, Answer)
    assert "for ana only" in send.message.error


def test_a_log_of_nothing_is_refused_with_a_sentence() -> None:
    counter = contended()
    (send,) = counter.queries.ask(ANA, Query("q", "log", "bob-1"), counter.site.now)
    assert isinstance(send.message, Answer)
    assert "may not have started" in send.message.error


def crowded(policy: str) -> Counter:
    """Three apps and one GPU, which a round has given away."""
    counter = Counter()
    site = counter.site
    site.handle(Configured(replace(SETTINGS, policy=policy)))
    for app in ("ana-1", "bob-1", "cleo-1"):
        site.app(app)
    counter.note(site.play_round(site.node("n1", 1) + site.wait(6)))
    return counter


@pytest.mark.parametrize("policy", sorted(name for name, entry in POLICIES.items() if not entry.made().traits.sells))
def test_an_app_of_a_crowded_round_is_told_when_asked_what_a_smaller_round_would_have_told_it(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = crowded(policy)
    monkeypatch.setattr(round_views, "REASONS_MAX", 0)
    large = crowded(policy)
    assert [each.app for each in large.ledger.rounds(limit=1)[0].outcomes] != ["ana-1", "bob-1", "cleo-1"]
    for app in ("ana-1", "bob-1", "cleo-1"):
        stories = [counter.ask("explain", app)["story"] for counter in (large, small)]
        told, known = ([line["what"] for line in story if line["what"].startswith("round 1: ")] for story in stories)
        assert told == known != []
    rest = large.site.arbiter.state.rest
    assert rest is not None
    assert rest.what not in told


def test_the_daemon_works_out_what_a_crowded_round_did_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_views, "REASONS_MAX", 0)
    monkeypatch.setattr(queries, "TRIED_APPS_MAX", 0)  # as of a large site, where what binds is not tried out
    with the_daemon(crowded("fifo")) as performer:
        (*_, last) = explained_by(performer, "cleo-1")["story"]
    assert last["what"].startswith("round 1: number 3 in order of arrival: nothing is left of the GPUs in play")


def test_an_app_of_a_crowded_round_whose_inputs_are_gone_is_told_what_holds_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(round_views, "REASONS_MAX", 0)
    counter = crowded("backfill")
    site = counter.site
    counter.ledger._newest.clear()  # as after a restart
    assert site.held("ana-1") == [gpu_id("n1", 0)]
    told = counter.ask("explain", "cleo-1")["story"]
    assert told[-1]["what"].startswith("round 1: ")
    assert site.arbiter.state.rest is not None
    assert told[-1]["what"] == site.arbiter.state.rest.what
    own = counter.ask("explain", "ana-1")["story"]
    assert all(line["what"] != site.arbiter.state.rest.what for line in own)
