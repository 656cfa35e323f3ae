"""The shell: what peers and brokers do wrong never reaches the core, and what it decides gets out or comes again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from msgspec import Struct
from structlog.testing import capture_logs

from protocol.bus import Link, NotPermitted, NotProvisioned, Outgoing
from protocol.bus.memory import MemoryBroker, MemoryBus, MemoryLink
from protocol.codec import decode, encode
from protocol.core import Connected, Received, Send, Tick
from protocol.journal.sqlite import SqliteJournal
from protocol.messages import (
    ARBITER,
    Answer,
    AnyMessage,
    AppId,
    LogChunk,
    NodeId,
    NodePlan,
    OwnerId,
    Party,
    ProbeReply,
    Query,
    Refusal,
    RoundId,
    TaskId,
)
from protocol.shell import Shell, Waiting, _Arrived
from protocol.topology import Topology
from tests.support.patience import PATIENCE_S

APP, NODE = Party("app", "a1"), Party("node", "n1")
CHUNK = LogChunk("q", TaskId("a1-1.0"), 0, b"", 0, ended=True)
T = TypeVar("T")


class Poke(Struct, frozen=True, tag=True):
    """A local event."""

    text: str


class Shout(Struct, frozen=True):
    """A local effect."""

    text: str


class Batch(Struct, frozen=True, tag=True):
    """What the shell makes of messages that have come together, where the core hears them as one event."""

    messages: tuple[Received, ...]


Event = Received | Tick | Connected | Poke | Batch


class Recorder:
    """A core that records what it is told and answers as the test says."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.times: list[float] = []
        self.wants_tick_at: float | None = None
        self.answers: Callable[[Event], Sequence[Send | Shout]] = lambda event: ()
        self.changed = asyncio.Event()

    def handle(self, event: Event, now: float) -> Sequence[Send | Shout]:
        self.events.append(event)
        self.times.append(now)
        if isinstance(event, Tick):
            self.wants_tick_at = None
        self.changed.set()
        return self.answers(event)

    def deadline(self) -> float | None:
        return self.wants_tick_at

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    @property
    def heard(self) -> list[AnyMessage]:
        return [event.message for event in self.events if isinstance(event, Received)]


class Rig:
    """A broker, one shell under test, and bare links of its peers."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker)
        self.core = Recorder()
        self.shouted: list[str] = []

    async def shout(self, effect: Shout) -> None:
        self.shouted.append(effect.text)

    def shell(self, party: Party, **options: object) -> Shell[Poke, Shout]:
        return Shell[Poke, Shout](self.core, self.bus, party, perform=self.shout, **options)  # type: ignore[arg-type]

    @asynccontextmanager
    async def running(self, shell: Shell[Poke, Shout]) -> AsyncIterator[Shell[Poke, Shout]]:
        async with asyncio.TaskGroup() as group:
            group.create_task(shell.run())
            yield shell
            shell.stop()

    @asynccontextmanager
    async def arbiter(self, **options: object) -> AsyncIterator[Shell[Poke, Shout]]:
        """A leading arbiter's shell."""
        async with self.running(self.shell(ARBITER, **options)) as shell:
            await patiently(shell.wait_connected())
            yield shell

    async def leading_link(self) -> Link:
        link = await self.bus.connect(ARBITER)
        await link.lead()
        return link


async def patiently(waiting: Awaitable[T]) -> T:
    async with asyncio.timeout(PATIENCE_S):
        return await waiting


@pytest.fixture
async def rig() -> Rig:
    return Rig()


@pytest.fixture
def logs() -> Iterator[list[dict[str, object]]]:
    with capture_logs() as captured:
        yield captured  # type: ignore[misc]


def reply(number: int) -> ProbeReply:
    return ProbeReply(AppId("a1-1"), RoundId(number), 1.0)


def frame(message: AnyMessage, sender: Party = APP, *, name: str) -> bytes:
    return encode(message, sender=sender, id=name)


async def say(link: Link, to: Party, *frames: bytes) -> None:
    assert not any(await link.send([Outgoing(to, data) for data in frames]))


def said(logs: list[dict[str, object]], event: str) -> list[dict[str, object]]:
    return [entry for entry in logs if entry["event"] == event]


# --- what peers do wrong --------------------------------------------------------------------------------------------


