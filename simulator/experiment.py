"""One run of the simulator as a value: from the words of the command line, or from a sweep to another process.

Text in, a `Run` out; every mistake in the text is one sentence, `ExperimentError`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints
from urllib.parse import parse_qsl

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from arbiter.config import FIELDS, check_settings, renamed
from arbiter.core.registry import POLICIES, RENAMED
from arbiter.core.state.gpu_time import TenantTerms
from arbiter.core.state.model import ArbiterSettings
from protocol.config import ConfigError, in_words
from simulator import fluid
from simulator.cluster import Cluster, ClusterError, parse_cluster
from simulator.costs import Costs, CostsError, parse_costs
from simulator.figures.results import Run
from simulator.profiles import ProfileError, Profiles, built_in, crude, measured
from simulator.workload import Workload, WorkloadError, fitgpp, fitgpp_workload, load, themis_workload
from simulator.workload.themis import NSDI, OURS

Progress = Callable[[int, int], None]  #: told (jobs that are over, all jobs)
Knowledge = Literal["estimated", "exact"]

#: A trace that starts so is drawn after Themis's figures, not read.
FORMS = {form.trace: form for form in (OURS, NSDI)}
#: The keys that may follow: ``themis:1?apps=20&contention=2``.
GENERATOR_KEYS: Mapping[str, type] = {
    "apps": int,
    "cluster_gpus": int,
    "contention": float,
    "network_share": float,
    "scale": float,
    "search": str,
    "growth": int,
    "tenants": int,
    "curve_points": int,
}
#: A workload drawn after FitGpp's: ``fitgpp?jobs=1024&interactive=0.3``.
FITGPP = fitgpp.NAME
FITGPP_KEYS: Mapping[str, type] = {"jobs": int, "interactive": float, "load": float, "grace": float}
#: Apps of a drawn workload, unless it says.
APPS = 40
#: The most names in a sentence; the rest are counted.
NAMED = 5
#: Fields that have a flag of their own.
_APART = {"policy", "seed", "tenants"}
#: Fields that a world without lost messages does not use (`simulator.world.quiet`).
UNUSED = ("beat_s", "node_timeout_s", "app_timeout_s")
#: The beginning of the name of a policy's setting: ``policy.las.threshold_gpu_s``.
OF_POLICY = "policy."


StructT = TypeVar("StructT", bound=Struct)


class ExperimentError(ValueError):
    """The run cannot be made: one sentence that names the mistake and the mend."""


class Experiment(Struct, frozen=True):
    """One run. `first` takes only so many jobs of the trace (0: all), `knobs` are settings by name, as text.

    `profiles` give the slowdown of jobs whose GPUs lie apart: ``built-in``, ``crude``, or a folder of tables.
    `tenants` is a file of the tenants' shares; without one all are equal. `knowledge` says whether apps estimate their
    work, as they do live, or know it exactly (`foreknowledge`).
    """

    trace: str
    cluster: str
    policy: str
    overheads: str = "default"
    profiles: str = "built-in"
    seed: int = 0
    first: int = 0
    knobs: tuple[tuple[str, str], ...] = ()
    tenants: str = ""
    knowledge: Knowledge = "estimated"


def execute(experiment: Experiment, progress: Progress | None = None) -> Run:
    """Return the run.

    Raises
    ------
    ExperimentError
        Before anything runs, if it cannot be made.
    """
    settings = settings_of(experiment)
    workload, cluster, costs, profiles = inputs_of(experiment)
    workload = replace(workload, notes=(*workload.notes, *tenant_notes(experiment, settings, workload)))
    if experiment.policy == fluid.NAME:
        return replace(
            fluid.simulate(workload, cluster, seed=experiment.seed, progress=progress), given=given_of(experiment)
        )
    # Not at the top: error messages and the reference line do not need the world.
    from simulator.foreknowledge import host_of
    from simulator.run import simulate

    run = simulate(
        workload,
        cluster,
        policy=experiment.policy,
        settings=settings,
        costs=costs,
        profiles=profiles,
        seed=experiment.seed,
        progress=progress,
        host_of=host_of if experiment.knowledge == "exact" else None,
    )
    return replace(run, given=given_of(experiment))


def given_of(experiment: Experiment) -> dict[str, Any]:
    """Return the request in its own words: all but policy, settings and seed, which differ."""
    return {
        "trace": experiment.trace,
        "overheads": experiment.overheads,
        "profiles": experiment.profiles,
        "first": experiment.first,
        "tenants": experiment.tenants,
        "knowledge": experiment.knowledge,
    }


def probes(policy: str) -> bool:
    """Return whether that policy asks apps for bids, for which its solver must be compiled."""
    return policy in POLICIES and POLICIES[policy].kind.traits.probes


def prepare(experiments: Sequence[Experiment]) -> None:
    """Check runs that differ in policy, settings and seed only, before the first one begins.

    Raises
    ------
    ExperimentError
        For the first that cannot be made.
    """
    for experiment in experiments:
        settings_of(experiment)
    for experiment in experiments[:1]:
        inputs_of(experiment)


def inputs_of(experiment: Experiment) -> tuple[Workload, Cluster, Costs, Profiles]:
    """Return the workload, the cluster, the costs and the profiles; raises `ExperimentError`."""
    try:
        cluster = parse_cluster(experiment.cluster)
        costs = parse_costs(experiment.overheads)
        profiles = profiles_of(experiment.profiles)
        workload = workload_of(experiment.trace, cluster, seed=experiment.seed, first=experiment.first)
    except (ClusterError, CostsError, ProfileError, WorkloadError) as error:
        raise ExperimentError(str(error)) from None
    return workload, cluster, costs, profiles


def profiles_of(text: str) -> Profiles:
    """Return the profiles of that name, or those measured in the tables of a folder; raises `ProfileError`."""
    named = {"built-in": built_in, "crude": crude}
    return named[text]() if text in named else measured(text)


# --- the trace --------------------------------------------------------------------------------------------------------


def workload_of(trace: str, cluster: Cluster, *, seed: int = 0, first: int = 0) -> Workload:
    """Return the workload in the file `trace`, or the one drawn as ``themis:KIND?key=value&...`` says (see `FORMS`).

    A drawn one follows from `seed`; `cluster_gpus` is that of `cluster`, or of the one that it is a part of, if not
    given.

    Raises
    ------
    ExperimentError, WorkloadError
        Naming the mistake in it.
    """
    if trace.startswith(FITGPP):
        return beginning(_fitgpp(trace, cluster, seed), first)
    name, colon, words = trace.partition(":")
    drawn = f"{name}{colon}"
    if drawn not in FORMS:
        return load(trace, first=first or None)
    kind, _, query = words.partition("?")
    if kind not in ("1", "2"):
        raise ExperimentError(f"the trace {trace!r} asks for workload {kind!r}; write {drawn}1 or {drawn}2")
    given = generator_arguments(trace, query)
    defaults = {"form": FORMS[drawn], "apps": APPS, "cluster_gpus": cluster.whole_gpus or cluster.gpus}
    arguments: dict[str, Any] = {**defaults, **given, "kind": int(kind), "seed": seed}
    whole = themis_workload(**arguments)
    return beginning(replace(whole, name=trace), first)


def _fitgpp(trace: str, cluster: Cluster, seed: int) -> Workload:
    """Return the workload drawn as ``fitgpp?key=value&...`` says."""
    name, _, query = trace.partition("?")
    if name != FITGPP:
        raise ExperimentError(f"the trace {trace!r} is not known; write {FITGPP} or {FITGPP}?jobs=1024")
    given = generator_arguments(trace, query, FITGPP_KEYS)
    return replace(fitgpp_workload(cluster, seed=seed, **given), name=trace)


def generator_arguments(trace: str, query: str, keys: Mapping[str, type] = GENERATOR_KEYS) -> dict[str, Any]:
    """Return the arguments that follow the question mark of `trace`."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise ExperimentError(f"the trace {trace!r} has no key=value after its question mark; {_how(keys)}") from None
    given: dict[str, Any] = {}
    for key, text in pairs:
        if key not in keys:
            raise ExperimentError(f"the trace {trace!r} has {key!r}, which no generator knows; {_how(keys)}")
        if key in given:
            raise ExperimentError(f"the trace {trace!r} has {key} twice; give it once")
        try:
            given[key] = keys[key](text)
        except ValueError:
            raise ExperimentError(f"the trace {trace!r} has {key}={text}, which is no number; {_how(keys)}") from None
    return given


