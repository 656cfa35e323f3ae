"""The host of an owner's apps: numbers, records, and a memory that survives a restart bit for bit."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from app_agent.core.host import (
    FORGET_AFTER_S,
    Accepted,
    AppHost,
    Ask,
    Cancel,
    Changed,
    Configured,
    Declined,
    Effect,
    Event,
    JobRecord,
    Submit,
)
from protocol.core import Connected, Received, Send, Tick
from protocol.messages import (
    ARBITER,
    Answer,
    AppId,
    AppReport,
    Grant,
    Holdings,
    JobId,
    Measured,
    OwnerId,
    Query,
    Refusal,
    RoundId,
    TaskId,
)
from tests.support.app_harness import exited, spec_of, status, terms


def host_of() -> AppHost:
    return AppHost(OwnerId("ada"), tenant="team-a", beat_s=2.0)


def submit(host: AppHost, now: float = 0.0, **changes: object) -> AppId:
    effects = host.handle(Submit("q1", spec_of(**changes)), now)
    host.validate()
    (accepted,) = (effect for effect in effects if isinstance(effect, Accepted))
    return accepted.app


def reports(effects: object) -> list[AppReport]:
    assert isinstance(effects, list)
    return [each.message for each in effects if isinstance(each, Send) and isinstance(each.message, AppReport)]


def test_apps_are_numbered_per_owner_and_reported_at_once() -> None:
    host = host_of()
    effects = host.handle(Submit("q1", spec_of()), 5.0)
    accepted, send, changed = effects
    assert accepted == Accepted("q1", AppId("ada-1"))
    assert isinstance(send, Send)
    assert isinstance(changed, Changed)
    assert (changed.record.app, changed.record.state, changed.record.submitted_at) == ("ada-1", "waiting", 5.0)
    assert submit(host) == "ada-2"


def test_what_the_spec_leaves_out_is_filled_in() -> None:
    host = host_of()
    submit(host, tenant="", name="", trials=(("python", "-u", "code/train.py"),))
    (record,) = host.records()
    assert (record.tenant, record.name) == ("team-a", "train.py")


def test_a_spec_that_cannot_run_is_declined_and_takes_no_number() -> None:
    host = host_of()
    (declined,) = host.handle(Submit("q1", spec_of(cwd="here")), 0.0)
    assert isinstance(declined, Declined)
    assert "absolute path" in declined.reason
    assert submit(host) == "ada-1"


def test_each_app_hears_only_what_is_for_it() -> None:
    host = host_of()
    one, two = submit(host), submit(host)
    grant = Grant(two, RoundId(1), 1, 1, (terms("n1g0"),))
    (report,) = reports(host.handle(Received(ARBITER, grant), 1.0))
    assert report.app == two
    assert [wish.gpus for wish in report.jobs] == [("n1g0",)]
    assert host.handle(Received(ARBITER, Grant(AppId("ada-9"), RoundId(1), 1, 1, ())), 1.0) == []
    assert one in host.state.apps


def test_every_app_restates_its_wish_when_the_bus_comes_back() -> None:
    host = host_of()
    apps = [submit(host), submit(host)]
    assert [report.app for report in reports(host.handle(Connected(), 1.0))] == apps


def test_one_tick_serves_all_apps_that_are_due() -> None:
    host = host_of()
    submit(host, 0.0)
    submit(host, 1.0)
    assert host.deadline() == 2.0
    assert len(reports(host.handle(Tick(), 2.0))) == 1
    assert host.deadline() == 3.0


def test_cancelling_is_answered_also_for_an_app_that_is_over_or_unknown() -> None:
    host = host_of()
    app = submit(host)
    accepted, send, _ = host.handle(Cancel("q2", app), 1.0)
    assert accepted == Accepted("q2", app)
    assert isinstance(send, Send)
    assert host.handle(Cancel("q3", app), 1.0)[0] == Accepted("q3", app)
    (declined,) = host.handle(Cancel("q4", AppId("ada-7")), 1.0)
    assert isinstance(declined, Declined)
    assert declined.missing


def test_a_question_goes_to_the_arbiter_and_its_answer_changes_nothing() -> None:
    host = host_of()
    submit(host)
    before = host.snapshot()
    assert host.handle(Ask("q5", "explain", "ada-1"), 1.0) == [Send(ARBITER, Query("q5", "explain", "ada-1"))]
    assert host.handle(Received(ARBITER, Answer("q5", b"{}")), 1.0) == []
    assert host.snapshot() == before


def test_a_record_tells_of_the_end_and_outlives_the_agent() -> None:
    host = host_of()
    app = submit(host)
    host.handle(Received(ARBITER, Grant(app, RoundId(1), 1, 1, (terms("n1g0"),))), 1.0)
    done = exited("ada-1.0-a0", "n1g0", "finished", metrics={"accuracy": 0.9})
    effects = host.handle(Received(ARBITER, Holdings(app, 1, 2, (terms("n1g0"),), (done,), acked=2)), 9.0)
    (changed,) = (effect for effect in effects if isinstance(effect, Changed))
    record = changed.record
    assert (record.state, record.ended_at, record.exit_code, record.metrics) == ("finished", 9.0, 0, {"accuracy": 0.9})
    host.handle(Received(ARBITER, Holdings(app, 1, 3, (), (), acked=3)), 10.0)
    assert host.deadline() is None
    host.handle(Tick(), 9.0 + FORGET_AFTER_S)
    host.validate()
    assert host.state.apps == {}
    assert host.records() == (record,)
    assert host.handle(Cancel("q", app), 700.0) == [Accepted("q", app)]
    assert submit(host, 700.0) == "ada-2", "no number is used twice"


def test_a_record_says_running_only_once_a_task_was_seen() -> None:
    host = host_of()
    app = submit(host)
    host.handle(Received(ARBITER, Grant(app, RoundId(1), 1, 1, (terms("n1g0"),))), 1.0)
    assert host.records()[0].state == "waiting"
    running = status("ada-1.0-a0", "n1g0", step=1)
    host.handle(Received(ARBITER, Holdings(app, 1, 2, (terms("n1g0"),), (running,), acked=2)), 2.0)
    assert (host.records()[0].state, host.records()[0].tasks) == ("running", ("ada-1.0-a0",))


def test_a_record_says_held_once_nothing_of_it_runs_until_it_is_released() -> None:
    host = host_of()
    app = submit(host)

    host.handle(Received(ARBITER, Grant(app, RoundId(1), 1, 1, (terms("n1g0"),))), 1.0)
    running, gone = status("ada-1.0-a0", "n1g0", step=1), exited("ada-1.0-a0", "n1g0", "preempted")
    states = []
    for seq, task, by in ((2, running, "ada"), (3, gone, "ada"), (4, gone, "")):
        held = () if task is gone else (terms("n1g0"),)
        host.handle(Received(ARBITER, Holdings(app, 1, seq, held, (task,), acked=seq, held_by=by)), float(seq))
        states.append(host.records()[0].state)
    assert states == ["running", "held", "waiting"]


def test_a_refusal_is_in_the_record() -> None:
    host = host_of()
    app = submit(host, gang=9)
    host.handle(Received(ARBITER, Refusal(app, "needs a gang of 9 GPUs on one node")), 1.0)
    record = host.records()[0]
    assert (record.refused, record.reason) == (True, "needs a gang of 9 GPUs on one node")


def test_other_settings_hold_from_the_restart_on() -> None:
    host = host_of()
    submit(host, 0.0)
    host.handle(Configured("team-b", 0.5), 1.0)
    assert host.deadline() == 0.5
    submit(host, 1.0, tenant="")
    assert host.records()[1].tenant == "team-b"


def test_the_record_tells_how_each_living_job_gets_on() -> None:
    host = host_of()
    app = submit(host)
    assert host.records()[0].jobs == ()
    host.handle(Received(ARBITER, Grant(app, RoundId(1), 1, 1, (terms("n1g0"),))), 1.0)
    measured = Measured(source="steps", share=0.5, packed_with=(TaskId("bob-1.0-a0"),), remark="takes turns")
    facts = {"step": 9, "total_steps": 100, "samples": 640, "step_s": 0.5, "measured": measured}
    running = status("ada-1.0-a0", "n1g0", **facts)
    host.handle(Received(ARBITER, Holdings(app, 1, 2, (terms("n1g0"),), (running,), acked=2)), 2.0)
    assert host.records()[0].jobs == (
        JobRecord(
            job=JobId("ada-1.0"),
            task=TaskId("ada-1.0-a0"),
            gpus=("n1g0",),
            steps=10,
            total_steps=100,
            samples=640,
            step_s=0.5,
            step_source="steps",
            share=0.5,
            packed_with=(TaskId("bob-1.0-a0"),),
            remark="takes turns",
        ),
    )
    gone = exited("ada-1.0-a0", "n1g0", "preempted", step=9)
    host.handle(Received(ARBITER, Holdings(app, 1, 3, (), (gone,), acked=3)), 3.0)
    assert host.records()[0].jobs == ()


# --- any order of events --------------------------------------------------------------------------------------------

GPUS = ("n1g0", "n1g1", "n2g0")
apps = st.sampled_from((AppId("ada-1"), AppId("ada-2"), AppId("ada-3")))
gpus = st.lists(st.sampled_from(GPUS), unique=True)


@st.composite
def holdings(draw: st.DrawFn) -> Received:
    app = draw(apps)
    tasks = []
    for attempt in range(draw(st.integers(0, 3))):
        phase = draw(st.sampled_from(("starting", "running", "suspended", "exited")))
        outcome = draw(st.sampled_from(("finished", "preempted", "failed", "stopped"))) if phase == "exited" else None
        tasks.append(
            status(
                f"{app}.0-a{attempt}",
                draw(st.sampled_from(GPUS)),
                phase,
                outcome=outcome,
                step=draw(st.integers(-1, 9)),
                can_checkpoint=draw(st.booleans()),
            )
        )
    leases = tuple(terms(gpu, leaving=draw(st.booleans())) for gpu in draw(gpus))
    seq, acked = draw(st.integers(0, 30)), draw(st.integers(0, 30))
    return Received(ARBITER, Holdings(app, draw(st.integers(1, 2)), seq, leases, tuple(tasks), 4, acked))


@st.composite
def grants(draw: st.DrawFn) -> Received:
    leases = tuple(terms(gpu) for gpu in draw(gpus))
    return Received(ARBITER, Grant(draw(apps), RoundId(1), 1, draw(st.integers(0, 30)), leases))


events = st.one_of(
    holdings(),
    grants(),
    st.just(Tick()),
    st.just(Connected()),
    st.builds(
        Submit, st.just("q"), st.sampled_from((spec_of(), spec_of(gang=2), spec_of(gpus_max=2), spec_of(sizes=(1, 3))))
    ),
    st.builds(Cancel, st.just("q"), apps),
)


def play(host: AppHost, story: list[Event], start: float = 0.0) -> list[Effect]:
    effects: list[Effect] = []
    for number, event in enumerate(story):
        effects += host.handle(event, start + number)
        host.validate()
    return effects


@given(st.lists(events, max_size=40))
def test_no_order_of_events_breaks_the_host(story: list[Event]) -> None:
    play(host_of(), story)


@given(st.lists(events, max_size=20), st.lists(events, max_size=20))
def test_a_restored_host_goes_on_as_if_nothing_had_happened(before: list[Event], after: list[Event]) -> None:
    host = host_of()
    play(host, before)
    blob = host.snapshot()
    revived = AppHost.restore(blob)
    assert revived.snapshot() == blob
    assert play(revived, after, 100.0) == play(host, after, 100.0)
    assert revived.snapshot() == host.snapshot()


@given(st.lists(events, max_size=30))
def test_events_survive_the_journal(story: list[Event]) -> None:
    decoder = msgspec.msgpack.Decoder(Event)
    assert [decoder.decode(msgspec.msgpack.encode(event)) for event in story] == story
