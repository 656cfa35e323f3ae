"""Make the set of auctions with proven optima that the tests use: ``python -m benchmarks.auctions.prove``.

Each auction and each of its leave-one-out problems is solved by three formulations (`benchmarks.auctions.milp`), small
ones also by trying everything; all must agree to 1e-7, and the allocation of the naive formulation must be worth what
it claims when it is placed and valued from the schema's words. The file is the same on every run.
"""

from __future__ import annotations

import argparse
import gzip
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.auctions import milp
from benchmarks.auctions.columns import Column, Table, placed, table_of
from benchmarks.auctions.families import FAMILIES, Cluster, degenerate, make, tied
from benchmarks.auctions.instances import Instance
from tests.support.exact_auctions import PROVEN, Proven, best, infeasible, sum_log_v

AGREE = 1e-7
#: The oracle tries everything in problems up to this many free GPUs and bidders.
ORACLE_GPUS, ORACLE_BIDDERS = 6, 3

TINY = (
    Cluster((1, 1), 2),
    Cluster((3,), 1),
    Cluster((2, 2), 1),
    Cluster((2, 1, 1), 2),
    Cluster((2, 2, 2), 2),
    Cluster((3, 2, 1), 2),
    Cluster((1,) * 6, 3),
    Cluster((4, 2), 2),
)
SMALL = (
    Cluster((4, 4), 2),
    Cluster((4, 2, 2, 1), 2),
    Cluster((8, 2, 2), 3),
    Cluster((4, 4, 4, 4), 2),
    Cluster((16, 8), 1),
    Cluster((8, 8, 4, 4), 2),
    Cluster((2,) * 12, 4),
    Cluster((1,) * 16, 4),
    Cluster((5, 4, 3, 3, 3), 3),
    Cluster((8, 4, 4, 4, 2, 2, 2, 2, 1, 1), 4),
)


def auctions() -> Iterator[tuple[str, Instance]]:
    """Yield the auctions of the set with their names."""
    yield from degenerate().items()
    families = list(FAMILIES)
    for seed, cluster in enumerate(TINY * 4):
        family, free = families[seed % len(families)], (1.0, 0.7, 1.0, 0.5)[seed // len(TINY)]
        yield f"tiny-{seed}", make(cluster, 1 + seed % 3, free, family, seed)
    for seed, cluster in enumerate(SMALL * 6):
        family, free = families[(seed // 2) % len(families)], (1.0, 0.5, 0.5, 1.0, 0.1, 0.5)[seed // len(SMALL)]
        yield f"small-{seed}", make(cluster, 2 + seed % 9, free, family, seed)
    for seed in range(40):
        yield f"tied-{seed}", tied(seed)
    for bidders in (5, 10, 20):
        for free in (1.0, 0.5, 0.1):
            for family in families:
                yield f"c64-{bidders}-{round(free * 100)}-{family}", make("c64", bidders, free, family, bidders)


def prove(name: str, instance: Instance) -> Proven:
    """Return `instance` with its optima; raises AssertionError where two proofs disagree."""
    table = table_of(instance)
    results = {"naive": milp.naive(table), "patterns": milp.patterns(table), "core": milp.core(table)}
    _check_placed(instance, table, results["naive"].root.columns)
    optima = [
        [sum_of(table, answer, skip) for skip, answer in zip((None, *result.skipped), answers_of(result), strict=True)]
        for result in results.values()
    ]
    proofs = tuple(results)
    if sum(table.free) <= ORACLE_GPUS and len(table.apps) <= ORACLE_BIDDERS:
        optima.append([best(instance, app) for app in (None, *table.apps)])
        proofs = (*proofs, "oracle")
    for found in zip(*optima, strict=True):
        assert max(found) - min(found) <= AGREE, f"{name}: {found}"
    optimum, *rest = (max(found) for found in zip(*optima, strict=True))
    return Proven(name, instance, optimum, dict(zip(table.apps, rest, strict=True)), proofs)


def answers_of(result: milp.Result) -> tuple[milp.Answer, ...]:
    """Return the answers to the root problem and to those without each app."""
    return (result.root, *result.without)


def sum_of(table: Table, answer: milp.Answer, skip: int | None) -> float:
    """Return an answer's sum of log V, app `skip` left out."""
    values = table.log_v(answer.columns)
    return math.fsum(value for app, value in enumerate(values) if app != skip)


def _check_placed(instance: Instance, table: Table, columns: tuple[Column, ...]) -> None:
    """Assert that the columns can be placed, and are worth then at least what they promised."""
    names = [machine["id"] for machine in instance["machines"]]
    allocation = {
        app: {names[machine]: count for machine, count in counts.items()}
        for app, counts in zip(table.apps, placed(table, columns), strict=True)
    }
    assert not infeasible(instance, allocation), infeasible(instance, allocation)
    difference = sum_log_v(instance, allocation) - math.fsum(table.log_v(columns))
    assert -1e-9 <= difference <= 1e-7, difference


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PROVEN, help="where to write (default: the tests' data)")
    parser.add_argument("--only", default="", help="only auctions whose name contains this; writes nothing")
    options = parser.parse_args()
    begun, lines = time.process_time(), []
    for name, instance in auctions():
        if options.only in name:
            found = prove(name, instance)
            lines.append(msgspec.json.encode(found))
            print(f"{time.process_time() - begun:7.1f} s  {name:40} {found.optimum:.9f}", file=sys.stderr)
    if not options.only:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_bytes(gzip.compress(b"\n".join(lines) + b"\n", mtime=0))
        print(f"{len(lines)} auctions, {options.out.stat().st_size} bytes: {options.out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
