"""Which GPUs of this node are trusted, and how processes are treated that use one under no lease.

Quarantine. A driver may call a GPU healthy on which nothing works: tasks fail there and their jobs go on elsewhere. The
evidence is a task that failed after its first mini-batch, or as its GPU met an error, and whose job has got further
on other GPUs of the node since. A script that cannot even begin is no evidence against the GPU, nor is one that fails
at the same step everywhere. The ledger blames a GPU with such evidence from at least two apps, if no job has finished
there since. One app never blames a GPU, however often its jobs fail: Xid 13, 31 and 43 are mostly users' own mistakes.
An app whose tasks failed so on other GPUs of the node too is no evidence. Neither is any failure while all tasks that
end elsewhere on the node fail as well: then the node is sick, perhaps its storage, and not the GPU. A job that finishes
on the GPU clears its record.

MPS. A fatal fault of one client ends all clients of a GPU's server, and the driver does not say whose fault it was. So
the jobs that were there are denied MPS for `WINDOW_S`: without it a job falls by its own faults alone.

Strangers. The policy `kill` ends processes that use a GPU under no lease: those that compute, belong to no system user
and were seen for `PATIENCE_S`. They are sent SIGTERM, and SIGKILL `TERMINATE_S` later.

Nothing here knows of tasks' states, measurements in doubt or leases; the modules above ask and tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from node_agent.core.events import (
    EndStranger,
    GpuProcess,
    GpuSample,
    HealthLedger,
    MpsChecked,
    NodeFacts,
    QuarantineLifted,
    RememberHealth,
    StrangerSpared,
    TaskFailure,
)
from protocol.messages import GpuId, GpuStatus, JobId, Outcome, device_of

WINDOW_S = 24 * 3600.0  #: failures older than this blame no GPU
ENDS_MAX = 8  #: of each GPU, the newest
APPS_MIN = 2
PATIENCE_S = 5.0  #: a stranger seen for less may be a process that is on its way out
TERMINATE_S = 10.0  #: between SIGTERM and SIGKILL, and between two SIGKILLs
FAULT_S = 60.0  #: a program dies within this of the error that killed it

MEND = "check it, then write its id into the file `unquarantine` in the node agent's state_dir"


class Stranger(Struct, frozen=True):
    """A process under no lease: its GPUs, since when it is seen, the signals it was sent, why it is `spared`."""

    gpus: tuple[GpuId, ...]
    seen_at: float
    signalled_at: float = 0.0
    signals: int = 0
    spared: str = ""


class Health:
    """The ledger of one node, and its strangers.

    Parameters
    ----------
    facts
        Whether there is a quarantine, and the policy on strangers.
    ledger
        As the last incarnation had it remembered.
    """

    def __init__(self, facts: NodeFacts, ledger: HealthLedger | None = None) -> None:
        self._facts = facts
        self._ledger = ledger or HealthLedger()
        self._remembered = self._ledger
        self._strangers: dict[tuple[int, int], Stranger] = {}
        self._faults: dict[GpuId, tuple[float, str]] = {}
        self._mps_troubles: dict[GpuId, str] = {}

    def told(self, event: StrangerSpared | QuarantineLifted | MpsChecked, now: float) -> None:
        """Take in the word of an administrator, or of an adapter that ends processes or keeps MPS running."""
        match event:
            case MpsChecked(gpu=gpu, trouble=trouble):
                self._mps_troubles[gpu] = trouble
            case QuarantineLifted(gpus=gpus):
                self.lift(gpus, now)
            case StrangerSpared():
                self.spared(event)
            case _:
                assert_never(event)

    # --- quarantine -------------------------------------------------------------------------------------------------

    def ended(self, end: TaskFailure, outcome: Outcome, *, begun: bool) -> None:
        """Take in how a task ended on these seats; `begun` says whether it had made a mini-batch there."""
        end = replace(end, gpus=_devices(end.gpus))
        if outcome == "finished":
            self._clear(end.gpus, end.at)
            self._succeeded(end.job, end.gpus, None, end.at)
        elif outcome == "failed" and self._facts.quarantine and (begun or self.fault(end.gpus, end.at)):
            self._ledger = replace(self._ledger, failures=(*self._current(end.at), end))

    def progressed(self, job: JobId, gpus: Iterable[GpuId], step: int, now: float) -> None:
        """Take in that a job has made the mini-batch `step` on these seats."""
        if self._ledger.failures:
            self._succeeded(job, _devices(gpus), step, now)

    def lift(self, gpus: Sequence[GpuId], now: float) -> None:
        """Trust these devices again, all if there are none."""
        self._clear(gpus or tuple(self._ledger.quarantined), now)

    def quarantine(self, gpu: GpuId) -> str:
        """Say why no new task may start on this seat's device, or return an empty string."""
        return self._ledger.quarantined.get(device_of(gpu), "") if self._facts.quarantine else ""

    def deny_mps(self, jobs: Iterable[JobId], now: float) -> None:
        """Have these jobs, which were clients of MPS at a fatal fault, run without it from now on."""
        kept = {job: at for job, at in self._ledger.mps_denied.items() if at > now - WINDOW_S}
        self._ledger = replace(self._ledger, mps_denied=kept | dict.fromkeys(sorted(jobs), now))

    def may_use_mps(self, job: JobId, now: float) -> bool:
        """Whether a job may be a client of MPS."""
        at = self._ledger.mps_denied.get(job)
        return at is None or at <= now - WINDOW_S

    def news(self) -> list[RememberHealth]:
        """Return the ledger if it has changed since it was last returned."""
        if self._ledger == self._remembered:
            return []
        self._remembered = self._ledger
        return [RememberHealth(self._ledger)]

    def _clear(self, devices: Iterable[GpuId], now: float) -> None:
        gone = set(devices)
        barred = {gpu: why for gpu, why in self._ledger.quarantined.items() if gpu not in gone}
        finished = self._ledger.finished | dict.fromkeys(sorted(gone), now)
        self._ledger = replace(self._ledger, finished=finished, quarantined=barred)
        self._ledger = replace(self._ledger, failures=self._current(now))

    def _current(self, now: float) -> tuple[TaskFailure, ...]:
        """Return the failures that still say something about some GPU."""
        kept = {failure for gpu in self._failed_on() for failure in self._against(gpu, now)}
        return tuple(failure for failure in self._ledger.failures if failure in kept)

    def _failed_on(self) -> list[GpuId]:
        return sorted({gpu for failure in self._ledger.failures for gpu in failure.gpus})

    def _against(self, device: GpuId, now: float) -> list[TaskFailure]:
        """Return the newest failures on `device` that neither a finished job nor time has cleared."""
        since = max(self._ledger.finished.get(device, 0.0), now - WINDOW_S)
        return [one for one in self._ledger.failures if device in one.gpus and one.at > since][-ENDS_MAX:]

    def _succeeded(self, job: JobId, devices: Sequence[GpuId], step: int | None, now: float) -> None:
        """Mark a job's failures on other devices, as it got further on these; without a `step`, to its end."""
        failures = tuple(_or_went_on(failure, job, devices, step) for failure in self._ledger.failures)
        if failures == self._ledger.failures:
            return
        self._ledger = replace(self._ledger, failures=failures)
        for device in sorted({gpu for failure in failures if failure.job == job for gpu in failure.gpus}):
            self._blame(device, now)

    def _blame(self, device: GpuId, now: float) -> None:
        elsewhere = [failure for failure in self._ledger.failures if device not in failure.gpus]
        roaming = {failure.app for failure in elsewhere}
        evidence = [one for one in self._against(device, now) if one.went_on and one.app not in roaming]
        apps = sorted({failure.app for failure in evidence})
        if device in self._ledger.quarantined or len(apps) < APPS_MIN:
            return
        since = min(failure.at for failure in evidence)
        if any(failure.at >= since for failure in elsewhere) and not self._finished_elsewhere(device, since):
            return
        why = f"quarantined: jobs of {' and '.join(apps)} failed on {device} and got further on other GPUs; {MEND}"
        self._ledger = replace(self._ledger, quarantined=self._ledger.quarantined | {device: why})

    def _finished_elsewhere(self, device: GpuId, since: float) -> bool:
        return any(at >= since for gpu, at in self._ledger.finished.items() if gpu != device)

    # --- measurements -----------------------------------------------------------------------------------------------

    def sampled(self, gpus: Iterable[GpuSample], now: float) -> list[EndStranger]:
        """Take in a measurement of all GPUs; return which strangers to end now, and how."""
        here: dict[tuple[int, int], Stranger] = {}
        for sample in gpus:
            if sample.faults:
                self._faults[sample.gpu] = (now, sample.faults[-1])
            for process in sample.processes:
                if process.task is None:
                    key = (process.pid, process.start_ticks)
                    known = self._strangers.get(key) or Stranger((), now, spared=self._spared(process))
                    on = here[key].gpus if key in here else ()
                    here[key] = replace(known, gpus=(*on, sample.gpu))
        orders: list[EndStranger] = []
        for key, stranger in sorted(here.items()):
            if self._due(stranger, now):
                orders.append(EndStranger(stranger.gpus[0], *key, "kill" if stranger.signals else "terminate"))
                here[key] = replace(stranger, signalled_at=now, signals=stranger.signals + 1)
        self._strangers = here
        return orders

    def spared(self, event: StrangerSpared) -> None:
        """Leave a process alone from now on that could not be ended."""
        key = (event.pid, event.start_ticks)
        if key in self._strangers:
            self._strangers[key] = replace(self._strangers[key], spared=event.reason)

    def judged(self, status: GpuStatus) -> GpuStatus:
        """Return a seat's status with its quarantine and strangers; the driver's own word comes first."""
        barred = self.quarantine(status.gpu)
        told = barred or self.remark(status.gpu) or self.mps_trouble(status.gpu) if status.healthy else ""
        if not (barred or told):
            return status
        return replace(status, quarantined=bool(barred), detail=told or status.detail)

    def remark(self, gpu: GpuId) -> str:
        """Say which strangers use this seat's device, or return an empty string."""
        told = [_told(pid, one) for (pid, _), one in sorted(self._strangers.items()) if device_of(gpu) in one.gpus]
        return "; ".join(told)

    def mps_trouble(self, gpu: GpuId) -> str:
        """Say why this seat's device has no MPS though it is configured to, or return an empty string."""
        return self._mps_troubles.get(device_of(gpu), "")

    def fault(self, gpus: Iterable[GpuId], now: float) -> str:
        """Return the error that a program on these seats met lately, or an empty string."""
        met = {device: self._faults[device] for device in map(device_of, gpus) if device in self._faults}
        return next((f"{device} met {what}" for device, (at, what) in met.items() if at > now - FAULT_S), "")

    def _spared(self, process: GpuProcess) -> str:
        """Say why a stranger is not ended, or return an empty string."""
        facts = self._facts
        if facts.strangers != "kill":
            return f"strangers = {facts.strangers!r}"
        if process.helper:
            return "it is the node agent's own"
        if process.uid is None or not process.start_ticks:
            return "it is not visible from here, perhaps in another container"
        if not process.compute:
            return "it only draws"
        if process.uid < facts.strangers_uid_min:
            return f"it belongs to system user {process.uid}; strangers_uid_min is {facts.strangers_uid_min}"
        return ""

    def _due(self, stranger: Stranger, now: float) -> bool:
        if stranger.spared:
            return False
        if stranger.signals == 0:
            return now >= stranger.seen_at + PATIENCE_S
        return now >= stranger.signalled_at + TERMINATE_S


def _devices(gpus: Iterable[GpuId]) -> tuple[GpuId, ...]:
    return tuple(sorted({device_of(gpu) for gpu in gpus}))


def _or_went_on(failure: TaskFailure, job: JobId, devices: Sequence[GpuId], step: int | None) -> TaskFailure:
    """Return the failure, marked if it is of this job, which has got further on these devices, all of them others."""
    further = failure.job == job and (step is None or step > failure.step)
    if failure.went_on or not further or not set(devices).isdisjoint(failure.gpus):
        return failure
    return replace(failure, went_on=True)


def _told(pid: int, stranger: Stranger) -> str:
    what = f"process {pid} uses {', '.join(stranger.gpus)} under no lease"
    if stranger.spared:
        return f"{what}; it is left alone: {stranger.spared}"
    if stranger.signals == 0:
        return f"{what}; it will be ended"
    return f"{what}; it was sent {'SIGTERM' if stranger.signals == 1 else 'SIGKILL'}"
