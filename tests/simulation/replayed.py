"""One simulation, printed as JSON without what is measured: for a test that compares fresh interpreters."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from arbiter.core.state.model import ArbiterSettings
from simulator.cluster import parse_cluster
from simulator.costs import DEFAULT
from simulator.figures.results import MEASURED, document
from simulator.profiles import built_in
from simulator.run import simulate
from simulator.workload import AppPlan, JobPlan, Workload

if __name__ == "__main__":
    apps = tuple(
        AppPlan(f"j{number}", "team", 40.0 * number, 1 + number % 3, 4, (JobPlan(900.0 + 77 * number, 1000),))
        for number in range(16)
    )
    settings = ArbiterSettings(lease_s=300.0)
    result = simulate(
        Workload("replayed", apps),
        parse_cluster("2x4"),
        policy="themis",
        settings=settings,
        costs=DEFAULT,
        profiles=built_in(),
        seed=3,
    )
    told = document(result)
    for name in MEASURED:
        told["summary"].pop(name, None)
    json.dump(told, sys.stdout, sort_keys=True)
