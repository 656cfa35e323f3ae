"""Processor time of short commands, where no daemon answers: ``python benchmarks/startup.py [--json]``.

Each command is run in turn with an interpreter that does nothing, and with one that first imports all modules of verbs,
as the command line once did; the medians of their processor times, of user and system, are in milliseconds. What a
daemon takes to answer is no part of it. Exit code 1: a goal is not met.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROUNDS = 15
VERB_GOAL_MS = 300.0
HELP_GOAL_MS = 150.0
#: Words, and the goal.
COMMANDS = (
    (("--help",), HELP_GOAL_MS),
    (("--version",), VERB_GOAL_MS),
    (("ps",), VERB_GOAL_MS),
    (("ps", "--state", "running", "ada-1"), VERB_GOAL_MS),
    (("explain", "last"), VERB_GOAL_MS),
    (("logs", "--tail", "20", "last"), VERB_GOAL_MS),
    (("nodes",), VERB_GOAL_MS),
    (("shares", "--by", "owner"), VERB_GOAL_MS),
    (("rounds", "--limit", "5"), VERB_GOAL_MS),
    (("events", "last", "--since", "2h"), VERB_GOAL_MS),
    (("cancel", "ada-1"), VERB_GOAL_MS),
    (("wait", "ada-1"), VERB_GOAL_MS),
    (("submit", "-g", "2", "--", "true"), VERB_GOAL_MS),
    (("submit", "--dry-run", "--", "true"), VERB_GOAL_MS),
    (("sbatch", "--wrap", "true"), VERB_GOAL_MS),
)
EAGER = """
import sys
from launch import cli, registry
from importlib import import_module
for module in registry.MODULES:
    import_module(f"launch.verbs.{module}")
sys.argv = ["gpu-arbiter", *sys.argv[1:]]
cli.main()
"""


def cpu_ms(command: Sequence[str], environment: dict[str, str]) -> float:
    before = os.times()
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return 1000.0 * spent


def measure(rounds: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"GPU_ARBITER_URL": f"unix://{folder}/control.sock", "PYTHONPATH": str(Path.cwd())}
        rows = []
        for words, goal_ms in COMMANDS:
            kinds = {
                "bare_ms": [sys.executable, "-c", "pass"],
                "cpu_ms": [sys.executable, "-m", "launch.cli", *words],
                "eager_ms": [sys.executable, "-c", EAGER, *words],
            }
            taken: dict[str, list[float]] = {kind: [] for kind in kinds}
            for _ in range(rounds):
                for kind, command in kinds.items():
                    taken[kind].append(cpu_ms(command, environment))
            medians = {kind: statistics.median(each) for kind, each in taken.items()}
            rows.append({"words": " ".join(words), "goal_ms": goal_ms, **medians, "met": medians["cpu_ms"] <= goal_ms})
    return {"schema": "startup/v1", "rounds": rounds, "commands": rows, "met": all(row["met"] for row in rows)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"runs of each command ({ROUNDS})")
    options = parser.parse_args()
    document = measure(options.rounds)
    if options.json:
        print(json.dumps(document))
    else:
        print(f"{'command':40} {'bare':>6} {'ours':>6} {'eager':>6} {'goal':>6}  ms of processor time")
        rows = document["commands"]
        assert isinstance(rows, list)
        for row in rows:
            figures = " ".join(f"{row[name]:6.0f}" for name in ("bare_ms", "cpu_ms", "eager_ms", "goal_ms"))
            print(f"{row['words']:40} {figures}  {'met' if row['met'] else 'NOT met'}")
    return 0 if document["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
