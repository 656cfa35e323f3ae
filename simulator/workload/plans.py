"""A simulated workload as a value: apps, their jobs, and the assumptions about them."""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct

from app_agent.core.spec import phases_of
from protocol.messages import Kind, Utility

Search = Literal["single", "all", "halving", "hyperband", "curve"]
#: The searches that an app of several jobs may make.
SEARCHES = ("all", "halving", "hyperband", "curve")


class WorkloadError(ValueError):
    """The workload cannot be used; the message names the file, the field and the mend."""


class JobPlan(Struct, frozen=True):
    """The truth of one job: no participant of the world knows it beforehand.

    Attributes
    ----------
    duration_s
        Run time with the `gpus` GPUs of its app, all in one node, from the beginning to the end.
    steps
        Mini-batches of that run, at least 1: one takes ``duration_s / steps``.
    curve
        Its loss at equal distances over the run, the last value at the end; empty: it reports none.
    """

    duration_s: float
    steps: int
    curve: tuple[float, ...] = ()

    @property
    def step_s(self) -> float:
        """Time of one mini-batch."""
        return self.duration_s / self.steps


class AppPlan(Struct, frozen=True):
    """One app and its submission time.

    Attributes
    ----------
    id
        As in the trace.
    tenant
        Lower-case letters, digits and dashes.
    submit_s
        Its submission time, on the workload's own clock.
    gpus, gpus_max
        The gang that each of its jobs needs, and the most that one job can use; equal: rigid.
    sizes
        The numbers of GPUs that a job accepts, rising, from `gpus` to `gpus_max`; none: all multiples of `gpus`.
    phase_growth
        Of halving: a job of a phase can use so many times the GPUs of one of the phase before, from `gpus` up to
        `gpus_max`; 1: in every phase up to `gpus_max`.
    model, batch_size
        The model that it trains, the key into the profiles; empty and 0: unknown.
    search
        The search over its jobs: a ``single`` job, ``all`` run to their ends, or one of them is sought by successive
        ``halving``, ``hyperband`` or stopping by performance ``curve``.
    kind
        ``interactive`` where a person waits for its first steps, ``batch`` for best effort.
    cpus, host_bytes
        The needs of each of its jobs on its node beside GPUs; 0: it asks for none.
    utility
        Its worth as a function of its end, as its owner declares it; None: undeclared.
    gpu_types, min_memory_bytes
        The kind of GPUs that its owner asks for; empty and 0: any.
    leave_s
        The time that its jobs take to leave, and their declared grace period; None: as all jobs, by the costs.
    silent
        Whether its owner does not say how long a mini-batch takes, nor how many a single job has.
    """

    id: str
    tenant: str
    submit_s: float
    gpus: int
    gpus_max: int
    jobs: tuple[JobPlan, ...]
    model: str = ""
    batch_size: int = 0
    search: Search = "single"
    sizes: tuple[int, ...] = ()
    kind: Kind = "batch"
    cpus: float = 0.0
    host_bytes: int = 0
    gpu_types: tuple[str, ...] = ()
    min_memory_bytes: int = 0
    leave_s: float | None = None
    utility: Utility | None = None
    phase_growth: int = 1
    silent: bool = False


class Workload(Struct, frozen=True):
    """Apps in the order of submission. `notes` tell assumptions and jobs left out, a sentence each."""

    name: str
    apps: tuple[AppPlan, ...]
    notes: tuple[str, ...] = ()
    seed: int | None = None

    @property
    def jobs(self) -> int:
        """The jobs of all apps."""
        return sum(len(app.jobs) for app in self.apps)


def gpu_seconds(app: AppPlan) -> float:
    """Return the GPU time that `app` takes at the best placement, if nothing is lost.

    For a search by halving it is the budget of Eq. 2 with trials of equal length, since the survivors are not known.
    For Hyperband and curve stopping it is an upper bound, every job run to its end.

    *Source:* Themis (NSDI 2020), Eq. 2: the app's total budget B.
    """
    whole = app.gpus * math.fsum(job.duration_s for job in app.jobs)
    return whole * halving_share(len(app.jobs)) if app.search == "halving" else whole


def halving_share(trials: int) -> float:
    """Return the part of all trials' mini-batches that successive halving makes: 1 for one trial, 2/3 for two.

    Phase i has ceil(trials / 2^i) trials, and 2^i of the 2^phases - 1 parts of a training.
    """
    phases = phases_of(trials)
    parts = sum(-(-trials // (1 << phase)) << phase for phase in range(phases))
    return parts / (trials * ((1 << phases) - 1))
