"""A harness for the arbiter's core: say an event, look at the effects; everything is validated after every event.

`Site` plays nodes and apps by hand. Nodes obey the newest plan when told to `comply`; apps answer probes with a rho
and offers with rows given by the test. The policy decides and sells at once; or when told
to, if `decides_late` or `sells_late`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import pytest
from msgspec.structs import replace

from arbiter.core.arbiter import Arbiter, Batch, Configured, Effect, Event
from arbiter.core.effects import Decide, Note, RoundRecord, Sell
from arbiter.core.members.sale_batch import sell
from arbiter.core.rounds.decision import decide
from arbiter.core.state.model import ArbiterSettings, Draining, Free, Leased
from protocol.core import Connected, Received, Send, Tick
from protocol.messages import (
    AppId,
    AppReport,
    Bid,
    BidRow,
    GpuId,
    GpuStatus,
    Holdings,
    JobWish,
    LaunchSpec,
    NodeId,
    NodePlan,
    NodeReport,
    Offer,
    Party,
    Probe,
    ProbeReply,
    RoundId,
    TaskId,
    TaskStatus,
    TenantId,
    ToArbiter,
    seat,
)
from tests.support.wishes import made

MessageT = TypeVar("MessageT")

TEAM = TenantId("team")
#: A site under the plainest policy; tests of probes, offers and bids ask for `AUCTION`.
SETTINGS = ArbiterSettings(
    policy="fifo",
    lease_s=100.0,
    renewal_lead_s=10.0,
    round_pause_s=1.0,
    probe_s=2.0,
    bid_s=2.0,
    beat_s=5.0,
    node_timeout_s=30.0,
    app_timeout_s=40.0,
    admission_wait_s=5.0,
)
AUCTION = replace(SETTINGS, policy="themis")
#: For tests of sites under `AUCTION`: the auction's loops are compiled before the tests' time limits begin.
with_auction = pytest.mark.usefixtures("compiled_auction")
#: Its variables are not in the order of their names, in which a snapshot writes them.
LAUNCH = LaunchSpec(("python", "train.py"), "/tmp", "/tmp/ckpt", env={"SEED": "7", "DATA": "/data"})


class Site:
    """One arbiter and the parties around it."""

    def __init__(self, settings: ArbiterSettings | None = SETTINGS, *, start: float = 1000.0) -> None:
        self.arbiter = Arbiter()
        self.now = start
        self.epoch = 0
        self.journal: list[tuple[float, Event]] = []
        self.seqs: dict[str, int] = {}
        self.plans: dict[str, NodePlan] = {}
        self.node_sizes: dict[str, int] = {}
        self.node_models: dict[str, Sequence[str]] = {}  #: of its GPUs, one for each or one for all; else all are H200
        self.busy: dict[str, TaskStatus] = {}
        self.decides_late = False
        self.unheard: list[Received] | None = None  #: what is said in one batch; None: each message is heard by itself
        self.undecided: list[Decide] = []
        self.sells_late = False
        self.unsold: list[Sell] = []
        if settings is not None:
            self.lead(settings)

    # --- the core ---------------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Effect]:
        self.journal.append((self.now, event))
        effects = list(self.arbiter.handle(event, self.now))
        self.arbiter.validate()
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, NodePlan):
                self.plans[effect.message.node] = effect.message
            if isinstance(effect, Decide):
                self.undecided.append(effect)
            if isinstance(effect, Sell):
                self.unsold.append(effect)
        if not self.sells_late:
            effects += self.sell()
        if not isinstance(event, Tick):
            effects += self._tick_if_due()
        return effects if self.decides_late else effects + self.decide()

    def _tick_if_due(self) -> list[Effect]:
        """Tick after the news, as every driver does."""
        due = self.arbiter.deadline()
        return self.handle(Tick()) if due is not None and due <= self.now else []

    def decide(self) -> list[Effect]:
        """Let the policy answer all that it was asked."""
        asked, self.undecided = self.undecided, []
        return [effect for each in asked for effect in self.handle(decide(each))]

    def sell(self) -> list[Effect]:
        """Let the policy sell to all for which it was asked."""
        asked, self.unsold = self.unsold, []
        return [effect for each in asked for effect in self.handle(sell(each))]

    def lead(self, settings: ArbiterSettings | None = None) -> list[Effect]:
        if settings is not None:
            self.handle(Configured(settings))
        self.epoch += 1
        return self.handle(Connected(self.epoch))

    def hear(self, sender: Party, message: ToArbiter) -> list[Effect]:
        if self.unheard is not None:
            self.unheard.append(Received(sender, message))
            return []
        return self.handle(Received(sender, message))

    @contextmanager
    def together(self) -> Iterator[list[Effect]]:
        """Let the arbiter hear as one batch what is said meanwhile; its effects are there afterwards."""
        effects: list[Effect] = []
        self.unheard = []
        yield effects
        unheard, self.unheard = self.unheard, None
        effects += self.handle(Batch(tuple(unheard)))

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass, with a tick at each deadline on the way."""
        end = self.now + seconds
        effects: list[Effect] = []
        for _ in range(10_000):
            due = self.arbiter.deadline()
            if due is None or due > end:
                break
            self.now = max(self.now, due)
            effects += self.handle(Tick())
        else:
            raise AssertionError("the arbiter asks for ticks without end")
        self.now = end
        return effects

    # --- nodes ------------------------------------------------------------------------------------------------------

    def node(
        self,
        name: str,
        gpus: int | None = None,
        *,
        rack: str = "rack-1",
        tasks: Sequence[TaskStatus] = (),
        used: Sequence[str] = (),
        sick: Sequence[str] = (),
        quarantined: Sequence[str] = (),
        plan: tuple[int, int] | None = None,
        incarnation: int = 1,
        models: Sequence[str] = (),
        **more: object,
    ) -> list[Effect]:
        """Report as node `name`; by default it has obeyed the newest plan it was sent."""
        self.node_models[name] = models or self.node_models.get(name, ())
        count = self.node_sizes.setdefault(name, gpus or 0) if gpus is None else gpus
        self.node_sizes[name] = count
        newest = self.plans.get(name)
        applied = plan or ((newest.epoch, newest.seq) if newest else (0, 0))
        report = NodeReport(
            node=NodeId(name),
            rack=rack,
            boot_id="boot",
            incarnation=incarnation,
            seq=self._next(f"node-{name}"),
            epoch=applied[0],
            plan_seq=applied[1],
            gpus=seat_statuses(
                name,
                count,
                used,
                sick,
                seats=newest.seats if newest else 1,
                ill=quarantined,
                tasks=tasks,
                models=self.node_models[name],
            ),
            tasks=tuple(tasks),
            **more,  # type: ignore[arg-type]
        )
        return self.hear(Party("node", name), report)

    # --- apps -------------------------------------------------------------------------------------------------------

    def app(
        self,
        app: str,
        *,
        gang: int = 1,
        demand: int = 1,
        jobs: Sequence[JobWish] = (),
        state: str = "active",
        releases: Sequence[str] = (),
        sender: str | None = None,
        ideal_s: float = 0.0,
        left_s: float | None = None,
        tenant: TenantId = TEAM,
        **more: object,
    ) -> list[Effect]:
        report = AppReport(
            app=AppId(app),
            tenant=tenant,
            name="train",
            seq=self._next(f"app-{app}"),
            state=state,  # type: ignore[arg-type]
            gang=gang,
            demand_max=demand,
            jobs=tuple(jobs),
            releases=tuple(releases),  # type: ignore[arg-type]
            ideal_s=ideal_s,
            left_s=left_s,
            **made(more),
        )
        return self.hear(Party("app", sender or app.rsplit("-", 1)[0]), report)

    def rho(self, app: str, value: float, *, round: int | None = None) -> list[Effect]:  # noqa: A002
        number = self.arbiter.state.round if round is None else round
        return self.hear(self.party(app), ProbeReply(AppId(app), RoundId(number), value))

    def bid(
        self,
        app: str,
        values: Mapping[int, float],
        *,
        none: float = 1e6,
        round: int | None = None,  # noqa: A002
    ) -> list[Effect]:
        """Bid rho `values[k]` for k GPUs in all, whatever the locality."""
        number = self.arbiter.state.round if round is None else round
        rows = tuple(BidRow(k, "cluster", rho) for k, rho in sorted(values.items()))
        return self.hear(self.party(app), Bid(AppId(app), RoundId(number), none, rows))

    def play_round(self, effects: list[Effect], bids: Mapping[str, Mapping[int, float]] | None = None) -> list[Effect]:
        """Answer every probe (rho 1, or that of `bids`' best) and offer among `effects`, and what follows from it."""
        bids = bids or {}
        for probe in sent(effects, Probe):
            effects = effects + self.rho(probe.app, 1.0)
        for offer in sent(effects, Offer):
            rows = bids.get(offer.app) or {k: 10.0 / k for k in range(1, len(offer.gpus) + len(offer.kept) + 1)}
            effects = effects + self.bid(offer.app, rows)
        return effects

    def party(self, app: str) -> Party:
        return Party("app", app.rsplit("-", 1)[0])

    def _next(self, name: str) -> int:
        self.seqs[name] = self.seqs.get(name, 0) + 1
        return self.seqs[name]

    # --- what is ----------------------------------------------------------------------------------------------------

    def holder(self, gpu: str) -> str | None:
        state = self.arbiter.state.gpus[GpuId(gpu)].state
        return None if isinstance(state, Free) else state.lease.app

    def gpu_state(self, gpu: str) -> Free | Leased | Draining:
        return self.arbiter.state.gpus[GpuId(gpu)].state

    def held(self, app: str) -> list[str]:
        states = sorted(self.arbiter.state.gpus.items())
        return [gpu for gpu, each in states if isinstance(each.state, Leased) and each.state.lease.app == app]

    def told(self, id: str) -> str:  # noqa: A002
        return "\n".join(chapter.what for chapter in self.arbiter.story(id))

    def replayed(self, since: int = 0, snapshot: bytes | None = None) -> bytes:
        """Return the snapshot of an arbiter rebuilt from `snapshot` and the journal after event `since`."""
        again = Arbiter.restored(snapshot) if snapshot else Arbiter()
        for now, event in self.journal[since:]:
            again.handle(event, now)
        return again.snapshot()


