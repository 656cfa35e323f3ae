"""The auction for OR-Tools CP-SAT, in a process of its own: highspy and ortools cannot be loaded into one.

`solve` starts ``python -m benchmarks.auctions.cp_sat``, which reads a `Task` on standard input and answers a `Result`.
The program is the naive one over undominated columns (a Boolean per column, one column per app, nested capacities),
which helps CP-SAT; gains become whole numbers by a factor of 1e7, so its optimum is exact to 1e-7 per app at best. One
worker; the clock runs while models are built and solved, not while Python and OR-Tools load.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.auctions.columns import Column, Table, table_of, undominated
from benchmarks.auctions.instances import Instance

SCALE = 10**7


class Task(Struct, frozen=True):
    """Solve the auction for all apps and without each of `skips`, each problem at most `limit_s` seconds when given."""

    instance: Instance
    skips: tuple[int, ...]
    limit_s: float | None


class Answer(Struct, frozen=True):
    """One problem: the gain of the columns chosen, processor seconds, and whether the limit struck first."""

    value: float
    cpu_s: float
    late: bool


class Result(Struct, frozen=True):
    """The root problem, and those without each of the task's `skips`, in their order."""

    root: Answer
    without: tuple[Answer, ...]


def solve(instance: Instance, skips: Sequence[int], limit_s: float | None = None) -> Result:
    """Return what CP-SAT finds, in a process of its own; raises CalledProcessError when that fails."""
    task = msgspec.json.encode(Task(instance, tuple(skips), limit_s))
    command = [sys.executable, "-m", "benchmarks.auctions.cp_sat"]
    done = subprocess.run(command, input=task, stdout=subprocess.PIPE, check=True, cwd=Path(__file__).parents[2])
    return msgspec.json.decode(done.stdout, type=Result)


def work(task: Task) -> Result:
    """Do `task` here."""
    table = undominated(table_of(task.instance))
    answers = [_answer(table, skip, task.limit_s) for skip in (None, *task.skips)]
    return Result(answers[0], tuple(answers[1:]))


def _answer(table: Table, skip: int | None, limit_s: float | None) -> Answer:
    from ortools.sat.python import cp_model

    begun = time.process_time()
    columns = [column for column in table.columns if column.app != skip]
    model = cp_model.CpModel()
    taken = [model.new_bool_var("") for _ in columns]
    of_app: dict[int, list[int]] = defaultdict(list)
    below: dict[int, list[int]] = defaultdict(list)
    for variable, column in enumerate(columns):
        of_app[column.app].append(variable)
        for node in table.nodes_above(column.node):
            below[node].append(variable)
    for variables in of_app.values():
        model.add_at_most_one(taken[v] for v in variables)
    for node, capacity in enumerate(table.capacities()):
        model.add(sum(columns[v].count * taken[v] for v in below[node]) <= capacity)
    model.maximize(sum(round(column.gain * SCALE) * var for column, var in zip(columns, taken, strict=True)))
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    if limit_s is not None:
        solver.parameters.max_time_in_seconds = limit_s
    status = solver.solve(model)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    assert found or status == cp_model.UNKNOWN, solver.status_name(status)
    chosen: list[Column] = [c for c, var in zip(columns, taken, strict=True) if found and solver.boolean_value(var)]
    cpu_s = time.process_time() - begun
    return Answer(math.fsum(column.gain for column in chosen), cpu_s, status != cp_model.OPTIMAL)


def main() -> int:
    from ortools.sat.python import cp_model

    cp_model.CpSolver()
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)
    sys.stdout.buffer.write(msgspec.json.encode(work(task)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
