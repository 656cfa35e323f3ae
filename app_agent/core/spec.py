"""What a user submits: one app, of one training job or of several trials of which the best is wanted."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from msgspec import Meta, Struct

from protocol.messages import Count, Level, Positive, PreemptBy, Seconds

Command = Annotated[tuple[str, ...], Meta(min_length=1, max_length=1024)]

_TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


class AppSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """One app as submitted.

    Attributes
    ----------
    trials
        One command per job; more than one makes a search by successive halving.
    cwd, checkpoint_root
        Absolute folders on storage that every node sees; job n of app a checkpoints in ``<checkpoint_root>/<a>/<n>``.
    gang
        GPUs each job needs at once, on one node; `gpus_max` is the most it can use (0: just the gang).
    steps_total
        Mini-batches of one whole training; 0 lets the script say. A search needs it.
    step_serial_s
        Time of one mini-batch on one GPU, a guess used until it was measured; 0: unknown.
    restart_s
        What one checkpoint and restart costs; an elastic job grows only for a gain of more than twice that.
    level_max
        The loosest locality of one job's GPUs; a job lives on one node, so levels beyond ``machine`` mean that.
    metric, mode
        What trials report and whether more (``max``) or less (``min``) of it is better.
    phase_steps
        Of a search: mini-batches each trial of a phase makes in that phase; empty divides `steps_total` 1 : 2 : 4 ...
    max_restarts
        How often one job is started again after failing; preemptions do not count.
    """

    trials: Annotated[tuple[Command, ...], Meta(min_length=1, max_length=1024)]
    cwd: str
    checkpoint_root: str
    tenant: str = ""
    name: Annotated[str, Meta(max_length=128)] = ""
    env: dict[str, str] = {}
    gang: Positive = 1
    gpus_max: Count = 0
    steps_total: Count = 0
    step_serial_s: Seconds = 0.0
    restart_s: Seconds = 10.0
    level_max: Level = "cluster"
    grace_s: Seconds = 120.0
    preempt_by: PreemptBy = "auto"
    max_restarts: Count = 3
    metric: str = ""
    mode: Literal["max", "min"] = "max"
    phase_steps: tuple[Positive, ...] = ()

    @property
    def job_demand_max(self) -> int:
        """The most GPUs one job can use: whole gangs."""
        return self.gang * (max(self.gang, self.gpus_max) // self.gang)

    @property
    def elastic(self) -> bool:
        """Whether a job can run on more GPUs than its gang."""
        return self.job_demand_max > self.gang


def phases_of(trials: int) -> int:
    """Return the number of phases of a search: halve until one trial is left, then let it end."""
    return (trials - 1).bit_length() + 1


def mistake(spec: AppSpec) -> str | None:
    """Return one sentence that names the wrong field and the mend, or None when `spec` can be run as it is."""
    for field in ("cwd", "checkpoint_root"):
        if not getattr(spec, field).startswith("/"):
            return f"{field} is {getattr(spec, field)!r}, which is no absolute path; give one that starts with /"
    if not _TENANT.fullmatch(spec.tenant):
        return f"tenant is {spec.tenant!r}; use lower-case letters, digits and dashes, such as team-a"
    if spec.gpus_max and spec.gpus_max < spec.gang:
        return f"gpus_max is {spec.gpus_max}, fewer than the gang of {spec.gang}; raise gpus_max or lower gang"
    return _search_mistake(spec) if len(spec.trials) > 1 else None


def _search_mistake(spec: AppSpec) -> str | None:
    """Say what a search of several trials lacks."""
    if not spec.metric:
        return f"{len(spec.trials)} trials but no metric to compare them by; name one that the scripts report"
    if spec.phase_steps:
        wanted = phases_of(len(spec.trials))
        if len(spec.phase_steps) == wanted:
            return None
        return f"phase_steps has {len(spec.phase_steps)} numbers; {len(spec.trials)} trials take {wanted} phases"
    if spec.steps_total < 2 ** phases_of(len(spec.trials)) - 1:
        return (
            f"steps_total is {spec.steps_total}; a search of {len(spec.trials)} trials needs the mini-batches of one "
            f"whole training, at least {2 ** phases_of(len(spec.trials)) - 1}"
        )
    return None
