"""A user's submission: one app, of one training job, of an array of jobs, or of trials of which the best is wanted."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct
from msgspec.structs import replace

from protocol.messages import (
    AFTER_MAX,
    JOBS_MAX,
    AppId,
    Count,
    Folder,
    Level,
    Positive,
    Requirements,
    Seconds,
    Variable,
    Word,
)

Command = Annotated[tuple[Word, ...], Meta(min_length=1, max_length=1024)]

#: Source: Li et al., Hyperband, JMLR 18 (2018), section 3: 3 or 4.
ETA = 3

#: Variables of the submitter's environment by which a task finds the same programs; it gets no others unasked.
INHERITED = ("PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "LANG")

#: Longest list of sizes, which every report of the app repeats.
SIZES_MAX = 64

#: The greatest index of a job of an array.
INDEX_MAX = 10**9 - 1
#: So many jobs of an array that names no bound run at a time, at most.
AT_ONCE_MAX = 256
#: A failed job is started again so often, if its user names no number.
RESTARTS = 3

TENANT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9})(?::(\d{1,9}))?)?")


#: Which trials of a search go on.
SearchName = Literal["halving", "hyperband", "curve", "all"]
#: How an app must have ended for another to begin after it: ``ok``: it has finished; ``any``: however it ended.
Ended = Literal["ok", "any"]


class Dependency(Struct, frozen=True):
    """An app of the same owner that must be over first; ``last`` is the newest one at the time of the submission."""

    app: AppId
    ended: Ended = "ok"

    @classmethod
    def of(cls, text: str) -> Dependency:
        """Return the dependency written as ``ana-kqz7``, ``ana-kqz7:ok`` or ``ana-kqz7:any``.

        Raises
        ------
        ValueError
            With a sentence, for anything else.
        """
        app, colon, ended = text.partition(":")
        if not app or (colon and ended not in ("ok", "any")):
            raise ValueError(f"{text!r} is no dependency; write ana-kqz7, ana-kqz7:ok or ana-kqz7:any")
        return cls(AppId(app), "any" if ended == "any" else "ok")


def array_of(text: str) -> tuple[tuple[int, ...], int]:
    """Return the indices of an array, rising, and how many of its jobs may run at a time (0: no bound is named).

    Written as ``0-19``, ``0-19%4`` (at most four at a time), ``1,3,7`` or ``0-20:5`` (0, 5, 10, 15 and 20).

    Raises
    ------
    ValueError
        With a sentence, for anything else.
    """
    ranges, percent, bound = text.partition("%")
    if percent and not (bound.isascii() and bound.isdigit() and 1 <= int(bound) <= JOBS_MAX):
        raise ValueError(f"{text!r} bounds how many jobs run at a time by {bound!r}; write a number, as in 0-19%4")
    indices: set[int] = set()
    for part in ranges.split(","):
        found = _RANGE.fullmatch(part.strip())
        if not found:
            raise ValueError(f"{text!r} is no array; write 0-19, 0-19%4, 1,3,7 or 0-20:5")
        first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        if last < first or step < 1:
            mend = "give a step of 1 or more" if step < 1 else "write the smaller one first"
            raise ValueError(f"{part.strip()!r} names no index; {mend}, as in 0-19 or 0-20:5")
        if (last - first) // step + 1 + len(indices) > 2 * JOBS_MAX:
            raise ValueError(f"{text!r} has more than {JOBS_MAX} jobs, the most of one array; submit several")
        indices.update(range(first, last + 1, step))
    if len(indices) > JOBS_MAX:
        raise ValueError(f"{text!r} has {len(indices)} jobs, and one array has {JOBS_MAX} at most; submit several")
    return tuple(sorted(indices)), int(bound or 0)


def array_text(indices: Sequence[int]) -> str:
    """Return rising indices as `array_of` reads them, such as ``0-4,7``."""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


class AppSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """One app as submitted.

    Attributes
    ----------
    trials
        One command per job; more than one makes a search.
    array, array_at_most
        Of an array: one index for each job, rising. All its jobs have the one command, and each finds its index in
        ``GPU_ARBITER_ARRAY_INDEX``. At most so many run at a time; 0: as many as get GPUs, up to `AT_ONCE_MAX`.
    after
        The apps that must be over before this one takes part.
    cwd, checkpoint_root
        Absolute folders on storage that every node sees; job n checkpoints in ``<checkpoint_root>/<run>/<n>``, where
        the run differs from that of every other submission, such as ``ana-kq7-5f0c12ab``.
    env, secrets
        Variables of its environment: by value, and by the file that holds the value on the node.
    requirements
        The wishes that the arbiter and its policies go by.
    gang
        GPUs each job needs at once, on one node unless it may span.
    sizes
        Of an elastic job: the numbers of GPUs it accepts, rising, `gang` first and each a multiple of it, such as
        1, 2, 4. It changes from one to another by leaving with a checkpoint and starting again.
    gpus_max
        The most GPUs a job can use where it accepts all multiples of its gang (0: just the gang). For the simulator's
        workloads; `submit` offers `sizes` only.
    steps_total
        Mini-batches of one whole training; 0 lets the script say. Halving and Hyperband need it.
    step_serial_s
        Time of one mini-batch on one GPU, a guess used until it was measured; 0: unknown.
    restart_s
        The cost of one checkpoint and restart, a guess used until it was measured; a job grows, or moves closer
        together, only for a gain of more than twice that.
    level_max
        The loosest locality of one job's GPUs; one that does not span lies on one node, so levels beyond ``machine``
        mean one node, too.
    metric, mode
        The metric that trials report, and whether more (``max``) or less (``min``) of it is better.
    search
        Which trials go on: ``halving``, ``hyperband`` (halving from several starts), ``curve`` (those whose learning
        curves may still win; with a `target`, also for one job), ``all`` (each to its end).
    phase_steps
        Of halving: mini-batches each trial of a phase makes in that phase; empty divides `steps_total` 1 : 2 : 4 ...
    phase_growth
        Of halving: a job of a phase can use so many times the GPUs of one of the phase before, beginning with one gang,
        up to the most; 1: the most in every phase.
    eta
        Of Hyperband: of `eta` trials one goes on to the next rung, which lasts `eta` times as long.
    steps_min
        Of Hyperband: mini-batches after which a trial can be judged at the earliest; 0: so early that there are as
        many brackets as the trials can fill.
    target
        Of ``curve``: the first trial to report this metric, or a better one, is the answer.
    max_restarts
        How often one job is started again after failing; preemptions do not count. None: `RESTARTS` times, and not
        when it seems that it cannot start at all.
    pty
        The program has a terminal, to which its owner comes by ``attach``. Such an app has one job, on one node.
    idle_s
        Of such an app: it ends once nothing was typed or shown for so long, and no GPU of it worked; 0: as its node
        says.
    time_limit_s
        How long one job may have its GPUs, in all its attempts; 0: there is no limit. Beyond that it fails.
    """

    trials: Annotated[tuple[Command, ...], Meta(min_length=1, max_length=1024)]
    cwd: Folder
    checkpoint_root: Folder
    tenant: str = ""
    name: Annotated[str, Meta(max_length=128)] = ""
    env: dict[Variable, Word] = {}
    secrets: dict[Variable, Folder] = {}
    requirements: Requirements = Requirements()
    gang: Positive = 1
    sizes: Annotated[tuple[Positive, ...], Meta(max_length=SIZES_MAX)] = ()
    gpus_max: Annotated[int, Meta(ge=0, le=2**16)] = 0
    steps_total: Count = 0
    step_serial_s: Seconds = 0.0
    restart_s: Seconds = 10.0
    level_max: Level = "cluster"
    max_restarts: Count | None = None
    time_limit_s: Seconds = 0.0
    pty: bool = False
    idle_s: Seconds = 0.0
    array: Annotated[tuple[Annotated[int, Meta(ge=0, le=INDEX_MAX)], ...], Meta(max_length=JOBS_MAX)] = ()
    array_at_most: Annotated[int, Meta(ge=0, le=JOBS_MAX)] = 0
    after: Annotated[tuple[Dependency, ...], Meta(max_length=AFTER_MAX)] = ()
    metric: str = ""
    mode: Literal["max", "min"] = "max"
    search: SearchName = "halving"
    phase_steps: tuple[Positive, ...] = ()
    phase_growth: Annotated[int, Meta(ge=1, le=1024)] = 1
    eta: Annotated[int, Meta(ge=2, le=1024)] = ETA
    steps_min: Count = 0
    target: float | None = None

    @property
    def spans(self) -> bool:
        """Whether a job's GPUs may lie on several nodes."""
        return self.requirements.spans

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers in the ids of its jobs: the indices of an array, else 0, 1, ... in the order of its trials."""
        return self.array or range(len(self.trials))

    @property
    def at_once(self) -> int:
        """How many of its jobs may run at a time."""
        if not self.array:
            return len(self.trials)
        return min(len(self.array), self.array_at_most or AT_ONCE_MAX)

    def command_of(self, job: int) -> tuple[str, ...]:
        """Return the command of the job at that place among its jobs."""
        return self.trials[0 if self.array else job]

    @property
    def job_demand_max(self) -> int:
        """The most GPUs one job can use."""
        return self.sizes[-1] if self.sizes else self.gang * (max(self.gang, self.gpus_max) // self.gang)

    def demand_in(self, phase: int) -> int:
        """Return the most GPUs that one job can use in that phase of its search, the first being 0.

        Source: Themis, workload 2: Hyperband's n jobs of one GPU, then n/2 of up to two, at last one of up to n.
        """
        if self.phase_growth == 1:
            return self.job_demand_max
        most = min(self.gang * int(self.phase_growth**phase), self.job_demand_max)
        return max(size for size in self.accepted if size <= most)

    @property
    def demand_max(self) -> int:
        """The most GPUs that it can use at a time, all its jobs together. Source: Themis, Eq. 2: app_demand_max."""
        if self.phase_growth == 1:
            return self.job_demand_max * self.at_once
        phases = range(phases_of(len(self.trials)))
        return max(-(-len(self.trials) // (1 << phase)) * self.demand_in(phase) for phase in phases)

    @property
    def accepted(self) -> tuple[int, ...]:
        """The numbers of GPUs one job can run on, rising."""
        return self.sizes or tuple(range(self.gang, self.job_demand_max + 1, self.gang))

    @property
    def elastic(self) -> bool:
        """Whether a job can run on more GPUs than its gang."""
        return self.job_demand_max > self.gang


def as_held(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a spec with `after` and `array` as `AppSpec` holds them, where they are written as text.

    Raises
    ------
    ValueError
        With a sentence that names the field and the mend.
    """
    held = dict(fields)
    after = held.get("after")
    if isinstance(after, str):
        after = after.split(",")
    if isinstance(after, list | tuple):
        held["after"] = tuple(_read("after", Dependency.of, each) if isinstance(each, str) else each for each in after)
    if isinstance(held.get("array"), str):
        held["array"], at_most = _read("array", array_of, held["array"])
        if at_most:
            held["array_at_most"] = at_most
    return held


