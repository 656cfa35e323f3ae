"""`simulate`, `compare`, `sweep`: the course of a trace, before a change to a real site."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from arbiter.core.seam import DEFAULT_POLICY
from launch import completion
from launch.faults import Fault, usage
from launch.spec import seconds
from launch.surface import answering, emit, note, number, plural, say, table, wants_json
from launch.verbs import auction
from protocol import exit_codes

# Not at the top, here and below: the world and its libraries take longer to import than most commands to run.
if TYPE_CHECKING:
    from simulator.experiment import Experiment, Knowledge
    from simulator.figures.results import Figures, Run

#: Seconds before the progress is shown.
PATIENCE_S = 2.0
#: Seconds between two lines of progress without a terminal.
LINE_EVERY_S = 30.0
SEE = "see docs/simulator.md"
HOUR_S = 3600.0
SEEDS_MAX = 10_000

Trace = Annotated[str, typer.Argument(metavar="TRACE", help="a file, or drawn: themis:1?apps=20&contention=2")]
ClusterOption = Annotated[
    str, typer.Option("--cluster", metavar="SPEC", help="NODESxGPUS, a TOML file, or a shipped one such as themis-64")
]
Overheads = Annotated[str, typer.Option(metavar="none|default|FILE", help="times of starting, saving, moving")]
ProfilesOption = Annotated[
    str, typer.Option("--profiles", metavar="built-in|crude|FOLDER", help="slowdown of models by placement")
]
KnowledgeOption = Annotated[
    str,
    typer.Option("--knowledge", metavar="estimated|exact", help="what apps know of their work beforehand"),
]
Lease = Annotated[str | None, typer.Option(help="length of a lease (600s)")]
RoundPause = Annotated[str | None, typer.Option(help="least time between rounds (0.5s; 0s without overheads)")]
Knob = Annotated[float | None, typer.Option("--fairness-knob", help="f: the (1 - f) part of the apps bids (0.8)")]
Sharing = Annotated[
    str | None,
    typer.Option(
        metavar="exclusive|timeslice|pack", autocompletion=completion.sharing, help="how jobs share a GPU (exclusive)"
    ),
]
Seats = Annotated[int | None, typer.Option(help="the most jobs on one GPU, where GPUs are shared (4)")]
Quantum = Annotated[str | None, typer.Option(help="how long a turn on a shared GPU lasts at least (60s)")]
Seed = Annotated[int, typer.Option(min=0, max=2**63 - 1, help="of drawn traces, ties and lots")]
MinDuration = Annotated[str, typer.Option(help="rho figures with a cut leave out apps shorter than this")]
First = Annotated[int, typer.Option(min=0, metavar="N", help="only the first N jobs of the trace (0: all)")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="any other setting; repeatable")
]
SetMany = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=V1,V2,...", help="a setting and its values; repeatable")
]
Policies = Annotated[str, typer.Option(metavar="A,B,C|all", autocompletion=completion.policies, help="which policies")]
Tenants = Annotated[Path | None, typer.Option(metavar="FILE", help="a CSV of each tenant and its share")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]

#: Settings with a flag of their own.
FLAGGED = ("lease_s", "round_pause_s", "sharing", "seats", "quantum_s")

#: Of one run, for people: heading, name in the summary, digits.
SHOWN = (
    ("avg wait for the first GPUs [s]", "avg_wait_s", 1),
    ("max wait for the first GPUs [s]", "max_wait_s", 1),
    ("avg time to 1 % of the work [s]", "avg_first_percent_s", 1),
    ("p50 time to 1 % of the work [s]", "p50_first_percent_s", 1),
    ("avg JCT [s]", "avg_jct_s", 1),
    ("p50 JCT [s]", "p50_jct_s", 1),
    ("p99 JCT [s]", "p99_jct_s", 1),
    ("makespan [s]", "makespan_s", 1),
    ("max rho", "max_rho", 3),
    ("mean rho", "mean_rho", 3),
    ("p50 rho", "p50_rho", 3),
    ("p90 rho", "p90_rho", 3),
    ("share of apps with rho > 1", "share_rho_over_1", 3),
    ("max rho, cut", "max_rho_cut", 3),
    ("mean rho, cut", "mean_rho_cut", 3),
    ("max uniform rho", "max_rho_uniform", 3),
    ("max uniform rho, cut", "max_rho_uniform_cut", 3),
    ("Jain index of 1/rho", "jain_index", 3),
    ("share of apps with LTGF < 0.95", "share_ltgf_unfair", 3),
    ("share of tenants' intervals with LTGF < 1", "share_intervals_below_1", 3),
    ("GPU seconds useful", "gpu_seconds_useful", 1),
    ("GPU seconds wasted", "gpu_seconds_wasted", 1),
    ("utilisation", "utilisation", 3),
    ("preemptions", "preemptions", 0),
    ("migrations", "migrations", 0),
    ("suspensions", "suspensions", 0),
    ("trained beside another [s]", "packed_s", 0),
    ("mean placement score", "mean_placement", 3),
    ("rounds", "rounds", 0),
    ("CPU [s]", "cpu_s", 2),
    ("jobs per CPU second", "jobs_per_cpu_s", 0),
)
#: Side by side there is room for fewer.
COMPARED = (
    ("DONE", "jobs_out", 0),
    ("AVG JCT", "avg_jct_s", 1),
    ("P50", "p50_jct_s", 1),
    ("P99", "p99_jct_s", 1),
    ("MAKESPAN", "makespan_s", 1),
    ("MAX RHO", "max_rho", 3),
    ("CUT", "max_rho_cut", 3),
    ("MEAN RHO", "mean_rho", 3),
    ("LTGF<.95", "share_ltgf_unfair", 3),
    ("TENANTS<1", "share_intervals_below_1", 3),
    ("WASTED", "gpu_seconds_wasted", 0),
    ("UTIL", "utilisation", 3),
    ("PREEMPT", "preemptions", 0),
    ("PLACED", "mean_placement", 3),
    ("CPU", "cpu_s", 2),
)
#: Of many runs, each with its interval.
SWEPT = (
    ("AVG JCT", "avg_jct_s", 1),
    ("P99 JCT", "p99_jct_s", 1),
    ("MAX RHO", "max_rho", 3),
    ("MAX RHO CUT", "max_rho_cut", 3),
    ("USEFUL GPU S", "gpu_seconds_useful", 0),
    ("WASTED GPU S", "gpu_seconds_wasted", 0),
)


def add(app: typer.Typer) -> None:
    """Add this group's verbs to `app`."""
    app.command()(simulate)
    app.command()(compare)
    app.command()(sweep)


