"""Events: what happens to apps, nodes and the arbiter, in the ledger and in answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from arbiter.core.arbiter import Arbiter
from arbiter.core.effects import EventRecord
from arbiter.ledger import Ledger
from arbiter.queries import Queries
from protocol.messages import Act, Answer, AppId, EventFilter, OwnerId, Party, Query
from tests.core.test_decisions import contended
from tests.support.arbiter_site import SETTINGS, Effect, Site, gpu_id, task, wish

ANA, ROOT = (Party("app", name) for name in ("ana", "root"))


class Desk:
    """A site, its ledger, and the questions that it answers."""

    def __init__(self, path: Path | str = ":memory:", **settings: object) -> None:
        self.site = Site(replace(SETTINGS, admins=(OwnerId("root"),), **settings))
        self.ledger = Ledger(path)
        self.kept = 0

    def keep(self) -> None:
        """Hand the journal to an arbiter that begins at nothing, and write what it records, as a restart does."""
        again = Arbiter()
        for now, event in self.site.journal:
            for effect in again.handle(event, now):
                if isinstance(effect, EventRecord):
                    self.ledger.write(effect)

    def ask(self, *ids: str, offset: int = 0, limit: int = 0, **among: Any) -> dict[str, Any]:
        query = Query("q", "events", "", offset, limit, events=EventFilter(ids, **among))
        (send,) = Queries(self.site.arbiter, self.ledger).ask(ANA, query, self.site.now)
        assert isinstance(send.message, Answer)
        assert send.message.error == ""
        return msgspec.json.decode(send.message.document)  # type: ignore[no-any-return]

    def told(self, *ids: str, **among: Any) -> list[tuple[str, str]]:
        self.keep()
        return [(event["kind"], event["what"]) for event in self.ask(*ids, **among)["events"]]

    def run(self, app: str, gpus: Sequence[str], *, attempt: int = 0, node: str = "n1", **more: Any) -> None:
        """Let a task of an app run on GPUs that it holds."""
        self.site.app(app, gang=len(gpus), demand=len(gpus), jobs=[wish(app, 0, gpus, attempt=attempt)])
        self.site.node(node, tasks=[task(app, 0, gpus, "running", attempt=attempt, **more)], used=gpus)


def training(**settings: object) -> tuple[Desk, list[str]]:
    """ana-1 trains on both GPUs of n1."""
    desk = Desk(**settings)
    desk.site.node("n1", 2)
    desk.site.play_round(desk.site.app("ana-1", gang=2, demand=2) + desk.site.wait(0))
    gpus = desk.site.held("ana-1")
    desk.run("ana-1", gpus)
    return desk, gpus


def happened(effects: Sequence[Effect]) -> list[tuple[str, str]]:
    return [(each.kind, each.what) for each in effects if isinstance(each, EventRecord)]


def test_an_apps_events_tell_its_life_in_order_with_one_line_for_all_gpus_of_a_round() -> None:
    desk, gpus = training()
    site = desk.site
    site.hear(ANA, Act("act-1", "hold", "ana-1"))
    left = task("ana-1", 0, gpus, "exited", outcome="preempted", step=40, reason="saved step 40")
    site.node("n1", tasks=[left])
    site.app("ana-1", gang=2, demand=2)
    site.node("n1")
    site.hear(ANA, Act("act-2", "release", "ana-1"))
    site.play_round(site.app("ana-1", gang=2, demand=2) + site.wait(1))
    desk.run("ana-1", gpus, attempt=1)
    site.app("ana-1", state="finished")
    site.node("n1")
    both = f"{gpus[0]}, {gpus[1]} on n1"
    assert desk.told("ana-1") == [
        ("submitted", "by ana for tenant team: train"),
        ("admitted", ""),
        ("granted", f"{both} in round 1"),
        ("starting", "ana-1.0-a0 on n1"),
        ("running", "ana-1.0-a0 on n1"),
        ("held", "by its owner"),
        ("preempted", f"{both}: held by its owner"),
        ("exited", "ana-1.0-a0 on n1, preempted at step 40 (saved step 40)"),
        ("freed", f"{both}: held by its owner"),
        ("released", "by its owner"),
        ("granted", f"{both} in round 2"),
        ("restarted", "ana-1.0-a1 on n1"),
        ("running", "ana-1.0-a1 on n1"),
        ("finished", ""),
        ("freed", f"{both}: the app has finished"),
    ]


def test_an_event_says_where_and_of_what_it_was_as_data() -> None:
    desk, gpus = training()
    desk.keep()
    (granted,) = desk.ask(kinds=("granted",))["events"]
    assert granted["gpus"] == gpus
    assert (granted["app"], granted["tenant"], granted["node"], granted["round"]) == ("ana-1", "team", "n1", 1)
    assert (granted["at"], granted["at_s"]) == ("1970-01-01T00:16:40.000Z", 1000.0)
    (started,) = desk.ask(kinds=("starting",))["events"]
    assert (started["task"], started["by"]) == ("ana-1.0-a0", None)


def test_a_winner_is_named_where_another_is_preempted_for_it() -> None:
    site, decided = contended({0: "bob-1", 1: "ana-1"})
    (lost,) = [each for each in site.handle(decided) if isinstance(each, EventRecord) and each.kind == "preempted"]
    assert (lost.app, lost.by, lost.gpus) == ("ana-1", "bob-1", (gpu_id("n1", 0),))
    assert lost.what == f"{gpu_id('n1', 0)} on n1: round {site.arbiter.state.round} gave it to bob-1"
    assert site.arbiter.state.counts.preemptions["outbid"] == 1


def test_a_job_that_goes_on_elsewhere_has_moved() -> None:
    desk, gpus = training()
    site = desk.site
    site.node("n2", 2)
    site.hear(ROOT, Act("act-1", "drain", "n1", reason="new memory"))
    left = task("ana-1", 0, gpus, "exited", outcome="preempted")
    site.node("n1", tasks=[left])
    site.app("ana-1", gang=2, demand=2)
    site.node("n1")
    site.play_round(site.app("ana-1", gang=2, demand=2) + site.wait(1))
    desk.run("ana-1", site.held("ana-1"), attempt=1, node="n2")
    assert ("moved", "ana-1.0-a1 from n1 to n2") in desk.told("ana-1")
    site.hear(ROOT, Act("act-2", "undrain", "n1"))
    told = desk.told(nodes=("n1",))
    assert [each for each in told if each[0] in ("enrolled", "draining", "drained", "undrained")] == [
        ("enrolled", "with 2 GPUs in rack-1"),
        ("draining", "by root: new memory"),
        ("drained", "it holds no task"),
        ("undrained", "by root: it is in use again"),
    ]
    assert ("granted", f"{gpus[0]}, {gpus[1]} on n1 in round 1") in told, "an app's events on a node are the node's"


def test_a_job_that_is_parked_is_suspended_and_resumed_but_its_turns_on_a_shared_gpu_are_no_events() -> None:
    desk, gpus = training(sharing="timeslice", seats=2)
    site = desk.site
    for phase in ("resting", "running", "resting", "suspended", "resuming", "running"):
        site.node("n1", tasks=[task("ana-1", 0, gpus, phase, step=9)], used=gpus)
    tasks = [each for each in desk.told("ana-1.0") if each[0] not in ("starting", "granted")]
    assert tasks == [
        ("running", "ana-1.0-a0 on n1"),
        ("suspended", "ana-1.0-a0 on n1, at step 9"),
        ("resumed", "ana-1.0-a0 on n1, at step 9"),
    ]


def test_a_gpu_that_falls_ill_and_recovers_and_a_node_that_is_lost_and_returns() -> None:
    desk = Desk(sharing="timeslice", seats=3)
    site, ill = desk.site, gpu_id("n1", 0)
    site.node("n1", 1)
    site.node("n1", sick=[ill])
    site.node("n1", quarantined=[ill])
    site.node("n1")
    site.node("n1", 0)
    site.node("n1", 1)
    site.wait(31)
    site.node("n1")
    assert desk.told(nodes=("n1",)) == [
        ("enrolled", "with 1 GPUs in rack-1"),
        ("unhealthy", f"{ill} on n1: unhealthy: fell off the bus"),
        ("healthy", f"{ill} on n1: in service again"),
        ("absent", f"{ill} on n1: its node no longer reports it"),
        ("healthy", f"{ill} on n1: in service again"),
        ("lost", "silent for 30 s"),
        ("returned", "after 1.0 s"),
    ]


def test_events_of_the_arbiter_itself_are_of_no_app_and_no_node() -> None:
    desk = Desk()
    desk.site.node("n1", 1)
    desk.site.now += 100
    desk.site.node("n1")
    desk.site.lead(replace(desk.site.arbiter.state.settings, policy="las"))
    assert desk.told(kinds=("led", "away", "configured")) == [
        ("led", "the arbiter leads, in epoch 1"),
        ("away", "the arbiter was away for 100 s"),
        ("configured", "settings changed; the policy is las"),
        ("led", "the arbiter leads, in epoch 2"),
    ]


def test_what_a_restart_records_again_is_there_once_and_numbers_go_on_from_a_snapshot(tmp_path: Path) -> None:
    desk = Desk(tmp_path / "ledger.db")
    desk.site.node("n1", 1)
    desk.site.app("ana-1")
    before = desk.told()
    assert desk.told() == before, "the same journal again"
    desk.ledger.close()
    desk.ledger = Ledger(tmp_path / "ledger.db")
    assert [each["kind"] for each in desk.ask()["events"]] == [kind for kind, _ in before], "the file has them"
    again = Arbiter.restored(desk.site.arbiter.snapshot())
    assert again.state.events == len(before) > 0


def test_two_journals_in_one_ledger_do_not_hide_each_others_events() -> None:
    desk = Desk()
    desk.keep()
    other = Desk()
    other.site = Site(SETTINGS, start=5000.0)
    other.ledger = desk.ledger
    assert [at["at_s"] for at in desk.ask()["events"]] == [1000.0]
    other.keep()
    assert [at["at_s"] for at in desk.ask()["events"]] == [1000.0, 5000.0]


def test_pages_follow_each_other_without_a_gap_and_the_cursor_leads_to_what_comes_next() -> None:
    desk = Desk()
    desk.site.node("n1", 1)
    for number in range(1, 8):
        desk.site.app(f"ana-{number}")
    desk.keep()
    everything = [event["id"] for event in desk.ask()["events"]]
    newest = desk.ask(limit=4)
    assert [event["id"] for event in newest["events"]] == everything[-4:]
    seen, page = list[int](), desk.ask(limit=len(everything))
    assert [event["id"] for event in page["events"]] == everything
    cursor = 0
    for _ in range(20):
        page = desk.ask(offset=cursor or 1, limit=3)
        seen += [event["id"] for event in page["events"]]
        cursor = page["cursor"]
    assert [1, *seen] == everything
    assert desk.ask("zoe-9", limit=3)["cursor"] == everything[-1], "also where nothing fits"
    desk.site.app("bob-1")
    desk.keep()
    assert [event["app"] for event in desk.ask(offset=cursor)["events"]] == ["bob-1", "bob-1"]
    assert desk.ask(offset=10**9)["cursor"] == everything[-1] + 2, "a ledger that began anew"


def test_filters_keep_what_fits_each_of_them() -> None:
    desk, _ = training()
    desk.site.wait(3)
    desk.site.app("bob-1", tenant="other")  # type: ignore[arg-type]
    desk.keep()
    assert {event["app"] for event in desk.ask(tenants=("other",))["events"]} == {"bob-1"}
    assert {event["app"] for event in desk.ask(since_s=2.0)["events"]} == {"bob-1"}
    assert {event["kind"] for event in desk.ask("ana-1", nodes=("n1",))["events"]} == {"granted", "starting", "running"}
    assert desk.ask("ana-1", tenants=("other",))["events"] == []
    assert [event["task"] for event in desk.ask("ana-1.0-a0")["events"]] == ["ana-1.0-a0"] * 2
    assert desk.ask("ana-1.1")["events"] == []
    unknown = desk.ask("ana-1", "ana-1.1", "zoe-9", nodes=("n1", "n9"))["unknown"]
    assert unknown == {"ids": ["ana-1.1", "zoe-9"], "nodes": ["n9"]}


def test_an_app_that_the_arbiter_has_forgotten_is_explained_by_its_events() -> None:
    desk, _ = training()
    site = desk.site
    site.app("ana-1", state="finished")
    site.node("n1")
    desk.keep()
    del site.arbiter.state.apps[AppId("ana-1")], site.arbiter.state.stories["ana-1"]
    (send,) = Queries(site.arbiter, desk.ledger).ask(ANA, Query("q", "explain", "ana-1"), site.now)
    assert isinstance(send.message, Answer)
    story = [chapter["what"] for chapter in msgspec.json.decode(send.message.document)["story"]]
    assert story[:2] == ["submitted: by ana for tenant team: train", "admitted"]
    assert story[-1].startswith("freed: ")


def test_an_event_is_one_line_of_bounded_length_whatever_a_node_says() -> None:
    site = Site()
    site.app("ana-1")
    site.node("n1", 1)
    long = task("ana-1", 0, [gpu_id("n1", 0)], "exited", reason="a\n\nb " + "y" * 8000)
    effects = site.node("n1", tasks=[long])
    (exited,) = [what for kind, what in happened(effects) if kind == "exited"]
    assert "a b yyy" in exited
    assert len(exited) == 500