async def test_a_repeated_message_is_handled_once(rig: Rig) -> None:
    async with rig.arbiter() as shell:
        app = await rig.bus.connect(APP)
        await say(app, ARBITER, frame(reply(1), name="x"), frame(reply(1), name="x"), frame(reply(2), name="y"))
        await rig.core.until(lambda: len(rig.core.heard) == 2)
        await say(app, ARBITER, frame(reply(1), name="x"), frame(reply(3), name="z"))
        await rig.core.until(lambda: len(rig.core.heard) == 3)
        await shell.wait_idle()
    assert rig.core.heard == [reply(1), reply(2), reply(3)]


async def test_two_senders_may_use_the_same_id(rig: Rig) -> None:
    other = Party("app", "a2")
    async with rig.arbiter():
        for party in (APP, other):
            link = await rig.bus.connect(party)
            await say(link, ARBITER, frame(reply(1), party, name="x"))
        await rig.core.until(lambda: len(rig.core.heard) == 2)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xc1 no message", "not a message"),
        (frame(reply(7), Party("app", "a2"), name="n"), "the broker says 'app-a1'"),
        (frame(reply(7), ARBITER, name="n"), "the broker says 'app-a1'"),
        (frame(Refusal(AppId("a1-1"), "no"), name="n"), "Refusal is not for 'arbiter'"),
    ],
    ids=["malformed", "misattributed", "impostor", "misdirected"],
)
async def test_nonsense_is_refused_and_disturbs_nothing_else(
    rig: Rig, logs: list[dict[str, object]], data: bytes, words: str
) -> None:
    async with rig.arbiter() as shell:
        app = await rig.bus.connect(APP)
        await say(app, ARBITER, frame(reply(1), name="a"), data, frame(reply(2), name="b"))
        await rig.core.until(lambda: len(rig.core.heard) == 2)
        await shell.wait_idle()
    assert rig.core.heard == [reply(1), reply(2)]
    (refused,) = said(logs, "wire.refused")
    assert words in str(refused["reason"])
    assert refused["user"] == "app-a1"


async def test_a_rejected_message_comes_back_as_a_dead_letter_that_is_logged_and_not_handled(
    rig: Rig, logs: list[dict[str, object]]
) -> None:
    async with rig.arbiter() as shell:
        await say(await rig.bus.connect(NODE), ARBITER, b"nonsense")
        async with asyncio.timeout(PATIENCE_S):
            while not said(logs, "letter.dead"):
                await asyncio.sleep(0)
                await shell.wait_idle()
    assert said(logs, "letter.dead")[0]["why"] == "rejected:arbiter.inbox"
    assert rig.core.heard == []


class Said:
    """A delivery, as far as its place in the line goes."""

    def __init__(self, user: str, number: int) -> None:
        self.user, self.number = user, number


def in_turn(said: str, most: int) -> list[str]:
    """In which order this is taken: events are ``e1``, deliveries ``node-n1:1`` or ``app-ana:1``."""
    waiting: Waiting[str] = Waiting()
    for word in said.split():
        user, _, number = word.partition(":")
        if number:
            waiting.put_delivery(_Arrived(None, Said(user, int(number))))  # type: ignore[arg-type]
        else:
            waiting.put_event(word)
    taken = list(waiting.take(most))
    assert len(waiting) == len(said.split()) - len(taken)
    return [item if isinstance(item, str) else f"{item.delivery.user}:{item.delivery.number}" for item in taken]  # type: ignore[attr-defined]


def test_what_waits_is_taken_in_turn_and_an_owner_waits_behind_itself() -> None:
    flood = " ".join(f"app-eve:{number}" for number in range(1, 9))
    taken = in_turn(f"{flood} app-ana:1 app-bob:1 app-ana:2 node-n1:1 e1 node-n2:1", 12)
    assert taken[:3] == ["e1", "node-n1:1", "node-n2:1"]
    assert taken[3:9] == ["app-eve:1", "app-ana:1", "app-bob:1", "app-eve:2", "app-ana:2", "app-eve:3"]
    assert taken[9:] == ["app-eve:4", "app-eve:5", "app-eve:6"]


def test_owners_have_their_part_of_a_batch_however_much_nodes_say() -> None:
    nodes = " ".join(f"node-n{number}:{number}" for number in range(1, 40))
    taken = in_turn(f"{nodes} app-ana:1 app-ana:2 app-ana:3 app-ana:4 app-ana:5", 16)
    assert sum(word.startswith("node") for word in taken) == 12
    assert taken[-1] == "app-ana:4"


