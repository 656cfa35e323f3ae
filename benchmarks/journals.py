"""The cost of a journal in PostgreSQL: ``python benchmarks/journals.py [--agents N] [--rounds N] [--json]``.

One site in this process: the arbiter's core in the product's own shell, with journal and ledger, over the in-process
bus, which encodes and decodes every message. N apps want a GPU each, one GPU for five of them. Each app is an owner of
its own, with a connection of its own, and is asked in every round: N probes, offers to the bidders, an auction, grants,
and the reports that follow. Nodes and apps are played by the least that agents say. Nothing else happens meanwhile.

The same rounds are held with the journal in a file (SQLite) and in a private PostgreSQL that flushes each commit to the
disk, in turns. Told is the time from the first probe until the last app has heard of its grant, the processor time of
this process, and the commits; and the ratio of the medians, which is the goal: the exit code is 1 if it is missed. The
database runs on the cores of this host, and so do all apps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import structlog
from msgspec.structs import replace

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not this folder, in which `simulator` would be a benchmark

from arbiter.core.arbiter import Batch, Event  # noqa: E402
from arbiter.core.effects import Decide, Record, RoundRecord  # noqa: E402
from arbiter.core.policies.themis.auction.instance import warm_up  # noqa: E402
from arbiter.core.rounds.decision import decide  # noqa: E402
from arbiter.daemon import SNAPSHOT_EVERY  # noqa: E402
from arbiter.ledger import Ledger  # noqa: E402
from benchmarks.calibration import Calibration  # noqa: E402
from benchmarks.rounds import GPUS, QUIET, Site  # noqa: E402
from protocol.bus import Link, NotProvisioned, Outgoing  # noqa: E402
from protocol.bus.memory import MemoryBroker, MemoryBus  # noqa: E402
from protocol.codec import decode, encode  # noqa: E402
from protocol.journal.postgres import PostgresJournal  # noqa: E402
from protocol.journal.sqlite import SqliteJournal  # noqa: E402
from protocol.messages import (  # noqa: E402
    ARBITER,
    AppId,
    AppReport,
    Bid,
    BidRow,
    GpuId,
    Holdings,
    NodePlan,
    Offer,
    Party,
    Probe,
    ProbeReply,
)
from protocol.shell import Shell  # noqa: E402
from tests.support import postgres  # noqa: E402

GOAL = 1.3
APPS_PER_GPU = 5
SETTINGS = replace(QUIET, policy="themis", ask_max=10**6, probe_s=60.0, bid_s=60.0, renewal_lead_s=30.0, lease_s=600.0)
#: At once, which no queue of the bus is too short for.
ENROLLED_AT_A_TIME = 25
STEP_S = 300.0  #: what must come, comes within


class Agents(Site):
    """Nodes and apps, as `benchmarks.rounds` plays them, but for that each app is an owner and is asked."""

    def _app_report(self, app: AppId, gpus: tuple[GpuId, ...]) -> tuple[Party, AppReport]:
        sender, report = super()._app_report(app, gpus)
        return sender, replace(report, standing=None)

    def enrol(self, number: int) -> AppId:
        """Have one more app, of an owner of its own."""
        app = AppId(f"o{number}-{number}")
        self.gangs[app] = 1
        return app

    def answers(self, message: Any) -> Sequence[tuple[Party, Any]]:
        """Return what is said in answer to a message of the arbiter."""
        match message:
            case Probe(app, round_):
                return [(_owner(app), ProbeReply(app, round_, _rho(app, round_)))]
            case Offer(app, round_):
                rho = _rho(app, round_)
                return [(_owner(app), Bid(app, round_, 2 * rho, (BidRow(1, "slot", rho),)))]
            case Holdings():
                self._follow(message)
            case NodePlan():
                self._obey(message)
        told = list(self._due)
        self._due.clear()
        return told  # type: ignore[return-value]  # no question to a policy is among them


def _owner(app: AppId) -> Party:
    return Party("app", app.partition("-")[0])


def _rho(app: AppId, round_: str) -> float:
    """Return another order of the apps in every round, so that GPUs go to others."""
    return 1.0 + (hash((app, round_)) % 10_000) / 1000.0


class Stage:
    """A site on one journal."""

    def __init__(self, journal: Any, ledger: Ledger, agents: int) -> None:
        self.journal, self.ledger = journal, ledger
        self.play = Agents(SETTINGS, Calibration())
        self.apps = [self.play.enrol(number) for number in range(agents)]
        self.nodes = [f"n{number}" for number in range(max(1, agents // APPS_PER_GPU // GPUS))]
        self.bus = MemoryBus(MemoryBroker())
        self.links: dict[Party, Link] = {}
        self.ahead_s, self.commits, self.heard_at, self.ids = 0.0, 0, 0.0, 0
        self.records: list[RoundRecord] = []
        self.shell: Shell[Any, Any] = Shell(
            self.play.core,
            self.bus,
            ARBITER,
            perform_together=self._perform,
            journal=journal,
            take_over=self._take_over,
            snapshot=self.play.core.snapshot,
            snapshot_every=SNAPSHOT_EVERY,
            clock=lambda: time.time() + self.ahead_s,
            batch=Batch,
        )
        commit = journal.commit

        def counted() -> None:
            self.commits += 1
            commit()

        journal.commit = counted

    async def _take_over(self, token: int) -> int:
        epoch = max(token, self.play.core.state.epoch + 1)
        if self.journal.remote:
            return await asyncio.to_thread(self.journal.next_epoch, epoch)
        taken: int = self.journal.next_epoch(epoch)
        return taken

    async def _perform(self, effects: Sequence[Any]) -> None:
        records = [effect for effect in effects if isinstance(effect, Record)]
        self.ledger.write(*records)
        self.records += [record for record in records if isinstance(record, RoundRecord)]
        for effect in effects:
            if isinstance(effect, Decide):
                self.ledger.keep(effect)
                self.shell.post(await asyncio.to_thread(decide, effect))

    async def _serve(self, party: Party) -> None:
        """Answer all that the arbiter says to one party."""
        link = self.links[party]
        while True:
            delivery = await link.receive()
            message = decode(delivery.data).body
            await delivery.ack()
            if isinstance(message, Holdings):
                self.heard_at = time.perf_counter()
            for sender, answer in self.play.answers(message):
                await self._say(sender, answer)

    async def _say(self, sender: Party, message: Any) -> None:
        self.ids += 1
        await self.links[sender].send([Outgoing(ARBITER, encode(message, sender=sender, id=f"i{self.ids}"))])

    async def run(self, group: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Start everything, and hold a first round, which is no round like others."""
        tasks = [group.create_task(self.shell.run())]
        await self.shell.wait_connected()
        reports = [self.play.node_report(node) for node in self.nodes]
        reports += [self.play._app_report(app, ()) for app in self.apps]  # type: ignore[misc]
        for first in range(0, len(reports), ENROLLED_AT_A_TIME):
            await self._enrol(reports[first : first + ENROLLED_AT_A_TIME])
        tasks += [group.create_task(self._serve(party)) for party in self.links]
        await self._settle()
        await self.round()
        return tasks

    async def _enrol(self, reports: Sequence[tuple[Party, Any]]) -> None:
        """Introduce some parties until each has an inbox."""
        missing = dict(reports)
        async with asyncio.timeout(STEP_S):
            for sender in missing:
                self.links[sender] = await self.bus.connect(sender)
            while missing:
                for sender, report in missing.items():
                    await self._say(sender, report)
                await asyncio.sleep(0)
                await self.shell.wait_idle()
                for sender in list(missing):
                    with suppress(NotProvisioned):
                        await self.links[sender].consume()
                        del missing[sender]

    async def round(self) -> dict[str, float]:
        """Hold one round in which every GPU is in play; return what it took."""
        held, commits = len(self.records), self.commits
        self.ahead_s += SETTINGS.lease_s - SETTINGS.renewal_lead_s / 2
        began, worked = time.perf_counter(), time.process_time()
        self.shell._wake.set()
        async with asyncio.timeout(STEP_S):
            while len(self.records) == held:  # noqa: ASYNC110 - a record has no event to wait for
                await asyncio.sleep(0.001)
        await self._settle()
        told = {"round_s": self.heard_at - began, "processor_s": time.process_time() - worked}
        return told | {"commits": self.commits - commits}

    async def _settle(self) -> None:
        """Wait until the arbiter has nothing to do, and no agent has heard anything for a while."""
        still = 0
        async with asyncio.timeout(STEP_S):
            while still < 5:
                before = self.ids
                await asyncio.sleep(0.05)
                await self.shell.wait_idle()
                still = still + 1 if self.ids == before else 0


