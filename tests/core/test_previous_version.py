"""What the version before wrote: one app agent of it is understood, and snapshots and events of it are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest

from app_agent.core.host import AppHost, Configured, Submit
from arbiter.core.arbiter import Arbiter
from arbiter.core.arbiter import Configured as ArbiterConfigured
from protocol import previous_version
from protocol.codec import VERSION, decode, encode
from protocol.core import Received
from protocol.journal.sqlite import SqliteJournal
from protocol.messages import AppId, AppReport, OwnerId, Party, Requirements, Utility
from tests.support.app_harness import spec_of
from tests.support.arbiter_site import Site, wish

WISHES: dict[str, Any] = {
    "spans": True,
    "grace_s": 30.0,
    "preempt_by": "checkpoint",
    "priority": -3,
    "kind": "interactive",
    "cpus": 4.0,
    "host_bytes": 2**30,
    "weight": 0.5,
    "utility": Utility(50.0, 0.001, 3600.0),
}
IN_JOBS = ("grace_s", "preempt_by", "priority")


def formerly(raw: Any) -> Any:
    """A value in the form of the version before: wishes one by one, three of them in each job where there are jobs."""
    if isinstance(raw, list):
        return [formerly(item) for item in raw]
    if not isinstance(raw, dict):
        return raw
    fields = {name: formerly(value) for name, value in raw.items()}
    if "ran" in fields:
        fields["ran"] = dict(sorted(fields["ran"]))
    if "policies" in fields:
        moved = {"fairness_knob": 0.5, "trial_share": fields.pop("interactive_share"), "trial_s": 7.0, "reasons_max": 3}
        fields |= {"policy_settings": moved, "classes": ["batch", "trial"], "gather_leases": 2.0}
        del fields["policies"], fields["interactive_s"], fields["align_after_leases"]
    if "requirements" not in fields:
        return fields
    wishes = {name: value for name, value in fields.pop("requirements").items() if name in WISHES}
    wishes["kind"] = {"interactive": "trial"}.get(wishes["kind"], wishes["kind"])
    if "jobs" in fields:
        for job in fields["jobs"]:
            job |= {name: wishes[name] for name in IN_JOBS}
        wishes = {name: value for name, value in wishes.items() if name not in IN_JOBS}
    return fields | wishes


def former_bytes(packed: bytes) -> bytes:
    packed = msgspec.msgpack.encode(formerly(msgspec.msgpack.decode(packed)))
    assert b"requirements" not in packed
    return packed


def report() -> AppReport:
    """The report of an app with one job that has wishes of each kind."""
    requirements = Requirements(**WISHES)
    return AppReport(AppId("ana-1"), "t", "x", 1, "active", 1, 1, (wish("ana-1", 0, ()),), requirements)  # type: ignore[arg-type]


def test_each_wish_that_there_was_is_tried_with_another_value_than_it_has_by_itself() -> None:
    assert WISHES.keys() == set(previous_version.WISHES)
    assert all(value != getattr(Requirements(), name) for name, value in WISHES.items())


def test_a_report_of_an_app_agent_of_the_version_before_says_the_same() -> None:
    sender = Party("app", "ana")
    raw = msgpack.unpackb(encode(report(), sender=sender, id="1"))
    assert raw["v"] == VERSION
    envelope = decode(msgpack.packb(formerly(raw)))
    assert envelope.body == report()


def test_a_snapshot_of_the_arbiter_of_the_version_before_holds_the_same_apps() -> None:
    site = Site()
    site.node("n1", 2)
    site.app("ana-1", jobs=[wish("ana-1", 0, [])], **WISHES)
    site.app("ana-2", gang=2, demand=4)
    snapshot = site.arbiter.snapshot()
    former_snapshot = former_bytes(snapshot)
    assert b"policy_settings" in former_snapshot
    arbiter = Arbiter.restored(former_snapshot)
    assert arbiter.state.settings.policies == {}
    assert arbiter.state.settings.classes == ("batch", "interactive")
    arbiter.handle(ArbiterConfigured(site.arbiter.state.settings), site.now)
    assert arbiter.state.apps == site.arbiter.state.apps
    assert {app.requirements.kind for app in arbiter.state.apps.values()} == {"batch", "interactive"}


def test_a_snapshot_of_an_app_agent_of_the_version_before_holds_the_same_apps() -> None:
    host = AppHost(OwnerId("ada"), tenant="team-a")
    host.handle(Configured("team-a", 5.0, ""), 0.0)
    host.handle(Submit("r1", spec_of(**WISHES)), 0.0)
    snapshot = host.snapshot()
    assert AppHost.restore(former_bytes(snapshot)).snapshot() == snapshot


def test_events_that_the_version_before_left_in_a_journal_are_read(tmp_path: Path) -> None:
    journal = SqliteJournal.of(tmp_path / "j.db", Received | ArbiterConfigured)
    event = Received(Party("app", "ana"), report())
    journal._encode = lambda kept: former_bytes(msgspec.msgpack.encode(kept))
    journal.append(1.0, event)
    journal.commit()
    assert [kept for _, _, kept in journal.load().events] == [event]


@pytest.mark.parametrize("wrong", [{"gang": 1, "tenant": "t"}, {"gang": 1, "tenant": "t", "jobs": 7}, {}])
def test_what_is_in_neither_form_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        AppHost.restore(msgspec.msgpack.encode({"apps": {"a": {"spec": wrong}}}))


def test_where_tasks_ran_was_a_mapping_by_name_and_is_read_in_the_order_of_attempts_and_parts() -> None:
    named = {"a.0-a10": "n3", "a.0-a10.1": "n1", "a.0-a9": "n2", "a.1-a0": "n4"}
    (app,) = previous_version.decode(msgspec.msgpack.encode([{"ran": named}]), list[_Ran])
    assert app.ran == (("a.0-a9", "n2"), ("a.0-a10", "n3"), ("a.0-a10.1", "n1"), ("a.1-a0", "n4"))
    assert previous_version.decode(msgspec.msgpack.encode([app]), list[_Ran]) == [app]


class _Ran(msgspec.Struct, frozen=True):
    ran: tuple[tuple[str, str], ...]
