"""An app agent under test: say what the arbiter says, read what the app wishes. Every step validates the agent."""

from __future__ import annotations

from msgspec.structs import replace

from app_agent.core.agent import AppAgent, ToOneApp
from app_agent.core.spec import AppSpec
from protocol.core import Send
from protocol.messages import (
    AppId,
    AppReport,
    Bid,
    GpuId,
    Grant,
    Holdings,
    JobId,
    JobWish,
    LeaseId,
    LeaseTerms,
    NodeId,
    Offer,
    OfferedGpu,
    Preempt,
    Probe,
    RoundId,
    TaskId,
    TaskStatus,
)
from tests.support.wishes import made

APP = AppId("ada-1")


def spec_of(**changes: object) -> AppSpec:
    """A spec without mistakes; one trial of one GPU unless changed."""
    fields: dict[str, object] = {
        "trials": (("python", "train.py"),),
        "cwd": "/srv",
        "checkpoint_root": "/checkpoints",
        "tenant": "team-a",
        "name": "train.py",
        "steps_total": 100,
    }
    return AppSpec(**made(fields | changes))  # type: ignore[arg-type]


def terms(gpu: str, *, leaving: bool = False) -> LeaseTerms:
    """The lease of GPU ``n1g2``: node n1, slot ``s`` + half its number, rack r1."""
    node, _, number = gpu.partition("g")
    return LeaseTerms(
        lease=LeaseId(f"L-{gpu}"),
        gpu=GpuId(gpu),
        node=NodeId(node),
        rack="r1",
        slot=f"s{int(number.partition('+')[0]) // 2}",
        epoch=1,
        remaining_s=600.0,
        leaving=leaving,
    )


def offered(gpu: str) -> OfferedGpu:
    """The same GPU on offer."""
    lease = terms(gpu)
    return OfferedGpu(lease.gpu, lease.node, lease.rack, lease.slot)


def status(task: str, gpus: str, phase: str = "running", **facts: object) -> TaskStatus:
    """The status of a cooperative task that can checkpoint; ``status("ada-1.0-a0", "n1g0 n1g1", step=7)``."""
    job, _, attempt = task.rpartition("-a")
    fields: dict[str, object] = {"cooperative": True, "can_checkpoint": True} | facts
    return TaskStatus(
        task=TaskId(task),
        app=AppId(job.partition(".")[0]),
        job=JobId(job),
        attempt=int(attempt),
        gpus=tuple(GpuId(gpu) for gpu in gpus.split()),
        phase=phase,  # type: ignore[arg-type]
        **fields,  # type: ignore[arg-type]
    )


def exited(task: str, gpus: str, outcome: str, **facts: object) -> TaskStatus:
    """The status of a task that is over."""
    return status(task, gpus, "exited", outcome=outcome, **facts)


class Bench:
    """One agent, and an arbiter's side of the conversation."""

    def __init__(self, **changes: object) -> None:
        self.now = 1000.0
        self.agent = AppAgent.of(APP, spec_of(**changes), now=self.now, beat_s=2.0)
        self.seq = 0
        self.sent: list[Send] = []
        self.reports: list[AppReport] = []
        self._keep(self.agent.restate(self.now))

    def _keep(self, sends: list[Send]) -> list[Send]:
        self.agent.validate()
        self.sent += sends
        self.reports += [send.message for send in sends if isinstance(send.message, AppReport)]
        return sends

    def hear(self, message: ToOneApp) -> list[Send]:
        return self._keep(self.agent.hear(message, self.now))

    def tick(self, after_s: float = 2.0) -> list[Send]:
        self.now += after_s
        return self._keep(self.agent.tick(self.now))

    def cancel(self) -> list[Send]:
        return self._keep(self.agent.cancel(self.now))

    def holdings(
        self,
        leases: str = "",
        *tasks: TaskStatus,
        leaving: str = "",
        acked: int | None = None,
        seq: int | None = None,
        **more: object,
    ) -> list[Send]:
        """Say the whole: these leases, those that are leaving, and tasks; all reports so far are acknowledged."""
        self.seq = self.seq + 1 if seq is None else seq
        held = [terms(gpu) for gpu in leases.split()] + [terms(gpu, leaving=True) for gpu in leaving.split()]
        told = self.agent.state.seq if acked is None else acked
        whole = Holdings(APP, 1, self.seq, tuple(held), tasks, cluster_gpus=8, acked=told)
        return self.hear(replace(whole, **more))

    def grant(self, leases: str, *, seq: int | None = None) -> list[Send]:
        self.seq = self.seq + 1 if seq is None else seq
        return self.hear(Grant(APP, RoundId(1), 1, self.seq, tuple(terms(gpu) for gpu in leases.split())))

    def preempt(self, leases: str, *, seq: int | None = None) -> list[Send]:
        self.seq = self.seq + 1 if seq is None else seq
        lost = tuple(LeaseId(f"L-{gpu}") for gpu in leases.split())
        return self.hear(Preempt(APP, 1, self.seq, lost, "round 2 gave it to bob-1", 120.0))

    def offer(self, gpus: str, kept: str = "") -> Bid:
        """Offer GPUs; return the bid."""
        shown = tuple(offered(gpu) for gpu in gpus.split())
        message = Offer(APP, RoundId(2), 1, 600.0, 2.0, shown, tuple(offered(gpu) for gpu in kept.split()))
        (send,) = self.hear(message)
        assert isinstance(send.message, Bid)
        return send.message

    def probe(self, *, elapsed_s: float = 0.0, apps_mean: float = 1.0) -> list[Send]:
        return self.hear(Probe(APP, RoundId(2), 1, 8, apps_mean, elapsed_s, 2.0))

    @property
    def report(self) -> AppReport:
        """The newest report."""
        return self.reports[-1]

    def wish(self, number: int = 0) -> JobWish:
        """What the newest report wishes of job `number`."""
        return next(wish for wish in self.report.jobs if wish.job == f"{APP}.{number}")

    def wished(self, number: int = 0) -> tuple[int, str]:
        """Attempt and GPUs of that wish."""
        wish = self.wish(number)
        return wish.attempt, " ".join(wish.gpus)

    def quietly(self) -> AppReport:
        """The newest report without its number."""
        return replace(self.report, seq=0)
