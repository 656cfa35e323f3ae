"""Forged messages: well-formed, and whatever else a hostile or broken agent may say.

Everything is drawn from a seed, and goes through the codec, so that what comes out could have come over the wire. Most
of it is plausible at first sight: ids that exist, numbers near those that matter, and now and then the largest and the
smallest that a field can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeVar, get_args

from msgspec.structs import replace

from protocol.codec import WireError, decode, encode
from protocol.messages import (
    LEVELS,
    Act,
    ActKind,
    AnyMessage,
    AppId,
    AppReport,
    Bid,
    BidRow,
    EventFilter,
    ExplicitRow,
    GpuId,
    GpuStatus,
    Home,
    JobId,
    JobWish,
    LaunchSpec,
    LeaseId,
    LevelTerms,
    LogChunk,
    Measured,
    NodeId,
    NodeReport,
    Party,
    ProbeReply,
    Query,
    Requirements,
    RoundId,
    StandingValuation,
    TaskId,
    TaskStatus,
    TenantId,
    TerminalDoor,
    Utility,
    seat,
)

ItemT = TypeVar("ItemT")

COUNTS = (0, 1, 2, 3, 4, 5, 7, 8, 64, 1000, 2**31, 2**53)
SECONDS = (0.0, 1e-9, 0.5, 1.0, 30.0, 600.0, 3600.0, 1e7, 1e12)
RHOS = (0.0, 1e-9, 0.5, 1.0, 2.0, 100.0, 1e6, 1e15)
PHASES = (
    "starting", "running", "resting", "suspending", "suspended", "resuming", "vacating", "stopping", "exited",
)  # fmt: skip
OUTCOMES = ("finished", "preempted", "failed", "stopped", None)


class Forger:
    """Draws messages about a site of these nodes, of so many GPUs each, and these owners' apps."""

    def __init__(self, seed: int, nodes: Sequence[str], gpus: int, owners: Sequence[str]) -> None:
        self._dice = Random(seed)
        self.nodes, self.owners = nodes, owners
        self.devices = [GpuId(f"GPU-{node}-{index}") for node in nodes for index in range(gpus)]
        self._seqs: dict[str, int] = {}

    # --- pieces -----------------------------------------------------------------------------------------------------

    def often(self, chance: float) -> bool:
        """Whether something is so, with that chance."""
        return self._dice.random() < chance

    def one(self, items: Sequence[ItemT]) -> ItemT:
        """One of these."""
        return self._dice.choice(items)

    def count(self, usual: int = 4) -> int:
        """A small number, or any that a count can be."""
        return self._dice.randint(0, usual) if self.often(0.85) else self.one(COUNTS)

    def some(self, item: Callable[[], ItemT], most: int) -> tuple[ItemT, ...]:
        """A few of what `item` draws."""
        return tuple(item() for _ in range(self._dice.randint(0, most)))

    def seconds(self) -> float:
        """A duration."""
        return self._dice.uniform(0.0, 1000.0) if self.often(0.6) else self.one(SECONDS)

    def seq(self, name: str) -> int:
        """The next number of a sender; or any."""
        self._seqs[name] = self._seqs.get(name, 0) + 1
        return self._seqs[name] if self.often(0.95) else self.count()

    def app_id(self, owner: str = "") -> AppId:
        """An id of an app that may or may not exist."""
        tag = "" if self.often(0.9) else self.one(("x", "zz", "-"))
        return AppId(f"{owner or self.one(self.owners)}-{tag}{self._dice.randint(1, 4)}")

    def gpu(self) -> GpuId:
        """A GPU, a seat on one, or a name that is neither."""
        if self.often(0.05):
            return GpuId(self.one(("GPU", "GPU-n1-0+", "GPU-n1-0+x", "GPU-n1-0+99999999", "nosuch", "+1")))
        return seat(self.one(self.devices), 0 if self.often(0.7) else self._dice.randint(1, 9))

    def gpus(self, most: int = 4) -> tuple[GpuId, ...]:
        """A few GPUs, at times one of them twice."""
        drawn = self.some(self.gpu, most)
        return drawn if self.often(0.2) else tuple(dict.fromkeys(drawn))

    def job_id(self, app: AppId) -> JobId:
        """A job of an app."""
        return JobId(f"{app}.{self.count(2)}" if self.often(0.95) else self.one((f"{app}.x", f"{app}", "x.0.0")))

    # --- messages ---------------------------------------------------------------------------------------------------

    def message(self, sender: Party) -> AnyMessage:
        """A message of `sender`, as the codec lets it through."""
        while True:
            try:
                return decode(encode(self._draw(sender), sender=sender, id="forged")).body
            except (WireError, ValueError, OverflowError):
                continue  # the codec refuses it at the door

    def _draw(self, sender: Party) -> AnyMessage:
        if sender.role == "node":
            if self.often(0.95):
                return self._node_report(sender.id)
            return self._log_chunk() if self.often(0.5) else TerminalDoor("q1", TaskId("x-1.0-a0"), "evil", 1, "0f")
        kinds = (self._app_report, self._app_report, self._app_report, self._rho, self._bid, self._query, self._act)
        return self.one(kinds)(sender.id)

    def _app_report(self, owner: str) -> AppReport:
        app = self.app_id(owner if self.often(0.97) else "")
        gang = max(1, self.count(3))
        demand = gang * self.count(4) if self.often(0.9) else self.count(9)
        sizes = tuple(sorted({gang * max(1, self.count(4)) for _ in range(3)}))
        jobs = self._polished(app, gang) if self.often(0.8) else self.some(lambda: self._wish(app), 3)
        return AppReport(
            app=app,
            tenant=TenantId(self.one(("team", "team", "other", "vision", owner))),
            name="forged",
            seq=self.seq(app),
            state="active" if self.often(0.92) else self.one(("finished", "failed", "cancelled")),
            gang=gang,
            demand_max=min(demand, 2**53),
            jobs=jobs,
            requirements=self._requirements(),
            releases=self.some(lambda: LeaseId(f"{app}/{self.count(9)}"), 2),
            level_max=self.one(LEVELS),
            ideal_s=self.seconds(),
            migrations=self.count(),
            steps_lost=self.count(),
            suspensions=self.count(),
            metrics={"loss": self.one((0.0, 1.0, -1e300, 1e300))} if self.often(0.5) else {},
            left_s=self.seconds() if self.often(0.7) else None,
            left_gpu_s=self.seconds() if self.often(0.7) else None,
            loss_drop=self.one((0.0, 1e-300, 0.5, 1e12)),
            sizes=sizes if self.often(0.4) else (),
            move_s=self.seconds(),
            run="r1" if self.often(0.95) else "r2",
            after=() if self.often(0.9) else tuple(self.app_id("") for _ in range(self._dice.randint(1, 3))),
            array=0 if self.often(0.8) else self.count(),
            array_over=0 if self.often(0.8) else self.count(),
            beat_s=self.seconds(),
            standing=self._standing() if self.often(0.6) else None,
        )

    def _standing(self) -> StandingValuation:
        """Draw a valuation that an app states."""
        levels = [level for level in LEVELS if self.often(0.6)] or ["machine"]
        levels = levels if self.often(0.9) else levels[::-1]
        sizes = tuple(sorted({max(1, self.count(4)) for _ in range(2)}))
        return StandingValuation(
            phases=self.some(lambda: self.some(self.seconds, 9), 3) if self.often(0.9) else ((1.0,) * 200,) * 10,
            terms=tuple(
                LevelTerms(level, self.one((0.0, 1.0, 1.3, 1e6)), min(2**31, max(1, self.count(8)))) for level in levels
            ),
            budget_gpu_s=self.seconds(),
            demand_max=min(2**31, max(1, self.count(8))),
            hoped=self.one(LEVELS),
            sizes=() if self.often(0.6) else tuple(min(2**31, size) for size in sizes),
            homes=None if self.often(0.7) else self.some(lambda: Home(self.gpus(), self.gpus(2)), 3),
            phase_demands=() if self.often(0.8) else self.some(lambda: min(2**31, max(1, self.count(8))), 3),
        )

    def _requirements(self) -> Requirements:
        return Requirements(
            spans=self.often(0.3),
            grace_s=self.seconds(),
            preempt_by=self.one(("auto", "checkpoint", "suspend")),
            priority=0 if self.often(0.9) else self.one((-1000, 1000, 5)),
            kind=self.one(("batch", "batch", "interactive")),
            cpus=self.one((0.0, 0.0, 1.0, 64.0, 1e6, 1e-300)),
            host_bytes=self.one((0, 0, 2**30, 2**53)),
            weight=self.one((1.0, 1.0, 2.0, 1e-300, 0.1, 10.0)) if self.often(0.95) else 1e6,
            utility=self._utility() if self.often(0.7) else None,
            gpu_types=() if self.often(0.7) else self.one((("H100",), ("A100", "H200"), ("nothing",))),
            min_memory_bytes=0 if self.often(0.7) else self.one((1, 2**30, 2**34, 2**53)),
        )

    def _polished(self, app: AppId, gang: int) -> tuple[JobWish, ...]:
        """Jobs that contradict neither each other nor their app: they get past the door."""
        free = list(self.devices)
        self._dice.shuffle(free)
        jobs = []
        for number in range(self._dice.randint(1, 3)):
            count = min(gang * self._dice.randint(0, 2), len(free)) // gang * gang
            gpus, free = tuple(sorted(free[:count])), free[count:]
            wish = replace(self._wish(app), job=JobId(f"{app}.{number}"), gpus=gpus)
            jobs.append(replace(wish, launch=LaunchSpec(("python",), "/tmp", "/tmp")))
        return tuple(jobs)

    def _utility(self) -> Utility:
        return Utility(self.one((0.0, 1.0, 50.0, 1e12, 1e-300)), self.one((0.0, 1e-6, 1.0, 1e12)), self.one(SECONDS))

    def _wish(self, app: AppId) -> JobWish:
        launch = LaunchSpec(("python",), self.one(("/tmp", "/", "work", "")), "/tmp")
        return JobWish(
            self.job_id(app),
            self.count(3),
            self.gpus(),
            launch,
            suspended=self.often(0.3),
        )

    def _rho(self, owner: str) -> ProbeReply:
        return ProbeReply(self.app_id(owner), RoundId(self.count(20)), self.one(RHOS))

    def _bid(self, owner: str) -> Bid:
        rows = self.some(lambda: BidRow(self.count(6), self.one(LEVELS), self.one(RHOS)), 6)
        explicit = self.some(self._explicit, 2) if self.often(0.3) else ()
        only = self.gpus() if self.often(0.2) else None
        return Bid(self.app_id(owner), RoundId(self.count(20)), self.one(RHOS), rows, only, explicit)

    def _explicit(self) -> ExplicitRow:
        new = {NodeId(self.one(self.nodes)): max(1, self.count(3)) for _ in range(self._dice.randint(1, 3))}
        return ExplicitRow(tuple(new.items()), self.one(RHOS))

    def _query(self, owner: str) -> Query:
        kind = self.one(("apps", "nodes", "explain", "rounds", "shares", "log", "capacity", "events", "report"))
        target = self.one(("", self.app_id(), "rounds", "x" * 8000, "\x00", "../..", owner, "tenant", "app"))
        edges = tuple(float(self.count()) for _ in range(self._dice.randint(0, 3)))
        events = EventFilter((target,), (self.one((*self.nodes, "\x00")),), since_s=float(self.count()))
        return Query(f"q{self.count()}", kind, target, self.count(), self.count(), events=events, edges=edges)

    def _act(self, owner: str) -> Act:
        name = f"act-{owner}-{self.count(9)}"
        kind = self.one(get_args(ActKind))
        if kind in ("drain", "undrain"):
            target = self.one((*self.nodes, "", "\x00", "x" * 8000))
            return Act(name, kind, target, reason=self.one(("", "new memory", "y" * 8000)), force=self.often(0.2))
        return Act(name, kind, self.one((self.app_id(), self.app_id(owner), "", "\x00")))

    def _log_chunk(self) -> LogChunk:
        return LogChunk(
            "q1",
            TaskId("x-1.0-a0"),
            self.count(),
            b"\xff" * self._dice.randint(0, 9),
            self.count(),
            ended=True,
            dropped=self.count(),
        )

    def _node_report(self, node: str) -> NodeReport:
        here = [gpu for gpu in self.devices if gpu.startswith(f"GPU-{node}-")] or self.devices[:1]
        gpus = here if self.often(0.8) else [self.gpu() for _ in range(4)]
        return NodeReport(
            node=NodeId(node if self.often(0.97) else self.one(self.nodes)),
            rack=self.one(("r1", "r2", "")),
            boot_id="boot",
            incarnation=self.count(3),
            seq=self.seq(f"node-{node}"),
            epoch=self.count(2),
            plan_seq=self.count(30),
            gpus=tuple(self._gpu_status(gpu) for gpu in gpus),
            tasks=self.some(self._task, 4),
            cpus=self.one((0.0, 8.0, 1e6)),
            host_bytes=self.one((0, 2**34, 2**53)),
            wall_s=self.one((0.0, 1.75e9, 1e11)),
            beat_s=self.seconds(),
        )

    def _gpu_status(self, gpu: GpuId) -> GpuStatus:
        return GpuStatus(
            gpu=gpu,
            model=self.one(("H200", "H200", "A100", "")),
            memory_bytes=self.one((0, 2**30, 2**53)),
            slot=self.one(("s0", "s1", "")),
            healthy=self.often(0.9),
            empty=self.often(0.6),
            used_bytes=self.count(),
            strangers=self.count(),
            quarantined=self.often(0.05),
            device=self.one(("", "", "GPU-n1-0")),
        )

    def _task(self) -> TaskStatus:
        app = self.app_id()
        job, attempt = self.job_id(app), self.count(3)
        rank = f".{self.count(2)}" if self.often(0.1) else ""
        return TaskStatus(
            task=TaskId(f"{job}-a{attempt}{rank}" if self.often(0.9) else "nonsense"),
            app=app if self.often(0.95) else self.app_id(),
            job=job,
            attempt=attempt,
            gpus=self.gpus(),
            phase=self.one(PHASES),  # type: ignore[arg-type]
            step=self.one((-1, 0, 5, 100, 2**53)),
            start_step=self.one((-1, 0, 50, 2**53)),
            saved_step=self.one((-1, 0, 50)),
            total_steps=self.count(1000),
            step_s=self.seconds(),
            cooperative=self.often(0.6),
            can_checkpoint=self.often(0.5),
            suspensions=self.count(),
            outcome=self.one(OUTCOMES),  # type: ignore[arg-type]
            exit_code=self.one((None, 0, 1, -9, 2**31)),
            metrics={"loss": 0.5} if self.often(0.5) else {},
            measured=Measured(
                self.one(("unknown", "steps", "memory")),
                self.one((0.0, 1.0)),
                share=self.one((0.0, 0.5, 1.0)),
                ran_s=self.seconds(),
                first_s=self.seconds(),
                unsaved_s=self.seconds(),
            ),
            samples=self.count(),
            unflushed=self.often(0.1),
            helpless=self.often(0.2),
        )