def gpu_id(node: str, index: int) -> str:
    return f"GPU-{node}-{index}"


def gpu_status(node: str, index: int, used: Sequence[str], sick: Sequence[str], *, number: int = 0) -> GpuStatus:
    """One seat of a GPU; what ails the GPU is said of its first only."""
    device = GpuId(gpu_id(node, index))
    name = seat(device, number)
    return GpuStatus(
        gpu=name,
        model="H200",
        memory_bytes=2**30,
        slot=f"s{index // 2}",
        healthy=name not in sick,
        empty=name not in used,
        detail="fell off the bus" if name in sick else "",
        device=device if number else "",
    )


def _of_model(status: GpuStatus, index: int, models: Sequence[str]) -> GpuStatus:
    return replace(status, model=models[index % len(models)]) if models else status


def seat_statuses(
    node: str,
    count: int,
    used: Sequence[str],
    sick: Sequence[str] = (),
    *,
    seats: int = 1,
    ill: Sequence[str] = (),
    tasks: Sequence[TaskStatus] = (),
    models: Sequence[str] = (),
) -> tuple[GpuStatus, ...]:
    """All seats of all GPUs of a node, and those that a task is on still; those in `ill` are quarantined."""
    here = {gpu for task in tasks if task.phase != "exited" for gpu in task.gpus}
    statuses = [
        status
        for index in range(count)
        for number in range(8)
        for status in (_of_model(gpu_status(node, index, used, sick, number=number), index, models),)
        if number < seats or status.gpu in here
    ]
    return tuple(
        replace(status, quarantined=True, detail="quarantined: jobs of two apps failed on it")
        if status.gpu in ill
        else status
        for status in statuses
    )