def simulate(
    trace: Trace,
    cluster: ClusterOption,
    policy: Annotated[
        str, typer.Option(autocompletion=completion.policy, help="which policy decides")
    ] = DEFAULT_POLICY,
    overheads: Overheads = "default",
    profiles: ProfilesOption = "built-in",
    knowledge: KnowledgeOption = "estimated",
    lease: Lease = None,
    round_pause: RoundPause = None,
    fairness_knob: Knob = None,
    sharing: Sharing = None,
    seats: Seats = None,
    quantum: Quantum = None,
    set_: SetOption = None,
    seed: Seed = 0,
    min_duration: MinDuration = "60s",
    first: First = 0,
    tenants: Tenants = None,
    out: Annotated[Path | None, typer.Option(help="folder for jobs.csv, apps.csv, summary.json")] = None,
    json: Json = False,
) -> None:
    """Run a trace through the scheduler itself, in virtual time: when jobs would end, and how fair it would be.

    The same seed gives the same figures, except CPU time and memory.
    """
    as_json = wants_json(json)
    with answering(as_json=as_json), _speaking():
        from simulator.experiment import Experiment, prepare
        from simulator.figures import results

        flags = _flags(lease, round_pause, fairness_knob, sharing, seats, quantum)
        knobs = _knobs(flags, set_)
        shortest_s = seconds(min_duration, "--min-duration")
        due = str(tenants or "")
        known = _knowledge(knowledge)
        experiment = Experiment(trace, cluster, policy, overheads, profiles, seed, first, knobs, due, known)
        prepare([experiment])
        if out is not None:
            _demand_folder(out, results.FILES)
        run = _execute(experiment, as_json=as_json)
        if out is not None:
            _write(out, lambda folder: results.write(run, folder, shortest_s))
        if as_json:
            emit(results.document(run, shortest_s))
        else:
            say(one_view(run, results.summary(run, shortest_s)))
            _notes(run.notes)
        _demand_ends([_unfinished(run)])


