"""Many runs: every policy with every combination of settings, over several seeds; on all cores, or on a Dask cluster.

Rows come back in the order of the grid, in whichever process they ran.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any

import msgspec
from msgspec.structs import replace

from simulator import fluid
from simulator.costs import parse_costs
from simulator.experiment import UNUSED, Experiment, ExperimentError, execute, given_of, settings_of
from simulator.figures.results import MIN_DURATION_S, Figures, mean, summary
from simulator.run import described

Progress = Callable[[int, int], None]  #: told (runs that are over, all runs)

#: Figures that are no outcome, and so have no mean.
_GIVEN = {"seed", "min_duration_s"}
#: Student's t at 97.5 % for 1 to 30 degrees of freedom.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def grid(
    base: Experiment, policies: Sequence[str], knobs: Mapping[str, Sequence[str]], seeds: Sequence[int]
) -> list[Experiment]:
    """Return the runs: policies, then settings as given, the last one varying fastest, then seeds.

    The reference line has no settings; it runs once per seed.
    """
    return [
        replace(base, policy=policy, knobs=(*base.knobs, *chosen), seed=seed)
        for policy in policies
        for chosen in (_combinations(knobs) if policy != fluid.NAME else [()])
        for seed in seeds
    ]


def _combinations(knobs: Mapping[str, Sequence[str]]) -> Iterator[tuple[tuple[str, str], ...]]:
    for values in product(*knobs.values()):
        yield tuple(zip(knobs, values, strict=True))


def sweep(
    experiments: Sequence[Experiment],
    *,
    min_duration_s: float = MIN_DURATION_S,
    processes: int = 1,
    dask: str = "",
    progress: Progress | None = None,
) -> list[Figures]:
    """Return one row per run, in order: its policy, its settings that were set, its seed, its summary and its notes.

    Parameters
    ----------
    experiments
        The runs, as of `grid`.
    min_duration_s
        For the rho figures with a cut (`results.summary`).
    processes
        Processes on this host; 1 runs them in this process, -1 on every core.
    dask
        The address of a Dask scheduler that shall run them instead.
    progress
        Called after every run.

    Raises
    ------
    ExperimentError
        If a run cannot be made, or the library for running them elsewhere is not there.
    """
    evaluate = partial(row_of, min_duration_s=min_duration_s)
    rows: list[Figures] = []
    for row in _run(evaluate, experiments, processes, dask):
        rows.append(row)
        if progress is not None:
            progress(len(rows), len(experiments))
    return rows


def row_of(experiment: Experiment, *, min_duration_s: float) -> Figures:
    """Run one experiment and return its row."""
    run = execute(experiment)
    return {
        "policy": experiment.policy,
        "settings": dict(experiment.knobs),
        "seed": experiment.seed,
        "summary": summary(run, min_duration_s),
        "notes": list(run.notes),
    }


def inputs(experiments: Sequence[Experiment], rows: Sequence[Figures], min_duration_s: float) -> Figures:
    """Return the inputs that all runs of one grid share: the request in words, costs, settings, and every note once.

    Settings that differ between the runs are left out; they stand in the rows.
    """
    first = next((run for run in experiments if run.policy != fluid.NAME), experiments[0])
    apart = {"policy", "seed", *UNUSED}.union(*(dict(run.knobs) for run in experiments))
    scheduled = first.policy != fluid.NAME  # the reference line has neither settings nor costs
    policies = sorted({run.policy for run in experiments} - {fluid.NAME})
    settings = described(settings_of(first), policies) if scheduled else {}
    return {
        **given_of(first),
        "cluster": first.cluster,
        "min_duration_s": min_duration_s,
        "settings": {name: value for name, value in settings.items() if name not in apart},
        "costs": msgspec.to_builtins(parse_costs(first.overheads)) if scheduled else {},
        "notes": list(dict.fromkeys(note for row in rows for note in row["notes"])),
    }


def _run(
    evaluate: Callable[[Experiment], Figures], experiments: Sequence[Experiment], processes: int, dask: str
) -> Iterator[Figures]:
    if dask:
        client: Any = _library("distributed", "--dask", otherwise="leave --dask out").Client(dask)
        with client:
            # Not pure: equal runs of other code must not come from the scheduler's memory.
            for future in client.map(evaluate, experiments, pure=False):
                yield future.result()
    elif processes == 1 or len(experiments) == 1:
        yield from map(evaluate, experiments)
    else:
        joblib = _library(
            "joblib", "more than one process", package="gpu-arbiter[sweep]", otherwise="sweep with --jobs 1"
        )
        tasks = (joblib.delayed(evaluate)(experiment) for experiment in experiments)
        yield from joblib.Parallel(n_jobs=processes, return_as="generator")(tasks)


def _library(name: str, wanted_by: str, *, otherwise: str, package: str = "") -> Any:
    """Import a library that is not always installed."""
    try:
        return import_module(name)
    except ImportError:
        raise ExperimentError(f"{wanted_by} needs {name}; pip install '{package or name}', or {otherwise}") from None


def groups(rows: Iterable[Figures]) -> list[Figures]:
    """Return for each policy and its settings the figures over all seeds, in the order of `rows`."""
    found: dict[tuple[Any, ...], list[Figures]] = {}
    for row in rows:
        found.setdefault((row["policy"], *row["settings"].items()), []).append(row)
    return [
        {
            "policy": members[0]["policy"],
            "settings": members[0]["settings"],
            "seeds": [member["seed"] for member in members],
            "figures": _over_seeds([member["summary"] for member in members]),
        }
        for members in found.values()
    ]


def _over_seeds(summaries: Sequence[Figures]) -> Figures:
    """Return mean and interval of every figure that is a number in all of them."""
    return {
        name: interval([summary[name] for summary in summaries])
        for name in summaries[0]
        if name not in _GIVEN and all(isinstance(summary[name], int | float) for summary in summaries)
    }


def interval(values: Sequence[float]) -> dict[str, float | None]:
    """Return the mean and its 95 % confidence interval by Student's t; one value has no interval."""
    middle = mean(values)
    assert middle is not None, "an interval of nothing"
    if len(values) == 1:
        return {"mean": middle, "low": None, "high": None}
    deviation = math.sqrt(math.fsum((value - middle) ** 2 for value in values) / (len(values) - 1))
    half = student_t(len(values) - 1) * deviation / math.sqrt(len(values))
    return {"mean": middle, "low": middle - half, "high": middle + half}


def student_t(freedom: int) -> float:
    """Return Student's t at 97.5 % for so many degrees of freedom, within 0.001."""
    # Beyond the table, the first terms of its expansion about the normal distribution's quantile z: z + (z^3 + z) / 4n.
    return _T[freedom - 1] if freedom <= len(_T) else 1.95996 + 2.3723 / freedom + 2.82 / freedom**2
