"""The time that apps say they have left, against the truth: ``python benchmarks/tails.py [--quick] [--json]``.

Apps of Themis's workloads come one after another, each with the whole cluster to itself and without any cost, so that
nothing but its own forecast can be wrong. Of each app the report at every tenth of its life is taken: the seconds left
that it told, and those that it had. The forecast by the measured spread of jobs' times (`app_agent.core.spread`) stands
beside the one of Eq. 2, in which the median job's time is taken for all jobs of phases to come. Samples are sorted by
what was told, and cut into ten parts of one size: a forecast that is right has a truth of once what it tells in each,
with half of the samples above.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from msgspec import Struct
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script, the repository is not on the path

from app_agent.core import app as app_facts
from arbiter.core.state.model import ArbiterSettings
from protocol.core import Send
from protocol.messages import AppReport
from simulator import run as run_
from simulator.cluster import parse_cluster
from simulator.costs import NONE
from simulator.profiles import built_in
from simulator.run import Simulation
from simulator.workload import AppPlan, Workload, themis_workload
from simulator.workload.themis import Kind
from simulator.world import SimApp, World, quiet

Forecast = Literal["spread", "median"]
CLUSTER = "themis-64"
DECILES = 10
#: Progress is told every so many seconds, as it is live; worlds without beats tell it at a job's end only.
BEAT_S = 30.0
KINDS: tuple[Kind, ...] = (1, 2)


class _TalkingWorld(World):
    """A world whose jobs tell their steps now and then while they train, as real ones do."""

    def __init__(self, *inputs: Any, **options: Any) -> None:
        super().__init__(*inputs, **options | {"talks": True, "beat_s": BEAT_S})
        self.call_later(BEAT_S, self._progress)

    def _progress(self) -> None:
        for node in self.nodes.values():
            for worker in node.workers.values():
                worker._speak()
        self.call_later(BEAT_S, self._progress)


class Sample(Struct, frozen=True):
    """One report: seconds left as told, and as they were."""

    told_s: float
    true_s: float


class _Listening(Simulation):
    """A simulation that notes what each app tells of its time left, as (time, seconds)."""

    def __init__(self, *inputs: Any) -> None:
        super().__init__(*inputs)
        self.told: dict[str, list[tuple[float, float]]] = {}

    def _submit(self, plan: AppPlan) -> None:
        super()._submit(plan)
        (sim_app,) = (each for each in self.world.apps.values() if each.name == plan.id)
        self._listen(sim_app)

    def _listen(self, sim_app: SimApp) -> None:
        host, told = sim_app.actor.core, self.told.setdefault(sim_app.name, [])
        handle = host.handle

        def listening(event: Any, now: float) -> Sequence[Any]:
            effects: Sequence[Any] = handle(event, now)
            reports = (each.message for each in effects if type(each) is Send and isinstance(each.message, AppReport))
            told.extend((now, report.left_s) for report in reports if report.left_s is not None)
            return effects

        host.handle = listening


def samples_of(kind: Kind, seed: int, *, apps: int, scale: float, forecast: Forecast) -> list[Sample]:
    """Return the samples of one drawn workload, whose apps come one after another."""
    cluster = parse_cluster(CLUSTER)
    drawn = themis_workload(kind=kind, apps=apps, cluster_gpus=cluster.gpus, seed=seed, scale=scale, curve_points=20)
    begins = [0.0, *accumulate(_longest_s(app, cluster.gpus) for app in drawn.apps)]
    workload = Workload(
        drawn.name, tuple(replace(app, submit_s=at) for app, at in zip(drawn.apps, begins, strict=False)), seed=seed
    )
    settings = replace(quiet(ArbiterSettings()), policy="fifo", seed=seed, beat_s=BEAT_S)
    of_eq_2 = patch.object(app_facts, "deviation", lambda own, others: 0.0)  # noqa: ARG005
    with patch.object(run_, "World", _TalkingWorld), of_eq_2 if forecast == "median" else nullcontext():
        simulation = _Listening(workload, cluster, settings, NONE, built_in())
        run = simulation.run()
    found = []
    for row in run.apps:
        if row.jct_s is not None and row.first_start_s is not None:
            told = [each for each in simulation.told[row.app] if each[0] >= row.first_start_s]
            found += _thinned(told, row.first_start_s, row.submit_s + row.jct_s)
    return found


def _longest_s(app: AppPlan, gpus: int) -> float:
    """Return a time within which an app is done that is alone on so many GPUs."""
    lengths_s = [job.duration_s for job in app.jobs]
    return 3 * max(lengths_s) + 2 * sum(lengths_s) * app.gpus / gpus


def _thinned(told: Sequence[tuple[float, float]], begin_s: float, end_s: float) -> list[Sample]:
    """Return the first report in each tenth of the app's life."""
    found, life_s = [], end_s - begin_s
    for tenth in range(DECILES):
        low, high = begin_s + life_s * tenth / DECILES, begin_s + life_s * (tenth + 1) / DECILES
        first = next((each for each in told if low <= each[0] < high), None)
        if first is not None and first[1] > 0.0:
            found.append(Sample(first[1], end_s - first[0]))
    return found


def figures_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return how a forecast did: truth over told by decile of told, and over all samples."""
    ordered = sorted(samples, key=lambda each: each.told_s)
    parts = [ordered[len(ordered) * k // DECILES : len(ordered) * (k + 1) // DECILES] for k in range(DECILES)]
    ratios = [each.true_s / each.told_s for each in samples]
    return {
        "samples": len(samples),
        "true_over_told_median": statistics.median(ratios),
        "true_above_told_share": sum(ratio > 1.0 for ratio in ratios) / len(ratios),
        "log_error_mean": statistics.fmean(abs(math.log(ratio)) for ratio in ratios),
        "greatest_true_over_told": max(ratios),
        "deciles": [
            {
                "told_s": statistics.fmean(each.told_s for each in part),
                "true_s": statistics.fmean(each.true_s for each in part),
                "true_over_told_median": statistics.median(each.true_s / each.told_s for each in part),
            }
            for part in parts
            if part
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one seed and small apps: a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    options = parser.parse_args()
    seeds, apps, scale = ((3,), 8, 0.1) if options.quick else ((3, 4, 5, 6, 7), 20, 0.2)
    cases = []
    for kind in KINDS:
        for forecast in ("spread", "median"):
            samples = [
                sample for seed in seeds for sample in samples_of(kind, seed, apps=apps, scale=scale, forecast=forecast)
            ]
            cases.append({"workload": kind, "forecast": forecast, **figures_of(samples)})
            if not options.json:
                _show(cases[-1])
    if options.json:
        inputs = {"seeds": seeds, "apps": apps, "scale": scale, "cluster": CLUSTER}
        print(json.dumps({"schema": "bench-tails/v1", "inputs": inputs, "cases": cases}))
    return 0


def _show(case: dict[str, Any]) -> None:
    print(
        f"workload {case['workload']}, {case['forecast']}: {case['samples']} samples, "
        f"truth {case['true_over_told_median']:.2f} times what was told (median), "
        f"above it in {case['true_above_told_share']:.0%}, "
        f"mean error of the logarithm {case['log_error_mean']:.3f}, at most {case['greatest_true_over_told']:.2f} times"
    )
    for decile in case["deciles"]:
        print(
            f"  told {decile['told_s']:8.0f} s  true {decile['true_s']:8.0f} s  {decile['true_over_told_median']:.2f}"
        )


if __name__ == "__main__":
    raise SystemExit(main())