def _how(keys: Mapping[str, type]) -> str:
    example = f"{OURS.trace}1?apps=20&contention=2" if keys is GENERATOR_KEYS else f"{FITGPP}?jobs=1024&interactive=0.3"
    return f"write {example}, with any of {', '.join(keys)}"


def beginning(workload: Workload, first: int) -> Workload:
    """Return the first apps to come, as many as hold `first` jobs, and at least one; all for 0."""
    jobs, apps = 0, 0
    for app in workload.apps if first else ():
        if apps and jobs + len(app.jobs) > first:
            break
        jobs, apps = jobs + len(app.jobs), apps + 1
    return replace(workload, apps=workload.apps[:apps]) if first else workload


# --- the settings -----------------------------------------------------------------------------------------------------


def policy_names() -> list[str]:
    """Return the values of `--policy`: the arbiter's own policies and the reference line."""
    return [*POLICIES, fluid.NAME]


def knob_names() -> list[str]:
    """Return the names that `Experiment.knobs` may set: fields of the arbiter's settings and of its policies'."""
    return [
        *(name for name in FIELDS if name not in {*_APART, *UNUSED}),
        *(f"{OF_POLICY}{name}.{field}" for name, each in POLICIES.items() for field in each.settings.__struct_fields__),
    ]


def settings_of(experiment: Experiment) -> ArbiterSettings:
    """Return the arbiter's settings for this run.

    Raises
    ------
    ExperimentError
        Naming the policy or the setting that cannot be.
    """
    if experiment.policy not in policy_names():
        raise ExperimentError(
            f"the policy {experiment.policy!r} is not known; choose one of {', '.join(sorted(policy_names()))}"
        )
    settings = ArbiterSettings(seed=experiment.seed, tenants=tenants_of(experiment.tenants))
    if experiment.policy in POLICIES:
        settings = replace(settings, policy=experiment.policy)
    if experiment.overheads == "none":
        settings = replace(settings, round_pause_s=0.0)  # a pause is an overhead, too
    for name, text in experiment.knobs:
        settings = with_knob(settings, name, text)
    try:
        check_settings(settings, "the settings")
    except ConfigError as error:
        raise ExperimentError(str(error)) from None
    return settings


