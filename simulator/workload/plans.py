"""What a simulated workload is: apps, their jobs, and what was assumed of them."""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct

from app_agent.core.spec import phases_of
from protocol.messages import Kind, Utility

Search = Literal["single", "all", "halving", "hyperband", "curve"]
#: How the jobs of an app that has several may belong together.
SEARCHES = ("all", "halving", "hyperband", "curve")


class WorkloadError(ValueError):
    """The workload cannot be used; the message names the file, the field and the mend."""


class JobPlan(Struct, frozen=True):
    """One job, as it truly is: nobody in the world knows this beforehand.

    Attributes
    ----------
    duration_s
        Run time with the `gpus` GPUs of its app, all in one machine, from the beginning to the end.
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
    """One app and when it comes.

    Attributes
    ----------
    id
        As in the trace.
    tenant
        Lower-case letters, digits and dashes.
    submit_s
        When it is submitted, on the workload's own clock.
    gpus, gpus_max
        The gang that each of its jobs needs, and the most that one job can use; equal: rigid.
    sizes
        The numbers of GPUs that a job accepts, rising, from `gpus` to `gpus_max`; none: all multiples of `gpus`.
    model, batch_size
        What it trains, the key into the profiles; empty and 0: unknown.
    search
        How its jobs belong together: ``single`` job, ``all`` run to their ends, or one of them is sought by successive
        ``halving``, ``hyperband`` or stopping by performance ``curve``.
    kind
        ``interactive`` where a person waits for its first steps, ``batch`` for best effort.
    cpus, host_bytes
        What each of its jobs needs of its node beside GPUs; 0: it asks for none.
    utility
        What it is worth by when it ends, as its owner declares it; None: it does not say.
    leave_s
        How long its jobs take to leave, which is the grace period that they declare; None: as all jobs, by the costs.
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
    leave_s: float | None = None
    utility: Utility | None = None


class Workload(Struct, frozen=True):
    """Apps in the order they come. `notes` say what was assumed and what was left out, a sentence each."""

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

    Of a search by halving it is the budget of Eq. 2 with trials of equal length, since who survives is not known; of
    Hyperband and curve stopping an upper bound, every job run to its end.

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
