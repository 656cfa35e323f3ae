"""The goals of the suite, each judged from the checks of its section: met, missed, or why it could not run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Told = Mapping[str, Any]
#: `rehearsed`: on the CPU every check was made and none that counts there failed, which says nothing of a GPU.
Verdict = Literal["met", "missed", "could not run", "rehearsed"]


@dataclass(frozen=True)
class Goal:
    """A promise that checks of one section decide. The names of those checks begin with `checks`; all must be there."""

    name: str
    section: str
    checks: tuple[str, ...]


GOALS = (
    Goal("memory: total = reserved + free + used", "env", ("reserved, free and used memory add up to the total",)),
    Goal("parking: SHA-256 equal", "park", ("parking is exact to the bit",)),
    Goal("parking: 0.7 of pinned copies, warm", "park", ("parking reaches 0.7 of the bus",)),
    Goal("parking: residue of at most 2 %", "park", ("next to nothing of the tensors stays on the GPU",)),
    Goal(
        "parking: context (MiB) within a node agent's allowance",
        "park",
        ("a parked process keeps less of the GPU than a node agent allows for",),
    ),
    Goal(
        "driver's checkpoint: SHA-256 equal",
        "driver",
        (
            "the driver suspends and resumes a training between mini-batches",
            "the driver suspends and resumes a training amid mini-batches",
            "the driver's checkpoint is exact to the bit",
        ),
    ),
    Goal("driver's checkpoint: GB/s", "driver", ("the speed of the driver's checkpoint is known",)),
    Goal("driver's checkpoint: verdict as root", "driver", ("root can use the driver's checkpoint",)),
    Goal(
        "driver's checkpoint: verdict as the service's user",
        "driver",
        ("the service's user can use the driver's checkpoint",),
    ),
    Goal("CUDA graph: parking refuses", "graph", ("parking refuses while a CUDA graph is alive",)),
    Goal(
        "CUDA graph: the driver takes over",
        "graph",
        ("the driver suspends and resumes a process with a CUDA graph", "a graph that the driver has moved replays"),
    ),
    Goal("mini-batch time: counter within 3 %", "estimator", ("the allocator's counter tells",)),
    Goal("mini-batch time: GPM within 5 %", "estimator", ("GPM tells",)),
    Goal("packed against turns", "pack", ("trainings that wait half the time gain by being packed, against turns",)),
    Goal("packed against MPS", "pack", ("trainings gain at least as much under MPS as packed without it",)),
    Goal(
        "DDP of one process, 1 B parameters: sliced without deadlock",
        "ddp",
        (
            "both jobs finish: timeslice",
            "both end with the weights of runs alone: timeslice",
            "both gave way to each other",
        ),
    ),
    Goal("a script without steps: suspended at the trough", "trough", ("a script that reads its loss after the",)),
    Goal("a script without steps: mini-batch time within 3 %", "trough", ("the time of its mini-batches is known",)),
    Goal(
        "demo: two jobs sliced, SHA-256 equal",
        "demo",
        (
            "both jobs finish: timeslice",
            "both end with the weights of runs alone: timeslice",
            "both gave way to each other",
        ),
    ),
    Goal(
        "demo: two jobs packed, SHA-256 equal",
        "demo",
        ("both jobs finish: pack", "both end with the weights of runs alone: pack"),
    ),
)


def judged(sections: Mapping[str, Told]) -> list[dict[str, Any]]:
    """Return each goal with its verdict, why it is so, and where and how its section was measured."""
    return [{**asdict(goal), **_judged(goal, sections.get(goal.section))} for goal in GOALS]


def _judged(goal: Goal, told: Told | None) -> dict[str, Any]:
    if told is None:
        return {"verdict": "could not run", "why": f"the section {goal.section} was not run yet"}
    host = told.get("host", {})
    origin = {"date": told.get("date"), "gpus": host.get("gpus"), "driver": host.get("driver")}
    verdict, why = _verdict(goal, told)
    return {"verdict": verdict, "why": why, **origin, "command": told.get("command")}


def _verdict(goal: Goal, told: Told) -> tuple[Verdict, str]:
    found = [check for check in told["checks"] if check["name"].startswith(goal.checks)]
    failed = [check["name"] for check in found if check["judged"] and not check["ok"]]
    if failed:
        return "missed", "; ".join(failed)
    if untried := [f"{check['name']}: {check['untried']}" for check in found if check.get("untried")]:
        return "could not run", "; ".join(untried)
    if absent := list(_absent(goal, found)):
        return "could not run", told.get("reason") or f"{told['status']}, without: {'; '.join(absent)}"
    if told["device"] == "cpu":
        return "rehearsed", ""
    return "met", ""


def _absent(goal: Goal, found: list[Told]) -> Iterator[str]:
    """Yield the beginnings of names that no check has."""
    for prefix in goal.checks:
        if not any(check["name"].startswith(prefix) for check in found):
            yield prefix


def lines(goals: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a line for each goal, for people."""
    for goal in goals:
        yield f"  {goal['verdict']}: {goal['name']}" + (f" ({goal['why']})" if goal["why"] else "")