def tenants_of(file: str) -> tuple[TenantTerms, ...]:
    """Return the tenants' terms, from a CSV with the columns ``tenant`` and ``share``; without a file none.

    Raises
    ------
    ExperimentError
        Naming the file, the line and the mend.
    """
    if not file:
        return ()
    try:
        table = csv.DictReader(Path(file).read_text(encoding="utf-8").splitlines())
        columns, rows = list(table.fieldnames or ()), list(table)
    except (OSError, UnicodeDecodeError):
        raise ExperimentError(f"the tenants {file!r} cannot be read; give a CSV with tenant and share") from None
    if columns and not {"tenant", "share"} <= set(columns):
        raise ExperimentError(f"{file} line 1: the columns are {', '.join(columns)}; name them tenant and share")
    terms = []
    for number, row in enumerate(rows, start=2):
        fields = {"name": row.get("tenant"), "weight": row.get("share")}
        try:
            terms.append(msgspec.convert(fields, TenantTerms, strict=False))
        except msgspec.ValidationError as error:
            field, _, wrong = in_words(error).partition(" ")
            column = {"name": "tenant", "weight": "share"}.get(field, field)
            raise ExperimentError(f"{file} line {number}: {column} {wrong}; give tenant and share") from None
        if terms[-1].name in {each.name for each in terms[:-1]}:
            raise ExperimentError(f"{file} line {number} names {terms[-1].name} again; give each tenant one line")
    if not terms:
        raise ExperimentError(f"{file} names no tenant; give lines of tenant and share")
    return tuple(terms)


