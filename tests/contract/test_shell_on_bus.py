"""Two shells that talk over each bus: what one decides reaches the other, also after cuts and crashes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

from msgspec import Struct

from protocol.bus import Link
from protocol.core import Connected, Received, Send, Tick
from protocol.messages import ARBITER, Answer, Party, Query
from protocol.shell import Shell
from tests.contract.conftest import APP, Site
from tests.support.patience import PATIENCE_S


class Ask(Struct, frozen=True, tag=True):
    """The app's user asks."""

    query: str


class Answering:
    """An arbiter that answers every question."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def handle(self, event: Received | Tick | Connected | Ask, now: float) -> Sequence[Send]:
        if isinstance(event, Connected):
            self.epochs.append(event.epoch)
        if isinstance(event, Received) and isinstance(event.message, Query):
            return [Send(event.sender, Answer(event.message.query_id, b"{}"))]
        return ()

    def deadline(self) -> float | None:
        return None


class Asking:
    """An app that asks what its user asks, and again whenever it connects."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self.answers: list[str] = []
        self.changed = asyncio.Event()

    def handle(self, event: Received | Tick | Connected | Ask, now: float) -> Sequence[Send]:
        self.changed.set()
        match event:
            case Ask(query):
                self.open.add(query)
                return [Send(ARBITER, Query(query, "apps"))]
            case Received(message=Answer(query_id=query)):
                self.open.discard(query)
                self.answers.append(query)
            case Connected():
                return [Send(ARBITER, Query(query, "apps")) for query in ("hello", *sorted(self.open))]
        return ()

    def deadline(self) -> float | None:
        return None

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.changed_until(condition)

    async def changed_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()


class SiteBus:
    """A site as a bus; remembers the newest link of each party, for cutting."""

    url = "test://"
    private = False

    def __init__(self, site: Site) -> None:
        self._site = site
        self.links: dict[Party, Link] = {}

    async def connect(self, party: Party) -> Link:
        self.links[party] = await self._site.connect(party)
        return self.links[party]


async def _nothing(effect: object) -> None:
    raise AssertionError(f"no local effect is expected: {effect}")


@asynccontextmanager
async def conversation(site: Site) -> AsyncIterator[tuple[SiteBus, Answering, Asking, Shell[Ask, None]]]:
    bus, arbiter, app = SiteBus(site), Answering(), Asking()
    shells = (
        Shell[Ask, None](arbiter, bus, ARBITER, perform=_nothing),
        Shell[Ask, None](app, bus, APP, perform=_nothing),
    )
    async with asyncio.TaskGroup() as group:
        for shell in shells:
            group.create_task(shell.run())
        async with asyncio.timeout(PATIENCE_S):
            for shell in shells:
                await shell.wait_connected()
        yield bus, arbiter, app, shells[1]
        for shell in shells:
            shell.stop()


async def test_an_app_enrols_asks_and_is_answered(site: Site) -> None:
    async with conversation(site) as (_, _, app, shell):
        names = [f"q{number}" for number in range(20)]
        for name in names:
            shell.post(Ask(name))
            await app.until(lambda name=name: name in app.answers)
    assert [query for query in app.answers if query != "hello"] == names


async def test_a_conversation_goes_on_after_either_side_was_cut(site: Site) -> None:
    async with conversation(site) as (bus, arbiter, app, shell):
        await app.until(lambda: "hello" in app.answers)
        await site.drop(bus.links[APP])
        shell.post(Ask("after-my-cut"))
        await app.until(lambda: "after-my-cut" in app.answers)
        await site.drop(bus.links[ARBITER])
        for number in itertools.count():  # what an owner says is lost with its leader, and asked again
            with suppress(TimeoutError):
                shell.post(Ask(f"after-the-arbiters-cut-{number}"))
                async with asyncio.timeout(0.5):
                    await app.changed_until(lambda: app.answers[-1].startswith("after-the-arbiters-cut"))
                break
    assert arbiter.epochs == [1, 2]