async def measure(url: str, folder: Path, agents: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Hold rounds on both journals, in turns."""
    told: dict[str, list[dict[str, float]]] = {"sqlite": [], "postgres": []}
    file: SqliteJournal[Event] = SqliteJournal.of(folder / "journal.db", Event)
    database: PostgresJournal[Event] = PostgresJournal.of(url, Event)
    with closing(file), closing(database), closing(Ledger(folder / "ledger.db")) as ledger:
        stages = {"sqlite": Stage(file, ledger, agents), "postgres": Stage(database, Ledger(database), agents)}
        async with asyncio.TaskGroup() as group:
            tasks = [task for stage in stages.values() for task in await stage.run(group)]
            for _ in range(rounds):
                for name, stage in stages.items():
                    told[name].append(await stage.round())
                    print(f"{name}: {told[name][-1]}", file=sys.stderr, flush=True)
            for task in tasks:
                task.cancel()
    return told


def document(told: dict[str, list[dict[str, float]]], agents: int) -> dict[str, Any]:
    """Return the figures of all rounds."""
    sides = {
        name: {figure: statistics.median(each[figure] for each in rounds) for figure in rounds[0]}
        for name, rounds in told.items()
    }
    ratio = sides["postgres"]["round_s"] / sides["sqlite"]["round_s"]
    rounds = len(told["sqlite"])
    return {
        "schema": "bench-journals/v1",
        "agents": agents,
        "rounds": rounds,
        "median": sides,
        "all": told,
        "ratio": ratio,
        "goal": GOAL,
        "met": ratio <= GOAL,
    }


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=7, help="on each journal")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if missing := postgres.missing():
        print(missing, file=sys.stderr)
        return 1
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    warm_up()
    folder = tempfile.TemporaryDirectory(prefix="ga-journals-", ignore_cleanup_errors=True)
    with postgres.PrivatePostgres(fsync=True) as server, folder as path:
        told = document(
            asyncio.run(measure(server.database(), Path(path), options.agents, options.rounds)), options.agents
        )
    if options.json:
        print(json.dumps(told, indent=1))
    else:
        for name, side in told["median"].items():
            words = f"a round in {1e3 * side['round_s']:.0f} ms, {1e3 * side['processor_s']:.0f} ms of processor time"
            print(f"{name:9} {words}, {side['commits']:.0f} commits")
        verdict = "met" if told["met"] else "MISSED"
        print(f"ratio of rounds {told['ratio']:.2f}, goal {GOAL}: {verdict}")
    return exit_code(told)


def exit_code(told: dict[str, Any]) -> int:
    """Return 0 if the goal was met, else 1."""
    return 0 if told["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