def compare(
    trace: Trace,
    cluster: ClusterOption,
    policies: Policies = "all",
    overheads: Overheads = "default",
    profiles: ProfilesOption = "built-in",
    knowledge: KnowledgeOption = "estimated",
    lease: Lease = None,
    round_pause: RoundPause = None,
    fairness_knob: Knob = None,
    sharing: Sharing = None,
    seats: Seats = None,
    quantum: Quantum = None,
    set_: SetOption = None,
    seed: Seed = 0,
    min_duration: MinDuration = "60s",
    first: First = 0,
    tenants: Tenants = None,
    html: Annotated[Path | None, typer.Option(help="write a report, one file that needs no network")] = None,
    json: Json = False,
) -> None:
    """Put policies side by side on one trace; fluid-fair-share, the reference line, is always among them."""
    as_json = wants_json(json)
    with answering(as_json=as_json), _speaking():
        from simulator import fluid
        from simulator.experiment import Experiment, prepare
        from simulator.figures import report, results

        knobs = _knobs(_flags(lease, round_pause, fairness_knob, sharing, seats, quantum), set_)
        shortest_s = seconds(min_duration, "--min-duration")
        names = [name for name in _policies(policies) if name != fluid.NAME]
        known = _knowledge(knowledge)
        experiments = [
            Experiment(trace, cluster, name, overheads, profiles, seed, first, knobs, str(tenants or ""), known)
            for name in (*names, fluid.NAME)
        ]
        prepare(experiments)
        if html is not None:
            _demand_folder(html.parent, (html.name,))
        runs = [_execute(experiment, as_json=as_json) for experiment in experiments]
        summaries = [results.summary(run, shortest_s) for run in runs]
        if html is not None:
            text = report.html(runs, shortest_s)
            _write(html, lambda file: file.write_text(text, encoding="utf-8"))
        if as_json:
            emit(comparison(runs, summaries))
        else:
            say(side_by_side(runs, summaries))
            _notes(sentence for run in runs for sentence in run.notes)
            _notes(sentence for run, each in zip(runs, summaries, strict=True) for sentence in _refusals(run, each))
        _demand_ends(map(_unfinished, runs))


