"""What a user submits: one app, of one training job or of several trials of which the best is wanted."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from msgspec import Meta, Struct

from protocol.messages import Count, Level, Positive, PreemptBy, Seconds

Command = Annotated[tuple[str, ...], Meta(min_length=1, max_length=1024)]

#: Source: Li et al., Hyperband, JMLR 18 (2018), section 3: 3 or 4.
ETA = 3

_TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


class AppSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """One app as submitted.

    Attributes
    ----------
    trials
        One command per job; more than one makes a search.
    cwd, checkpoint_root
        Absolute folders on storage that every node sees; job n of app a checkpoints in ``<checkpoint_root>/<a>/<n>``.
    gang
        GPUs each job needs at once, on one node; `gpus_max` is the most it can use (0: just the gang).
    spans
        Whether a job's GPUs may lie on several nodes. `submit` does not offer it: nothing stops the ranks of one gang
        at the same step yet, so node agents could not preempt them without loss; the simulator's machines can.
    steps_total
        Mini-batches of one whole training; 0 lets the script say. Halving and Hyperband need it.
    step_serial_s
        Time of one mini-batch on one GPU, a guess used until it was measured; 0: unknown.
    restart_s
        What one checkpoint and restart costs; an elastic job grows only for a gain of more than twice that.
    level_max
        The loosest locality of one job's GPUs; one that does not span lies on one node, so levels beyond ``machine``
        mean that.
    metric, mode
        What trials report and whether more (``max``) or less (``min``) of it is better.
    search
        Which trials go on: ``halving``, ``hyperband`` (halving from several starts), ``curve`` (those whose learning
        curves may still win; with a `target`, also for one job), ``all`` (each to its end).
    phase_steps
        Of halving: mini-batches each trial of a phase makes in that phase; empty divides `steps_total` 1 : 2 : 4 ...
    eta
        Of Hyperband: of so many trials one goes on to the next rung, which lasts so many times as long.
    steps_min
        Of Hyperband: mini-batches after which a trial can be judged at the earliest; 0: as early as makes as many
        brackets as the trials can fill.
    target
        Of ``curve``: the first trial to report this metric, or a better one, is the answer.
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
    spans: bool = False
    steps_total: Count = 0
    step_serial_s: Seconds = 0.0
    restart_s: Seconds = 10.0
    level_max: Level = "cluster"
    grace_s: Seconds = 120.0
    preempt_by: PreemptBy = "auto"
    max_restarts: Count = 3
    metric: str = ""
    mode: Literal["max", "min"] = "max"
    search: Literal["halving", "hyperband", "curve", "all"] = "halving"
    phase_steps: tuple[Positive, ...] = ()
    eta: Annotated[int, Meta(ge=2, le=1024)] = ETA
    steps_min: Count = 0
    target: float | None = None

    @property
    def job_demand_max(self) -> int:
        """The most GPUs one job can use: whole gangs."""
        return self.gang * (max(self.gang, self.gpus_max) // self.gang)

    @property
    def elastic(self) -> bool:
        """Whether a job can run on more GPUs than its gang."""
        return self.job_demand_max > self.gang


def phases_of(trials: int) -> int:
    """Return the number of phases of halving: halve until one trial is left, then let it end."""
    return (trials - 1).bit_length() + 1


def bracket_sizes(eta: int, s_max: int) -> tuple[int, ...]:
    """Return n_s of the brackets s_max, ..., 1, 0 of Hyperband.

    Source: Li et al. 2018, Algorithm 1, line 3: n = ceil(B / R * eta^s / (s + 1)) with B = (s_max + 1) R.
    """
    return tuple(-(-(s_max + 1) * eta**s // (s + 1)) for s in range(s_max, -1, -1))


def brackets_of(spec: AppSpec) -> int:
    """Return the number of brackets of Hyperband, s_max + 1, with s_max = floor(log_eta(R / r_min)).

    Without an r_min as many as the trials can fill, at least two: with one alone nothing is ever compared.
    """
    s_max = 0
    while spec.steps_total >= max(1, spec.steps_min) * spec.eta ** (s_max + 1):
        if not spec.steps_min and s_max and sum(bracket_sizes(spec.eta, s_max + 1)) > len(spec.trials):
            break
        s_max += 1
    return s_max + 1


def mistake(spec: AppSpec) -> str | None:
    """Return one sentence that names the wrong field and the mend, or None when `spec` can be run as it is."""
    for field in ("cwd", "checkpoint_root"):
        if not getattr(spec, field).startswith("/"):
            return f"{field} is {getattr(spec, field)!r}, which is no absolute path; give one that starts with /"
    if not _TENANT.fullmatch(spec.tenant):
        return f"tenant is {spec.tenant!r}; use lower-case letters, digits and dashes, such as team-a"
    if spec.gpus_max and spec.gpus_max < spec.gang:
        return f"gpus_max is {spec.gpus_max}, fewer than the gang of {spec.gang}; raise gpus_max or lower gang"
    return _options_mistake(spec) or (_search_mistake(spec) if len(spec.trials) > 1 else None)


def _options_mistake(spec: AppSpec) -> str | None:
    """Say which field is of a search that is not asked for, or lacks what it is about."""
    of_one_search = {
        "phase_steps": (bool(spec.phase_steps), "halving"),
        "eta": (spec.eta != ETA, "hyperband"),
        "steps_min": (bool(spec.steps_min), "hyperband"),
        "target": (spec.target is not None, "curve"),
    }
    for field, (given, search) in of_one_search.items():
        if given and spec.search != search:
            return (
                f"{field} is for search {search!r}, but search is {spec.search!r}; leave {field} out or change search"
            )
    if spec.target is not None and not math.isfinite(spec.target):
        return f"target is {spec.target}, which nothing can reach; give a number"
    if spec.target is not None and not spec.metric:
        return f"target is {spec.target:g} but no metric is named; name the one that the scripts report"
    if spec.search == "curve" and len(spec.trials) == 1 and spec.target is None:
        return "search is 'curve' for one trial without a target, so it could end no earlier; give a target"
    return None


def _search_mistake(spec: AppSpec) -> str | None:
    """Say what a search of several trials lacks."""
    if spec.search == "all":
        return None
    if not spec.metric:
        return f"{len(spec.trials)} trials but no metric to compare them by; name one that the scripts report"
    if spec.search == "halving":
        return _halving_mistake(spec)
    return _hyperband_mistake(spec) if spec.search == "hyperband" else None


def _hyperband_mistake(spec: AppSpec) -> str | None:
    """Say why the steps make no brackets."""
    earliest = max(1, spec.steps_min)
    if spec.steps_total >= earliest * spec.eta:
        return None
    return (
        f"steps_total is {spec.steps_total}; Hyperband needs the mini-batches of one whole training, at least "
        f"{earliest * spec.eta}: {spec.eta} (eta) times {earliest} (steps_min)"
    )


def _halving_mistake(spec: AppSpec) -> str | None:
    """Say why there are not the phases that so many trials need."""
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
