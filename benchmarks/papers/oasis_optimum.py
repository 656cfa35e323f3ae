"""The exact offline optimum of small instances, as a mixed-integer linear programme.

It knows all jobs beforehand. For each job and each slot in which it could end there is one binary variable, worth its
utility for that end; workers and parameter servers by slot and server are integers. (2) becomes "the work is done by
the end chosen", which serves as well as (8), since utilities do not grow.

*Source:* OASiS (INFOCOM 2018), programme (1) to (8), as repaired in PAPERS.md section 5.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from arbiter.core.policies.oasis.milp import Programme
from arbiter.core.policies.oasis.utility import Sigmoid

Floats = NDArray[np.float64]


class OfflineJob(Struct, frozen=True):
    """One job; `work` is E N M (tau + 2e/b) in slots of one worker, `workers_max` is N, `per_worker` is b / B."""

    arrival: int
    work: float
    workers_max: int
    demand: tuple[float, ...]
    sigmoid: Sigmoid
    server_demand: tuple[float, ...] = ()
    per_worker: float = 0.0


class Optimum(Struct, frozen=True):
    """The greatest total utility there is, at most `bound`; equal if `proven`. `ends` are those of jobs, None: not."""

    utility: float
    bound: float
    proven: bool
    ends: tuple[int | None, ...]


def optimum(
    jobs: Sequence[OfflineJob],
    *,
    slots: int,
    capacity: Floats,
    server_capacity: Floats | None = None,
    limit_s: float = 60.0,
) -> Optimum:
    """Return the offline optimum; `capacity` is (servers, resources). Not proven if `limit_s` ran out."""
    programme = Programme()
    ends = [_add_job(programme, job, slots, capacity, server_capacity) for job in jobs]
    _add_capacity(programme, [each[1] for each in ends], [job.demand for job in jobs], capacity)
    if server_capacity is not None:
        _add_capacity(programme, [each[2] for each in ends], [job.server_demand for job in jobs], server_capacity)
    found = programme.solve(limit_s=limit_s)
    if found.values is None:
        return Optimum(0.0, found.bound, proven=False, ends=(None,) * len(jobs))
    values = found.values
    chosen = tuple(next((end for end, column in each[0].items() if values[column] > 0.5), None) for each in ends)
    value = programme.value(values)
    return Optimum(value, max(found.bound, value), found.proven(value), chosen)


Columns = dict[tuple[int, int], int]  #: by slot and server


def _add_job(
    programme: Programme, job: OfflineJob, slots: int, capacity: Floats, server_capacity: Floats | None
) -> tuple[dict[int, int], Columns, Columns]:
    horizon = range(job.arrival, slots)
    # The delay is counted to the end of the last slot, as in `schedule`.
    ends = {end: programme.column(float(job.sigmoid.at(float(end + 1 - job.arrival))), 1.0) for end in horizon}
    programme.at_most(1.0, dict.fromkeys(ends.values(), 1.0))
    workers = {
        (slot, server): programme.column(0.0, float(_fit(job.demand, capacity[server], job.workers_max)))
        for slot in horizon
        for server in range(len(capacity))
    }
    servers: Columns = {}
    if server_capacity is not None and job.server_demand:
        servers = {
            (slot, server): programme.column(
                0.0, float(_fit(job.server_demand, server_capacity[server], job.workers_max))
            )
            for slot in horizon
            for server in range(len(server_capacity))
        }
    for end in horizon:
        # (2): if it is to end by `end`, the workers until then do all of its work.
        row = {column: -1.0 for (slot, _), column in workers.items() if slot <= end}
        row |= {column: job.work for other, column in ends.items() if other <= end}
        programme.at_most(0.0, row)
    for slot in horizon:
        here = {column: 1.0 for (at, _), column in workers.items() if at == slot}
        # (3), and no worker after its end.
        open_ = {column: -float(job.workers_max) for end, column in ends.items() if end >= slot}
        programme.at_most(0.0, here | open_)
        if servers:
            served = {column: 1.0 for (at, _), column in servers.items() if at == slot}
            programme.at_most(0.0, dict.fromkeys(here, job.per_worker) | dict.fromkeys(served, -1.0))  # (6)
            programme.at_most(0.0, served | dict.fromkeys(here, -1.0))  # (7)
    return ends, workers, servers


def _fit(demand: Sequence[float], capacity: Floats, most: int) -> int:
    able = [int(have / need + 1e-9) for need, have in zip(demand, capacity, strict=True) if need > 0]
    return min([most, *able])


def _add_capacity(
    programme: Programme, columns: Sequence[Columns], demands: Sequence[Sequence[float]], capacity: Floats
) -> None:
    """Add (4) or (5): no server gives more than it has, in any slot."""
    rows: dict[tuple[int, int, int], dict[int, float]] = {}
    for each, demand in zip(columns, demands, strict=True):
        for (slot, server), column in each.items():
            for kind, amount in enumerate(demand):
                if amount > 0:
                    rows.setdefault((slot, server, kind), {})[column] = amount
    for (_, server, kind), row in sorted(rows.items()):
        programme.at_most(float(capacity[server, kind]), row)