def _refusals(run: Run, summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence about the refused jobs of a run, if there are any."""
    if summary["jobs_refused"]:
        names = summary["jobs_refused_names"]
        more = ", ..." if summary["jobs_refused"] > len(names) else ""
        yield (
            f"{run.policy}: {summary['jobs_refused']} of {plural(summary['jobs_in'], 'job')} refused "
            f"({', '.join(names)}{more}); its figures are of the others"
        )


def sweep(
    trace: Trace,
    cluster: ClusterOption,
    policies: Policies = DEFAULT_POLICY,
    sharing: Annotated[
        str | None,
        typer.Option(metavar="MODE,...", autocompletion=completion.some_sharing, help="exclusive, timeslice, pack"),
    ] = None,
    seats: Annotated[str | None, typer.Option(metavar="N,...", help="the most jobs on one shared GPU")] = None,
    quantum: Annotated[str | None, typer.Option(metavar="TIME,...", help="least length of a turn on one")] = None,
    set_: SetMany = None,
    seeds: Annotated[str, typer.Option(metavar="0-7|0,3,5", help="each combination runs once with each")] = "0",
    overheads: Overheads = "default",
    profiles: ProfilesOption = "built-in",
    knowledge: KnowledgeOption = "estimated",
    min_duration: MinDuration = "60s",
    first: First = 0,
    tenants: Tenants = None,
    jobs: Annotated[int, typer.Option(min=0, help="processes on this host (0: one per core)")] = 0,
    dask: Annotated[str, typer.Option(metavar="URL", help="run on the cluster of this Dask scheduler instead")] = "",
    json: Json = False,
) -> None:
    """Run every policy with every combination of settings and every seed; mean and 95 % interval over the seeds."""
    as_json = wants_json(json)
    with answering(as_json=as_json), _speaking():
        from simulator import sweep as sweeping
        from simulator.experiment import Experiment, prepare, probes

        shortest_s = seconds(min_duration, "--min-duration")
        known = _knowledge(knowledge)
        base = Experiment(trace, cluster, "", overheads, profiles, 0, first, (), str(tenants or ""), known)
        words = [*_lists(sharing, seats, quantum), *(set_ or ())]
        experiments = sweeping.grid(base, _policies(policies), _many(words), _seeds(seeds))
        prepare(experiments)
        if any(probes(experiment.policy) for experiment in experiments):
            auction.prepare()
        with _progress("sweep", "run", as_json=as_json) as progress:
            rows = sweeping.sweep(
                experiments, min_duration_s=shortest_s, processes=jobs or -1, dask=dask, progress=progress
            )
        groups = sweeping.groups(rows)
        inputs = sweeping.inputs(experiments, rows, shortest_s)
        if as_json:
            emit({"schema": "sweep/v1", "inputs": inputs, "rows": rows, "groups": groups})
        else:
            say(swept(groups))
            _notes(inputs["notes"])
        _demand_ends((row["policy"], row["seed"], row["summary"]["jobs_unfinished"]) for row in rows)


def _knowledge(text: str) -> Knowledge:
    """Return what apps are to know; raises `Fault` for any other word."""
    match text:
        case "estimated" | "exact":
            return text
        case _:
            raise usage(f"--knowledge is {text!r}, which is neither estimated nor exact", SEE)


@contextmanager
def _speaking() -> Iterator[None]:
    """Turn a mistake in the words of a command into a fault."""
    from simulator.experiment import ExperimentError

    try:
        yield
    except ExperimentError as error:
        raise usage(str(error), SEE) from None


def _execute(experiment: Experiment, *, as_json: bool) -> Run:
    """Run it, and show its progress."""
    from simulator.experiment import execute, probes

    if probes(experiment.policy):
        auction.prepare()
    with _progress(experiment.policy, "job", as_json=as_json) as progress:
        return execute(experiment, progress)


def _write(path: Path, how: Callable[[Path], Any]) -> None:
    try:
        how(path)
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> Fault:
    return Fault(f"{path} cannot be written: {error.strerror}", next_step="give a place you may write to")


def _demand_folder(folder: Path, names: Sequence[str]) -> None:
    """Make `folder`; fail unless files of these names can be written there: no long run should end in vain."""
    path = folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in (folder / name for name in names):
            new = not path.exists()
            path.open("ab").close()
            if new:
                path.unlink()
    except OSError as error:
        raise _unwritable(path, error) from None


def _notes(sentences: Iterable[str]) -> None:
    """Print each assumption, once."""
    for sentence in dict.fromkeys(sentences):
        note(sentence)


def _demand_ends(runs: Iterable[tuple[str, int, int]]) -> None:
    """Fail if jobs that could have run never came to an end: (policy, seed, count) of each run."""
    for policy, seed, count in runs:
        if count:
            raise Fault(
                f"{plural(count, 'job')} never ended under {policy}; repeat with --seed {seed}",
                code=exit_codes.FAILED,
                next_step="simulate --out FOLDER writes a row for each; this is a bug of the policy or the simulator",
            )


def _unfinished(run: Run) -> tuple[str, int, int]:
    """Return the policy, the seed and the unfinished jobs of a run, for `_demand_ends`."""
    return run.policy, run.seed, sum(job.state == "unfinished" for job in run.jobs)


# --- words of the command line ----------------------------------------------------------------------------------------


def _knobs(flags: Iterable[tuple[str, str]], words: Sequence[str] | None) -> tuple[tuple[str, str], ...]:
    """Return all settings that one run is given, each once."""
    from arbiter.core.registry import FAIRNESS_KNOB

    knobs = (*flags, *_single(words))
    for place, (name, _) in enumerate(knobs):
        if name in dict(knobs[:place]):
            own = f"--{name.removesuffix('_s').replace('_', '-')}" if name in FLAGGED else "--set"
            own = "--fairness-knob" if name == FAIRNESS_KNOB else own
            raise usage(f"{name} is set twice", f"give it once, by {own}")
    return knobs


def _flags(
    lease: str | None,
    round_pause: str | None,
    fairness_knob: float | None,
    sharing: str | None,
    seats: int | None,
    quantum: str | None,
) -> Iterator[tuple[str, str]]:
    """Yield the settings that have flags of their own."""
    if lease is not None:
        yield "lease_s", str(seconds(lease, "--lease"))
    if round_pause is not None:
        yield "round_pause_s", str(seconds(round_pause, "--round-pause"))
    if fairness_knob is not None:
        from arbiter.core.registry import FAIRNESS_KNOB

        yield FAIRNESS_KNOB, str(fairness_knob)
    if sharing is not None:
        yield "sharing", sharing
    if seats is not None:
        yield "seats", str(seats)
    if quantum is not None:
        yield "quantum_s", str(seconds(quantum, "--quantum"))


def _single(words: Sequence[str] | None) -> Iterator[tuple[str, str]]:
    """Yield the settings of ``--set NAME=VALUE``."""
    for word in words or ():
        name, equals, value = word.partition("=")
        if not (name and equals and value):
            raise usage(f"--set is {word!r}", "write NAME=VALUE, such as probe_s=1")
        yield name, value


def _lists(sharing: str | None, seats: str | None, quantum: str | None) -> Iterator[str]:
    """Yield the settings of the flags of `sweep`, in the words of ``--set``."""
    if sharing is not None:
        yield f"sharing={sharing}"
    if seats is not None:
        yield f"seats={seats}"
    if quantum is not None:
        yield f"quantum_s={','.join(str(seconds(each, '--quantum')) for each in quantum.split(','))}"


def _many(words: Sequence[str] | None) -> Mapping[str, tuple[str, ...]]:
    """Return the settings of ``--set NAME=V1,V2``."""
    found: dict[str, tuple[str, ...]] = {}
    for name, values in _single(words):
        if name in found:
            raise usage(f"--set {name} is there twice", "write all its values once, with commas between them")
        found[name] = tuple(dict.fromkeys(value.strip() for value in values.split(",") if value.strip()))
        if not found[name]:
            raise usage(f"--set {name}={values} has no values", "write NAME=V1,V2, such as lease_s=300,600")
    return found


def _policies(text: str) -> list[str]:
    """Return the policies of ``a,b,c``, or all."""
    from simulator.experiment import policy_names

    if text == "all":
        return policy_names()
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise usage("--policies names none", f"write some of {','.join(policy_names())}, or all")
    return names


def _seeds(text: str) -> list[int]:
    """Return the seeds of ``0-7`` or ``0,3,5``, or both mixed."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,18})(?:-(\d{1,18}))?\s*", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < first + SEEDS_MAX:
            raise usage(f"--seeds is {text!r}", "write 0-7, or 0,3,5")
        found += range(first, last + 1)
    return list(dict.fromkeys(found))


# --- answers for people -----------------------------------------------------------------------------------------------


def one_view(run: Run, summary: Figures) -> str:
    """Return one run as two columns, and its tenants."""
    from simulator.figures import results

    out = f"{summary['jobs_in']} in, {summary['jobs_out']} out"
    for state in ("refused", "unfinished", "failed", "stopped"):
        if summary[f"jobs_{state}"]:
            out += f", {summary[f'jobs_{state}']} {state}"
    rows = [
        ("trace", run.name),
        ("cluster", f"{run.cluster}, {run.cluster_gpus} GPUs"),
        ("policy", run.policy),
        ("seed", str(run.seed)),
        ("jobs", out),
        *((heading, number(summary[name], digits)) for heading, name, digits in SHOWN),
    ]
    if summary["jobs_refused"]:
        names = summary["jobs_refused_names"]
        more = summary["jobs_refused"] - len(names)
        rows.append(("refused", ", ".join(names) + (f" and {more} more" if more else "")))
    rows.append(("cut", f"{summary['min_duration_s']:g} s leave out {plural(summary['apps_cut'], 'app')}"))
    tenants = [
        (
            row["tenant"],
            str(row["jobs"]),
            number(row["gpu_seconds_useful"] / HOUR_S, 1),
            number(row["gpu_seconds_wasted"] / HOUR_S, 1),
            number(row["share"], 3),
            number(row["avg_jct_s"], 1),
            number(row["max_rho"], 3),
        )
        for row in results.tenants(run)
    ]
    headers = ("TENANT", "JOBS", "USEFUL GPU-H", "WASTED GPU-H", "SHARE", "AVG JCT", "MAX RHO")
    return "\n".join([*_two_columns(rows), "", table(headers, tenants), "", _gangs(run)])


def _gangs(run: Run) -> str:
    """Return one line per class of gangs: how long they waited."""
    from simulator.figures import results

    rows = [
        (
            results.gang_span(row),
            str(row["apps"]),
            str(row["apps_started"]),
            *(number(row[name], 1) for name in ("avg_wait_s", "max_wait_s", "avg_jct_s")),
            number(row["max_rho"], 3),
        )
        for row in results.gangs(run)
    ]
    return table(("GANG", "APPS", "STARTED", "AVG WAIT", "MAX WAIT", "AVG JCT", "MAX RHO"), rows)


def _two_columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]