def _read(field: str, read: Callable[[str], Any], text: str) -> Any:
    try:
        return read(text.strip())
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a spec as `AppSpec` holds them; here those of its requirements stand among the others."""
    wishes = {name: value for name, value in fields.items() if name in Requirements.__struct_fields__}
    return {name: value for name, value in fields.items() if name not in wishes} | {"requirements": wishes}


def wishing(spec: AppSpec, **changes: Any) -> AppSpec:
    """Return `spec` with these fields of its requirements changed."""
    return replace(spec, requirements=replace(spec.requirements, **changes))


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

    Without an r_min, as many as the trials can fill, and at least two: with one alone no trials are compared.
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
    relative = next((name for name, file in spec.secrets.items() if not file.startswith("/")), None)
    if relative is not None:
        return (
            f"secrets.{relative} is {spec.secrets[relative]!r}, which is no absolute path; give one that starts with /"
        )
    if twice := sorted(spec.env.keys() & spec.secrets.keys()):
        return f"{twice[0]} is in env and in secrets; leave one out"
    if not TENANT.fullmatch(spec.tenant):
        return f"tenant is {spec.tenant!r}; use lower-case letters, digits and dashes, such as team-a"
    other = _array_mistake(spec) or _terminal_mistake(spec) or _sizes_mistake(spec) or _options_mistake(spec)
    return other or (_search_mistake(spec) if len(spec.trials) > 1 else None)


def _array_mistake(spec: AppSpec) -> str | None:
    """Say why this is no array, or which field goes with arrays only."""
    if spec.array_at_most and not spec.array:
        return f"array_at_most is {spec.array_at_most}, but there is no array; leave it out, or give array"
    if not spec.array:
        return None
    if list(spec.array) != sorted(set(spec.array)):
        return f"array is {', '.join(map(str, spec.array[:10]))}; list each index once, the smallest first"
    if len(spec.trials) > 1:
        return f"both array and {len(spec.trials)} trials are given; an array has one command, so leave one of them out"
    if spec.metric or spec.target is not None:
        return "metric and target are for searches, and all jobs of an array run to their ends; leave them out"
    return None


def _terminal_mistake(spec: AppSpec) -> str | None:
    """Say why this app cannot have a terminal, or which field goes with terminals only."""
    if spec.idle_s and not spec.pty:
        return f"idle_s is {spec.idle_s:g}, but the program has no terminal; leave it out, or give pty"
    if spec.pty and (spec.array or len(spec.trials) > 1 or spec.spans):
        return "an app with a terminal (pty) has one job on one node; leave out pty, or array, trials and spans"
    return None


def _sizes_mistake(spec: AppSpec) -> str | None:
    """Say why these are no sizes that a job can run on."""
    if spec.gpus_max and spec.gpus_max < spec.gang:
        return f"gpus_max is {spec.gpus_max}, fewer than the gang of {spec.gang}; raise gpus_max or lower gang"
    if spec.phase_growth > 1 and not spec.elastic:
        return (
            f"phase_growth is {spec.phase_growth}, but a job runs on {spec.gang} GPUs only; give sizes, such as 1,2,4, "
            "or leave phase_growth out"
        )
    if not spec.sizes:
        return None
    told = ",".join(map(str, spec.sizes))
    if spec.gpus_max:
        return f"both sizes ({told}) and gpus_max ({spec.gpus_max}) are given; leave gpus_max out"
    if list(spec.sizes) != sorted(set(spec.sizes)):
        return f"sizes are {told}; list each number of GPUs once, the smallest first, such as 1,2,4"
    if spec.sizes[0] != spec.gang:
        return f"sizes are {told}, but gang is {spec.gang}; make gang the smallest of them, {spec.sizes[0]}"
    odd = next((size for size in spec.sizes if size % spec.gang), None)
    if odd is not None:
        return f"sizes are {told}, but {odd} is no multiple of {spec.gang}; GPUs are granted in multiples of the first"
    return None


def _options_mistake(spec: AppSpec) -> str | None:
    """Say which field is of a search that is not asked for, or lacks the metric it needs."""
    of_one_search = {
        "phase_steps": (bool(spec.phase_steps), "halving"),
        "phase_growth": (spec.phase_growth != 1, "halving"),
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
    """Say which field a search of several trials lacks."""
    if spec.search == "all":
        return None
    if not spec.metric:
        return f"{len(spec.trials)} trials but no metric to compare them by; name what scripts report: --metric NAME"
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