def wish(app: str, index: int, gpus: Sequence[str], *, attempt: int = 0) -> JobWish:
    return JobWish(job=f"{app}.{index}", attempt=attempt, gpus=tuple(GpuId(gpu) for gpu in gpus), launch=LAUNCH)


def task(
    app: str, index: int, gpus: Sequence[str], phase: str = "running", *, attempt: int = 0, **more: object
) -> TaskStatus:
    job = f"{app}.{index}"
    return TaskStatus(
        task=TaskId(f"{job}-a{attempt}"),
        app=AppId(app),
        job=job,  # type: ignore[arg-type]
        attempt=attempt,
        gpus=tuple(GpuId(gpu) for gpu in gpus),
        phase=phase,  # type: ignore[arg-type]
        **more,  # type: ignore[arg-type]
    )


def sent(effects: Sequence[Effect], kind: type[MessageT]) -> list[MessageT]:
    return [effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


def told_of(effects: Sequence[Effect]) -> list[tuple[AppId, list[GpuId]]]:
    """Return the apps that are told something new, with the GPUs which are theirs, if any, in order of the messages."""
    new = sent([effect for effect in effects if not (isinstance(effect, Send) and effect.beat)], Holdings)
    told = [(each.app, [lease.gpu for lease in each.leases if not lease.leaving]) for each in new]
    return [(app, gpus) for app, gpus in told if gpus]


def notes(effects: Sequence[Effect]) -> str:
    return "\n".join(f"{effect.subject}: {effect.what}" for effect in effects if isinstance(effect, Note))


def records(effects: Sequence[Effect]) -> list[RoundRecord]:
    return [effect for effect in effects if isinstance(effect, RoundRecord)]


__all__ = [
    "AUCTION",
    "LAUNCH",
    "SETTINGS",
    "Site",
    "gpu_id",
    "notes",
    "records",
    "sent",
    "task",
    "wish",
    "with_auction",
]