def tenant_notes(experiment: Experiment, settings: ArbiterSettings, workload: Workload) -> tuple[str, ...]:
    """Return a sentence about tenants that the file names and the trace does not, which may be misspelt; else nothing.

    It also names the tenants of the trace that the file does not: one of them is probably meant.
    """
    named = [str(each.name) for each in settings.tenants]
    present = {app.tenant for app in workload.apps}
    absent = [name for name in named if name not in present]
    if not absent:
        return ()
    within = f" within --first {experiment.first}" if experiment.first else ""
    others = sorted(present - set(named))
    return (
        f"{experiment.tenants} names {_few(absent)}, of whom the trace has no job{within}{_unnamed(others, settings)}",
    )


def _unnamed(tenants: Sequence[str], settings: ArbiterSettings) -> str:
    """Return the end of a sentence about tenants that no file names."""
    if not tenants:
        return ""
    one = len(tenants) == 1
    if settings.tenants_only:
        become = f", and by tenants_only {'its' if one else 'their'} jobs are refused"
    else:
        become = f" and {'has' if one else 'have'} weight 1"
    return f"; {_few(tenants)} {'is' if one else 'are'} not named{become}"


def _few(names: Sequence[str]) -> str:
    """Return names as a sentence lists them, the first few of many."""
    shown = [*names[:NAMED], f"{len(names) - NAMED} more"] if len(names) > NAMED else names
    return " and ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))


def with_knob(settings: ArbiterSettings, name: str, text: str) -> ArbiterSettings:
    """Return `settings` with one of them changed, the arbiter's own or a policy's.

    Raises
    ------
    ExperimentError
        If there is no such setting, or it cannot have this value.
    """
    if name in UNUSED:
        raise ExperimentError(
            f"{name} has no effect here: no message is lost and no process dies, so no message is repeated or timed "
            "out; leave it out"
        )
    if name not in (known := knob_names()):
        policy = name.removeprefix(OF_POLICY).rpartition(".")[0] if name.startswith(OF_POLICY) else ""
        near = [each for each in known if policy and each.startswith(f"{OF_POLICY}{policy}.")]
        others = f"choose one of {', '.join(near or known)}"
        mend = renamed(name).replace("arbiter.", "") if name in RENAMED else others
        raise ExperimentError(f"there is no setting {name!r}; {mend}")
    if not name.startswith(OF_POLICY):
        return _with_field(settings, name, name, text)
    policy, _, field = name.removeprefix(OF_POLICY).rpartition(".")
    found = POLICIES[policy].decoded(settings.policies.get(policy, {}))
    table = msgspec.to_builtins(_with_field(found, field, name, text))
    return replace(settings, policies={**settings.policies, policy: table})


def _with_field(target: StructT, field: str, name: str, text: str) -> StructT:
    """Return `target` with one field read from text; `name` is its name for users."""
    choices = get_args(get_type_hints(type(target))[field])
    if all(isinstance(choice, str) for choice in choices) and choices and text not in choices:
        raise ExperimentError(f"{name} is {text!r}; choose one of {', '.join(choices)}")
    fields = {**msgspec.structs.asdict(target), field: text}
    try:
        return msgspec.convert(fields, type(target), strict=False)
    except msgspec.ValidationError as error:
        said = in_words(error)
        if said.startswith(f"{field} is "):  # its own check
            raise ExperimentError(f"{name}{said.removeprefix(field)}") from None
        must = said.removeprefix(field).partition(", and is")[0]
        raise ExperimentError(f"{name} is {text!r}; it{must}") from None