async def test_a_shared_user_is_believed_if_the_site_says_so(rig: Rig, logs: list[dict[str, object]]) -> None:
    rig.bus = MemoryBus(rig.broker, user="guest")
    async with rig.arbiter(shared_users=frozenset({"guest"})):
        await say(await rig.bus.connect(APP), ARBITER, frame(reply(1), name="x"))
        await rig.core.until(lambda: rig.core.heard == [reply(1)])
    assert said(logs, "wire.refused") == []


async def test_a_gateway_is_believed_for_the_owners_that_the_site_says_and_for_no_other_participant(
    rig: Rig, logs: list[dict[str, object]]
) -> None:
    rig.bus = MemoryBus(rig.broker, user="gateway-login1")
    gateways = {"gateway-login1": frozenset({OwnerId(APP.id)})}
    other, namesake = Party("app", "a2"), Party("node", APP.id)
    own_bus = MemoryBus(rig.broker)
    shell = Shell[Poke, Shout](rig.core, own_bus, ARBITER, perform=rig.shout, gateways=gateways)
    async with rig.running(shell):
        await patiently(shell.wait_connected())
        for party, number in ((other, 1), (namesake, 2), (APP, 3)):
            await say(await rig.bus.connect(party), ARBITER, frame(reply(number), party, name=f"x{number}"))
        await rig.core.until(lambda: reply(3) in rig.core.heard)
    assert rig.core.heard == [reply(3)]
    assert len(said(logs, "wire.refused")) == 2


async def test_an_agent_hears_only_the_arbiter(rig: Rig, logs: list[dict[str, object]]) -> None:
    arbiter = await rig.leading_link()
    await arbiter.provision(NODE)
    plan = NodePlan(NodeId("n1"), 1, 1, (), ())
    async with rig.running(rig.shell(NODE)) as shell:
        await patiently(shell.wait_connected())
        await say(arbiter, NODE, frame(reply(1), ARBITER, name="x"), frame(plan, ARBITER, name="y"))
        await rig.core.until(lambda: rig.core.heard == [plan])
    assert len(said(logs, "wire.refused")) == 1


async def test_an_agent_obeys_no_other_agent_even_where_all_share_one_user(
    rig: Rig, logs: list[dict[str, object]]
) -> None:
    rig.bus = MemoryBus(rig.broker, user="guest")
    arbiter = await rig.leading_link()
    await arbiter.provision(NODE)
    plan = NodePlan(NodeId("n1"), 1, 1, (), ())
    async with rig.running(rig.shell(NODE, shared_users=frozenset({"guest"}))) as shell:
        await patiently(shell.wait_connected())
        await say(await rig.bus.connect(APP), NODE, frame(plan, APP, name="x"))
        await say(arbiter, NODE, frame(plan, ARBITER, name="y"))
        await rig.core.until(lambda: len(rig.core.heard) >= 1)
    assert ["only the arbiter" in str(refused["reason"]) for refused in said(logs, "wire.refused")] == [True]


# --- connecting -----------------------------------------------------------------------------------------------------


async def test_the_arbiter_hears_of_its_epoch_before_anything_else(rig: Rig) -> None:
    shell = rig.shell(ARBITER)
    shell.post(Poke("waited"))
    async with rig.running(shell):
        await rig.core.until(lambda: len(rig.core.events) == 2)
    assert rig.core.events == [Connected(1), Poke("waited")]


