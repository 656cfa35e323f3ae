"""Auctions of schema `themis-auction-1` with their optima: the value of an app straight from the schema's words, an
oracle that tries every way to share a few GPUs, and the set of larger auctions whose optima are proven.
"""

from __future__ import annotations

import gzip
import math
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.auctions.instances import App, Instance

#: Made by `python -m benchmarks.auctions.prove`: one JSON object of `Proven` per line.
PROVEN = Path(__file__).parents[1] / "data" / "auctions" / "proven.jsonl.gz"

Counts = Mapping[str, int]  #: machine to number of GPUs
Allocation = Mapping[str, Counts]  #: app to its new GPUs


class Proven(Struct, frozen=True):
    """An auction with its optima, sums of log V: of all apps, and `without` each app that of the others.

    `proofs` names what agreed on them: "naive", "patterns" and "core" are the programs of `benchmarks.auctions.milp`,
    "oracle" is `best` below.
    """

    name: str
    instance: Instance
    optimum: float
    without: dict[str, float]
    proofs: tuple[str, ...]


def proven() -> list[Proven]:
    """Return the set of proven auctions."""
    decoder = msgspec.json.Decoder(Proven)
    return [decoder.decode(line) for line in gzip.decompress(PROVEN.read_bytes()).splitlines()]


def log_v(instance: Instance, app: App, new: Counts) -> float:
    """Return log V of `app` with `new` GPUs beside what it holds, at the locality where they all really lie."""
    rack_of = {machine["id"]: machine["rack"] for machine in instance["machines"]}
    union = {name for counts in (app["held"], new) for name, count in counts.items() if count}
    count = sum(app["held"].values()) + sum(new.values())
    whole = app["gang"] * (min(count, app["demand_max"]) // app["gang"])
    slowdown = app["slowdown"]
    if whole == 0:
        return math.log(app["t_id"]) - math.log(
            app["elapsed"] + instance["lease"] + app["work_left"] * slowdown["machine"]
        )
    if len(union) == 1:
        times = slowdown["machine"]
    elif len({rack_of[name] for name in union}) == 1:
        times = slowdown["rack"]
    else:
        times = slowdown["cross"]
    return math.log(app["t_id"]) - math.log(app["elapsed"] + app["work_left"] * times / whole)


def sum_log_v(instance: Instance, allocation: Allocation, skip: str | None = None) -> float:
    """Return the sum of log V of all apps but `skip`; an app without an entry gets nothing."""
    return math.fsum(
        log_v(instance, app, allocation.get(app["id"], {})) for app in instance["apps"] if app["id"] != skip
    )


def infeasible(instance: Instance, allocation: Allocation) -> list[str]:
    """Return what is wrong with `allocation`: unknown names, counts below 1, more GPUs than a machine has free."""
    free = {machine["id"]: machine["free"] for machine in instance["machines"]}
    apps = {app["id"] for app in instance["apps"]}
    wrong = [f"{app} does not bid" for app in allocation if app not in apps]
    used = dict.fromkeys(free, 0)
    for app, counts in allocation.items():
        for name, count in counts.items():
            if name not in free or count < 1:
                wrong.append(f"{app} gets {count} GPUs of {name}")
            else:
                used[name] += count
    return wrong + [f"{used[name]} of {free[name]} GPUs of {name}" for name in free if used[name] > free[name]]


def best(instance: Instance, skip: str | None = None) -> float:
    """Return the greatest sum of log V, app `skip` left out, over all ways to deal the free GPUs.

    Every vector of counts per machine for every app: fit for about 6 GPUs and 3 apps.
    """
    names = [machine["id"] for machine in instance["machines"]]
    free = tuple(machine["free"] for machine in instance["machines"])
    totals = {free: 0.0}  # by what is left free, the best of the apps so far
    for app in instance["apps"]:
        if app["id"] == skip:
            continue
        values = {
            counts: log_v(instance, app, dict(zip(names, counts, strict=True)))
            for counts in product(*(range(count + 1) for count in free))
        }
        after: dict[tuple[int, ...], float] = {}
        for left, total in totals.items():
            for counts in _within(left):
                rest = tuple(a - b for a, b in zip(left, counts, strict=True))
                after[rest] = max(after.get(rest, -math.inf), total + values[counts])
        totals = after
    return max(totals.values())


def _within(left: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return product(*(range(count + 1) for count in left))