def side_by_side(runs: Sequence[Run], summaries: Sequence[Figures]) -> str:
    """Return one line per policy."""
    rows = [
        (run.policy, *(number(summary[name], digits) for _, name, digits in COMPARED))
        for run, summary in zip(runs, summaries, strict=True)
    ]
    first = runs[0]
    head = (
        f"{first.name} on {first.cluster}, {plural(first.cluster_gpus, 'GPU')}, seed {first.seed}; times in seconds; "
        f"CUT leaves out apps shorter than {summaries[0]['min_duration_s']:g} s"
    )
    figures = table(("POLICY", *(heading for heading, _, _ in COMPARED)), rows)
    return f"{head}\n\n{figures}\n\nlongest wait for the first GPUs, by gang\n\n{_longest_waits(runs)}"


def _longest_waits(runs: Sequence[Run]) -> str:
    """Return one line per policy with a column per class of gangs, in seconds; in brackets: apps that never started."""
    from simulator.figures import results

    found = [results.gangs(run) for run in runs]
    lines = [
        (run.policy, *(number(row["max_wait_s"], 0) + results.apps_never_started(row) for row in gangs))
        for run, gangs in zip(runs, found, strict=True)
    ]
    return table(("POLICY", *(f"GANG {results.gang_span(row)}" for row in found[0])), lines)