async def test_an_arbiter_that_does_not_lead_decides_nothing(rig: Rig) -> None:
    leader = await rig.leading_link()
    rig.core.wants_tick_at = 0.0
    async with rig.running(rig.shell(ARBITER)) as shell:
        shell.post(Poke("early"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await rig.core.until(lambda: bool(rig.core.events))
        await leader.close()
        await rig.core.until(lambda: Poke("early") in rig.core.events)
        assert shell.epoch == 2
    assert Connected(2) in rig.core.events
    assert rig.core.events.index(Connected(2)) < rig.core.events.index(Poke("early"))


async def test_an_arbiter_whose_link_dies_leads_again_with_a_higher_epoch(rig: Rig) -> None:
    async with rig.arbiter() as shell:
        rig.broker.restart()
        await rig.core.until(lambda: Connected(2) in rig.core.events)
        await patiently(shell.wait_connected())
        await say(await rig.bus.connect(APP), ARBITER, frame(reply(1), name="x"))
        await rig.core.until(lambda: rig.core.heard == [reply(1)])


async def test_an_epoch_whose_link_died_before_the_core_heard_of_it_is_told_to_no_core(rig: Rig) -> None:
    """The core has led in a newer one by then, and the journal would have them the wrong way round for ever."""

    async def take_over(token: int) -> int:
        if token == 1:
            rig.broker.restart()
        return token

    async with rig.running(rig.shell(ARBITER, take_over=take_over)) as shell:
        await rig.core.until(lambda: bool(rig.core.events))
        shell.post(Poke("later"))
        await rig.core.until(lambda: Poke("later") in rig.core.events)
    assert rig.core.events == [Connected(2), Poke("later")]


async def test_no_state_is_stored_in_the_midst_of_a_takeover(rig: Rig, tmp_path: Path) -> None:
    """The journal has the last leader's events by then, and the core may have handled none of them."""
    with SqliteJournal[Event].of(tmp_path / "journal", Event) as journal:
        in_the_midst = asyncio.Event()

        async def take_over(_token: int) -> int:
            journal.append(1.0, Poke("by the last leader"))
            in_the_midst.set()
            await asyncio.Event().wait()
            return 1

        options = {"take_over": take_over, "snapshot": lambda: b"state", "snapshot_every": 1000}
        async with asyncio.TaskGroup() as group:
            running = group.create_task(rig.shell(ARBITER, journal=journal, **options).run())
            await patiently(in_the_midst.wait())
            running.cancel()
        loaded = journal.load()
        assert (loaded.snapshot, len(list(loaded.events))) == (None, 1)


async def test_the_journals_epoch_wins_over_a_broker_that_forgot(rig: Rig, tmp_path: Path) -> None:
    for expected in (1, 2):
        rig = Rig()  # a new broker, as after `up` is started again
        with SqliteJournal[Event].of(tmp_path / "journal", Event) as journal:
            async with rig.arbiter(journal=journal) as shell:
                assert shell.epoch == expected


async def test_an_agent_enrols_again_and_again_until_it_has_an_inbox(rig: Rig) -> None:
    rig.core.answers = lambda event: [Send(ARBITER, reply(1))] if isinstance(event, Connected) else ()
    async with rig.running(rig.shell(APP)) as shell:
        await rig.core.until(lambda: rig.core.events == [Connected()])  # no arbiter leads: its word is unroutable
        arbiter = await rig.leading_link()
        delivery = await patiently(arbiter.receive())
        await arbiter.provision(decode(delivery.data).sender)
        await patiently(shell.wait_connected())
        await rig.core.until(lambda: len(rig.core.events) >= 3)
    assert set(rig.core.events) == {Connected()}


async def test_the_arbiters_shell_provisions_whoever_it_hears_from(rig: Rig) -> None:
    rig.core.answers = lambda event: [Send(event.sender, Answer("q", b"{}"))] if isinstance(event, Received) else ()
    async with rig.arbiter():
        app = await rig.bus.connect(APP)
        await say(app, ARBITER, frame(Query("q", "apps"), name="x"))
        await rig.core.until(lambda: len(rig.core.heard) == 1)
        await app.consume()
        delivery = await patiently(app.receive())
    assert decode(delivery.data).body == Answer("q", b"{}")


async def test_all_whom_a_batch_hears_for_the_first_time_have_their_inboxes_by_one_exchange_with_the_broker(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Party, ...]] = []
    provision = MemoryLink.provision

    async def noted(link: MemoryLink, *parties: Party) -> None:
        asked.append(parties)
        await provision(link, *parties)

    monkeypatch.setattr(MemoryLink, "provision", noted)
    nodes = [Party("node", f"n{number}") for number in range(1, 9)]
    await (await rig.leading_link()).close()  # from now on the site's queues exist
    for node in nodes:
        await say(await rig.bus.connect(node), ARBITER, frame(CHUNK, node, name=node.id))
    async with rig.arbiter():
        await rig.core.until(lambda: len(rig.core.heard) == len(nodes))
        for node in nodes:
            await (await rig.bus.connect(node)).consume()
    assert sum(asked, ()) == tuple(nodes)
    assert len(asked) < len(nodes) / 2


async def test_a_refused_inbox_keeps_no_other_sender_from_having_one(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, logs: list[dict[str, object]]
) -> None:
    provision = MemoryLink.provision

    async def refused(link: MemoryLink, *parties: Party) -> None:
        if APP in parties:
            raise NotPermitted("other limits")
        await provision(link, *parties)

    monkeypatch.setattr(MemoryLink, "provision", refused)
    await (await rig.leading_link()).close()
    for party, word in ((APP, frame(Query("q", "apps"), name="x")), (NODE, frame(CHUNK, NODE, name="y"))):
        await say(await rig.bus.connect(party), ARBITER, word)
    async with rig.arbiter():
        await rig.core.until(lambda: len(rig.core.heard) == 2)
        await (await rig.bus.connect(NODE)).consume()
        with pytest.raises(NotProvisioned):
            await (await rig.bus.connect(APP)).consume()
    assert [line["user"] for line in said(logs, "inbox.refused")] == [APP.user]


async def test_an_agent_goes_on_without_the_bus_and_restates_when_it_is_back(rig: Rig) -> None:
    rig.core.answers = lambda event: [Send(ARBITER, reply(1)), Shout("done")]
    rig.broker.stop()
    async with rig.running(rig.shell(APP)) as shell:
        shell.post(Poke("local"))
        await rig.core.until(lambda: rig.core.events == [Poke("local")])
        await shell.wait_idle()
        assert rig.shouted == ["done"]
        rig.broker.start()
        await rig.core.until(lambda: Connected() in rig.core.events)


async def test_a_refused_connection_is_retried_with_growing_pauses(rig: Rig, logs: list[dict[str, object]]) -> None:
    rig.broker.stop()
    async with rig.running(rig.shell(APP)) as shell:
        async with asyncio.timeout(PATIENCE_S):
            while len(said(logs, "bus.unavailable")) < 3:  # noqa: ASYNC110 - a log has no event to wait for
                await asyncio.sleep(0.01)
        assert not shell.connected
    pauses = [entry["retry_s"] for entry in said(logs, "bus.unavailable")]
    assert pauses[:3] == [0.1, 0.2, 0.4]


# --- effects --------------------------------------------------------------------------------------------------------


async def test_effects_are_performed_in_order_and_many_sends_at_once(rig: Rig) -> None:
    arbiter = await rig.leading_link()
    rig.core.answers = lambda event: (
        [Shout("first"), *(Send(ARBITER, reply(number)) for number in range(1000)), Shout("last")]
        if isinstance(event, Poke)
        else ()
    )
    async with rig.running(rig.shell(APP)) as shell:
        await rig.core.until(lambda: Connected() in rig.core.events)
        shell.post(Poke("go"))
        heard = []
        for _ in range(1000):
            delivery = await patiently(arbiter.receive())
            heard.append(decode(delivery.data).body)
            await delivery.ack()
    assert heard == [reply(number) for number in range(1000)]
    assert rig.shouted == ["first", "last"]


async def test_effects_that_wait_for_no_message_are_performed_together_before_the_first_message(rig: Rig) -> None:
    app = await rig.bus.connect(APP)
    inbox = Topology().inbox(APP)
    performed: list[tuple[int, list[str]]] = []

    async def perform(effects: Sequence[Shout]) -> None:
        performed.append((rig.broker.waiting(inbox), [effect.text for effect in effects]))

    rig.core.answers = lambda event: (
        [Shout(f"{event.text}1"), Send(APP, Refusal(AppId("x"), event.text)), Shout(f"{event.text}2")]
        if isinstance(event, Poke)
        else ()
    )
    shell = Shell[Poke, Shout](rig.core, rig.bus, ARBITER, perform_together=perform)
    async with rig.running(shell):
        await patiently(shell.wait_connected())
        await say(app, ARBITER, frame(reply(1), name="x"))  # for which its inbox is made
        await rig.core.until(lambda: rig.core.heard == [reply(1)])
        for text in "ab":
            shell.post(Poke(text))
        await shell.wait_idle()
        assert performed == [(0, ["a1", "a2", "b1", "b2"])]
        assert rig.broker.waiting(inbox) == 2


async def test_a_send_that_fails_is_logged_and_disturbs_nothing(rig: Rig, logs: list[dict[str, object]]) -> None:
    rig.core.answers = lambda event: [Send(Party("app", "nobody"), Refusal(AppId("x"), "no")), Shout("after")]
    async with rig.arbiter() as shell:
        await shell.wait_idle()
    assert rig.shouted == ["after"]
    (failed,) = said(logs, "send.failed")
    assert (failed["to"], failed["message"]) == ("app-nobody", "Refusal")


async def test_a_message_whose_answer_did_not_get_out_is_handled_again(rig: Rig) -> None:
    arbiter = await rig.leading_link()
    await arbiter.provision(APP)
    rig.core.answers = lambda event: [Send(ARBITER, reply(9))] if isinstance(event, Received) else ()
    async with rig.running(rig.shell(APP)) as shell:
        await patiently(shell.wait_connected())
        await say(arbiter, APP, frame(Refusal(AppId("a1-1"), "no"), ARBITER, name="x"))
        rig.broker.drop_publish = 1
        delivery = await patiently(arbiter.receive())
    assert decode(delivery.data).body == reply(9)
    assert rig.core.heard == [Refusal(AppId("a1-1"), "no")] * 2


async def test_a_crash_between_handling_and_acknowledging_repeats_the_message(rig: Rig) -> None:
    class CrashedError(Exception):
        pass

    async def crash(effect: Shout) -> None:
        raise CrashedError

    rig.core.answers = lambda event: [Shout("x")] if isinstance(event, Received) else ()
    shell = Shell[Poke, Shout](rig.core, rig.bus, ARBITER, perform=crash)
    async with asyncio.TaskGroup() as group:
        running = group.create_task(_raised(shell.run()))
        await patiently(shell.wait_connected())
        await say(await rig.bus.connect(APP), ARBITER, frame(reply(1), name="x"))
        assert isinstance(await patiently(running), CrashedError)
    assert rig.core.heard == [reply(1)]
    rig.core = Recorder()
    async with rig.arbiter():
        await rig.core.until(lambda: rig.core.heard == [reply(1)])


async def _raised(waiting: Awaitable[None]) -> Exception | None:
    try:
        await waiting
    except Exception as error:  # noqa: BLE001 - the test asks which
        return error
    return None


async def test_what_was_handled_is_acknowledged_and_does_not_come_again(rig: Rig) -> None:
    app = await rig.bus.connect(APP)
    async with rig.arbiter() as shell:
        await say(app, ARBITER, frame(reply(1), name="x"))
        await rig.core.until(lambda: rig.core.heard == [reply(1)])
        await shell.wait_idle()
    rig.core = Recorder()
    async with rig.arbiter():
        await say(app, ARBITER, frame(reply(2), name="y"))
        await rig.core.until(lambda: bool(rig.core.heard))
    assert rig.core.heard == [reply(2)]


# --- time and journal -----------------------------------------------------------------------------------------------


async def test_a_tick_comes_at_the_deadline(rig: Rig) -> None:
    async with rig.running(rig.shell(APP)) as shell:
        deadline = shell.now() + 0.05
        rig.core.wants_tick_at = deadline
        shell.post(Poke("look again"))
        await rig.core.until(lambda: Tick() in rig.core.events)
        assert rig.core.times[rig.core.events.index(Tick())] >= deadline


async def test_time_never_goes_back_also_not_over_a_restart(rig: Rig, tmp_path: Path) -> None:
    for readings in ([5.0, 3.0, 8.0, 7.0], [1.0, 2.0]):
        clock = iter(readings)
        last = readings[-1]
        with SqliteJournal[Event].of(tmp_path / "journal", Event) as journal:
            shell = rig.shell(APP, journal=journal, clock=lambda clock=clock, last=last: next(clock, last))
            async with rig.running(shell):
                for _ in readings:
                    shell.post(Poke("what time is it?"))
                await shell.wait_idle()
    assert rig.core.times == sorted(rig.core.times)
    assert max(rig.core.times) == 8.0


async def test_every_event_is_in_the_journal_before_its_effects_happen(rig: Rig, tmp_path: Path) -> None:
    journal = SqliteJournal[Event].of(tmp_path / "journal", Event)
    seen: list[int] = []

    async def look(effect: Shout) -> None:
        assert not journal._database.in_transaction
        seen.append(journal.last_seq)

    rig.core.answers = lambda event: [Shout("x")] if isinstance(event, Poke) else ()
    shell = Shell[Poke, Shout](rig.core, rig.bus, APP, perform=look, journal=journal)
    async with rig.running(shell):
        shell.post(Poke("a"))
        await shell.wait_idle()
        shell.post(Poke("b"))
        await shell.wait_idle()
    with journal:
        written = [event for _, _, event in journal.load().events]
    assert written == rig.core.events
    assert len(seen) == 2


async def test_a_commit_is_counted_for_each_batch_that_has_written_events(rig: Rig, tmp_path: Path) -> None:
    with SqliteJournal[Event].of(tmp_path / "journal", Event) as journal:
        shell = rig.shell(APP, journal=journal)
        async with rig.running(shell):
            for text in ("a", "b"):
                shell.post(Poke(text))
                await shell.wait_idle()
            shell.say([])  # a batch without an event
            await shell.wait_idle()
    told = shell.commits.document()
    assert sum(told["counts"]) == 2
    assert told["sum_s"] > 0.0


def batches(rig: Rig) -> list[list[AnyMessage]]:
    return [[each.message for each in event.messages] for event in rig.core.events if isinstance(event, Batch)]


async def test_messages_that_come_together_are_one_event_for_a_core_that_hears_batches(
    rig: Rig, tmp_path: Path
) -> None:
    await (await rig.leading_link()).close()  # from now on the site's queues exist
    app = await rig.bus.connect(APP)
    await say(app, ARBITER, *(frame(reply(number), name=str(number)) for number in range(3)))
    with SqliteJournal[Event].of(tmp_path / "journal", Event) as journal:
        async with rig.arbiter(journal=journal, batch=Batch) as shell:
            await rig.core.until(lambda: len(batches(rig)) == 1)
            await say(app, ARBITER, frame(reply(3), name="3"))
            await rig.core.until(lambda: rig.core.heard == [reply(3)])  # one alone is no batch
            await shell.wait_idle()
        assert [event for _, _, event in journal.load().events] == rig.core.events
    assert batches(rig) == [[reply(0), reply(1), reply(2)]]


async def test_a_question_is_answered_when_the_core_has_heard_what_came_before_it(rig: Rig) -> None:
    await (await rig.leading_link()).close()
    app = await rig.bus.connect(APP)
    messages = [reply(0), reply(1), Query("q", "apps"), reply(2), reply(3)]
    await say(app, ARBITER, *(frame(message, name=str(number)) for number, message in enumerate(messages)))
    known: list[list[list[AnyMessage]]] = []

    def answer(sender: Party, message: AnyMessage) -> Sequence[Send] | None:
        if not isinstance(message, Query):
            return None
        known.append(batches(rig))
        return [Send(sender, Answer("q", b"{}"))]

    async with rig.arbiter(batch=Batch, answer=answer):
        await rig.core.until(lambda: len(batches(rig)) == 2)
    assert known == [[[reply(0), reply(1)]]]
    assert batches(rig) == [[reply(0), reply(1)], [reply(2), reply(3)]]


async def test_each_message_of_a_batch_counts_towards_the_next_snapshot(rig: Rig, tmp_path: Path) -> None:
    """Otherwise a busy arbiter would have many times as much to replay as one with little to do."""
    await (await rig.leading_link()).close()
    app = await rig.bus.connect(APP)
    await say(app, ARBITER, *(frame(reply(number), name=str(number)) for number in range(9)))
    with SqliteJournal[Event].of(tmp_path / "journal", Event) as journal:
        options = {"snapshot": lambda: b"%d events" % len(rig.core.events), "snapshot_every": 9}
        async with rig.arbiter(journal=journal, batch=Batch, **options) as shell:
            await rig.core.until(lambda: len(batches(rig)) == 1)
            await shell.wait_idle()
            assert journal.load().snapshot is not None
            assert len(rig.core.events) < 9
            await say(app, ARBITER, frame(reply(9), name="9"))
            await rig.core.until(lambda: reply(9) in rig.core.heard)
            await shell.wait_idle()
            assert journal.since_snapshot == 1


async def test_snapshots_are_taken_every_so_many_events(rig: Rig, tmp_path: Path) -> None:
    with SqliteJournal[Event].of(tmp_path / "journal", Event) as journal:
        options = {"snapshot": lambda: b"%d events" % len(rig.core.events), "snapshot_every": 10}
        async with rig.running(rig.shell(APP, journal=journal, **options)) as shell:
            for number in range(25):
                shell.post(Poke(str(number)))
                await shell.wait_idle()
            loaded = journal.load()
            assert loaded.snapshot is not None
            done = int(loaded.snapshot.split()[0])
            assert 20 <= done < len(rig.core.events)
            assert [event for _, _, event in loaded.events] == rig.core.events[done:]


@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_a_shell_that_ends_leaves_nothing_to_replay(rig: Rig, tmp_path: Path, how: str) -> None:
    """Another version may start from there, and would decide otherwise what was decided then."""
    with SqliteJournal[Event].of(tmp_path / "journal", Event) as journal:
        options = {"snapshot": lambda: b"%d events" % len(rig.core.events), "snapshot_every": 1000}
        shell = rig.shell(APP, journal=journal, **options)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(shell.run())
            shell.post(Poke("a"))
            await rig.core.until(lambda: Poke("a") in rig.core.events)
            await shell.wait_idle()
            assert journal.load().snapshot is None
            shell.stop() if how == "stop" else running.cancel()
        loaded = journal.load()
        assert loaded.snapshot == b"%d events" % len(rig.core.events)
        assert list(loaded.events) == []


@pytest.mark.parametrize("ends", [True, False])
async def test_a_batch_in_hand_ends_first_or_is_replayed(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, ends: bool
) -> None:
    """What a batch that was cut short had to do may not have happened; a replay of the arbiter records it again."""
    performing, may_end = asyncio.Event(), asyncio.Event()
    if not ends:
        monkeypatch.setattr("protocol.shell.LAST_BATCH_S", 0.05)

    async def slowly(effect: Shout) -> None:
        performing.set()
        await may_end.wait()

    rig.core.answers = lambda event: [Shout("x")] if isinstance(event, Poke) else ()
    with SqliteJournal[Event].of(tmp_path / "journal", Event) as journal:
        options = {"snapshot": lambda: b"state", "snapshot_every": 1000}
        shell = Shell[Poke, Shout](rig.core, rig.bus, APP, perform=slowly, journal=journal, **options)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(shell.run())
            shell.post(Poke("a"))
            await patiently(performing.wait())
            running.cancel()
            await asyncio.sleep(0)
            if ends:
                may_end.set()
        assert running.cancelled()
        loaded = journal.load()
        assert loaded.snapshot == (b"state" if ends else None)
        assert [event for _, _, event in loaded.events] == ([] if ends else rig.core.events)


async def test_what_was_replayed_counts_as_not_yet_in_a_snapshot(rig: Rig, tmp_path: Path) -> None:
    """After a crash, too, the version that wrote the journal leaves nothing to replay once it is stopped."""
    with SqliteJournal[Event].of(tmp_path / "journal", Event) as journal:
        for number in range(5):
            journal.append(float(number), Poke(str(number)))
        journal.commit()
        assert journal.since_snapshot == 5
    with SqliteJournal[Event].of(tmp_path / "journal", Event) as journal:
        async with rig.running(rig.shell(ARBITER, journal=journal, snapshot=lambda: b"state")):
            pass
        assert journal.since_snapshot == 0
        assert journal.load().snapshot == b"state"
    with SqliteJournal[Event].of(tmp_path / "journal", Event) as journal:
        assert journal.since_snapshot == 0


async def test_a_shell_that_fails_takes_no_snapshot_that_would_prune_the_incident(rig: Rig, tmp_path: Path) -> None:
    def fail(event: object) -> Sequence[Shout]:
        if event == Poke("b"):
            raise RuntimeError("our own bug")
        return ()

    rig.core.answers = fail
    with SqliteJournal[Event].of(tmp_path / "journal", Event) as journal:
        shell = rig.shell(APP, journal=journal, snapshot=lambda: b"state", snapshot_every=1000)
        shell.post(Poke("a"))
        shell.post(Poke("b"))
        with pytest.raises(RuntimeError, match="our own bug"):
            await shell.run()
        assert journal.load().snapshot is None


# --- running --------------------------------------------------------------------------------------------------------


async def test_the_watchdog_is_fed_also_by_an_arbiter_that_waits_to_lead(rig: Rig) -> None:
    await rig.leading_link()
    fed = asyncio.Event()
    async with rig.running(rig.shell(ARBITER, on_alive=fed.set)):
        for _ in range(2):
            await patiently(fed.wait())
            fed.clear()


async def test_events_from_another_thread_are_handled(rig: Rig) -> None:
    async with rig.running(rig.shell(APP)) as shell:
        await rig.core.until(lambda: Connected() in rig.core.events)
        await asyncio.to_thread(shell.post_threadsafe, Poke("from afar"))
        await rig.core.until(lambda: Poke("from afar") in rig.core.events)


async def test_cancelling_run_hangs_up(rig: Rig) -> None:
    async with asyncio.TaskGroup() as group:
        shell = rig.shell(ARBITER)
        running = group.create_task(shell.run())
        await patiently(shell.wait_connected())
        running.cancel()
    successor = await rig.bus.connect(ARBITER)
    assert await patiently(successor.lead()) == 2


async def test_a_core_that_fails_ends_run_with_its_own_error(rig: Rig) -> None:
    def fail(event: Event) -> Sequence[Send | Shout]:
        raise AssertionError("no GPU is held twice")

    rig.core.answers = fail
    with pytest.raises(AssertionError, match="held twice"):
        await patiently(rig.shell(ARBITER).run())