def comparison(runs: Sequence[Run], summaries: Sequence[Figures]) -> Mapping[str, Any]:
    """Return policies side by side as a document; `simulate` has the rows of each."""
    from simulator.figures import results

    return {
        "schema": "comparison/v1",
        "runs": [
            {
                "policy": run.policy,
                "inputs": results.inputs(run),
                "summary": summary,
                "tenants": results.tenants(run),
                "gangs": results.gangs(run),
            }
            for run, summary in zip(runs, summaries, strict=True)
        ],
    }


def swept(groups: Sequence[Figures]) -> str:
    """Return one line per policy and settings."""
    knobs = list(dict.fromkeys(name for group in groups for name in group["settings"]))
    rows = [
        (
            group["policy"],
            *(group["settings"].get(name, "-") for name in knobs),
            _shortly(group["seeds"]),
            *(_interval(group["figures"].get(name), digits) for _, name, digits in SWEPT),
        )
        for group in groups
    ]
    return table(("POLICY", *(name.upper() for name in knobs), "SEEDS", *(heading for heading, _, _ in SWEPT)), rows)


def _shortly(seeds: Sequence[int]) -> str:
    """Return seeds as `_seeds` reads them, ascending: ``0-3,7``."""
    spans: list[list[int]] = []
    for seed in sorted(seeds):
        if spans and seed == spans[-1][1] + 1:
            spans[-1][1] = seed
        else:
            spans.append([seed, seed])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _interval(figure: Mapping[str, float | None] | None, digits: int) -> str:
    """Return ``mean`` or ``mean +- half``."""
    if figure is None or figure["mean"] is None:
        return "-"
    if figure["high"] is None:
        return number(figure["mean"], digits)
    return f"{number(figure['mean'], digits)} +- {number(figure['high'] - figure['mean'], digits)}"


# --- progress ---------------------------------------------------------------------------------------------------------


@contextmanager
def _progress(name: str, noun: str, *, as_json: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (done, all) that shows both on stderr once the run takes longer than `PATIENCE_S`."""
    if sys.stderr.isatty():
        with _bar(name) as told:
            yield told
    elif as_json:
        yield lambda done, whole: None  # noqa: ARG005 - the reader is a program
    else:
        yield _Lines(name, noun).told


@contextmanager
def _bar(name: str) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True, no_color=True), transient=True)
    began, task = time.monotonic(), None

    def told(done: int, whole: int) -> None:
        nonlocal task
        if task is None:
            if time.monotonic() - began < PATIENCE_S:
                return
            bar.start()
            task = bar.add_task(name, total=whole)
        bar.update(task, completed=done, total=whole)

    try:
        yield told
    finally:
        if task is not None:
            bar.stop()


class _Lines:
    """A line now and then, where no bar can be drawn."""

    def __init__(self, name: str, noun: str) -> None:
        self._name = name
        self._noun = noun
        self._next = time.monotonic() + LINE_EVERY_S

    def told(self, done: int, whole: int) -> None:
        """Write one if it is time."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_EVERY_S
            note(f"{self._name}: {done} of {plural(whole, self._noun)}")
