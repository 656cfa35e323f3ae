"""One auction as a file: schema ``themis-auction-1``, for "what if" questions, checks and benchmarks.

An app with k GPUs in all (held and new), their union within a machine, a rack or across racks, is worth
V = t_id / (elapsed + work_left * slowdown / e) with e = gang * floor(min(k, demand_max) / gang); with e = 0 it waits a
lease and then gets one GPU: V = t_id / (elapsed + lease + work_left * slowdown.machine).

*Source:* Themis (NSDI 2020), Eq. 1, with a finite value for nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import replace

from arbiter.core.placement.lots import shuffled
from arbiter.core.policies.themis.auction.compiled import NotOnDiskError, from_disk, use_compiled, use_plain
from arbiter.core.policies.themis.auction.payments import Payments, settle
from arbiter.core.policies.themis.auction.problem import (
    CLUSTER,
    MACHINE,
    RACK,
    Floats,
    Home,
    Machine,
    Map,
    Problem,
    Rows,
    build,
)
from arbiter.core.policies.themis.auction.rounding import Worth, machine_of
from arbiter.core.policies.themis.auction.solve import Budget, exercise

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Size = Annotated[int, Meta(ge=1, le=1_000_000_000)]
Amount = Annotated[int, Meta(ge=0, le=1_000_000_000)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e15)]
Positive = Annotated[float, Meta(ge=1e-100, le=1e15)]
Factor = Annotated[float, Meta(gt=0.0, le=1e6)]

#: Beyond these a file is refused rather than memory exhausted. A solve takes up to 0.8 kB per row (a gang that an app
#: could win), and 16 bytes per pair of an app and an app or machine: about 3 GB for the largest that pass.
BYTES_MAX, GPUS_MAX, ROWS_MAX, PAIRS_MAX = 32 * 2**20, 200_000, 4_000_000, 100_000_000
#: The least time that an app may take from start to end: V must stay finite, and so must 1 / V.
SHORTEST_S = 1e-100


class InstanceError(ValueError):
    """A file that is no auction; the text is one sentence that names the field and the mend."""


class Host(Struct, frozen=True, forbid_unknown_fields=True):
    """One machine: `free` of its `gpus` are on offer."""

    id: Name
    rack: Name
    gpus: Size
    free: Amount


class Slowdown(Struct, frozen=True, forbid_unknown_fields=True):
    """S of one app within a machine, within a rack, across racks; no smaller the wider."""

    machine: Factor
    rack: Factor
    cross: Factor


class Bidding(Struct, frozen=True, forbid_unknown_fields=True):
    """One app. Seconds, serial GPU-seconds, GPUs; `held` counts GPUs per machine, beside the free ones."""

    id: Name
    elapsed: Seconds
    work_left: Seconds
    t_id: Positive
    demand_max: Size
    gang: Size
    slowdown: Slowdown
    held: dict[Name, Amount] = {}


class Instance(Struct, frozen=True, forbid_unknown_fields=True):
    """One auction."""

    schema: Literal["themis-auction-1"]
    lease: Seconds
    machines: list[Host]
    apps: list[Bidding]


# --- reading --------------------------------------------------------------------------------------------------------


def parse(data: bytes) -> Instance:
    """Return the auction in a JSON file; of `held`, only the machines where something is held.

    Raises
    ------
    InstanceError
        If the file is not JSON, not of the schema, contradicts itself, or is too large.
    """
    if len(data) > BYTES_MAX:
        raise InstanceError(f"the file has more than {BYTES_MAX // 2**20} MiB; split the cluster")
    if not data.strip():
        raise InstanceError(f"the file is empty; give {_should_be('')}")
    try:
        # The standard library reads NaN and 1e999 too, so that they are refused as the value of a field.
        instance = msgspec.convert(json.loads(data, object_pairs_hook=_fields), Instance)
    except InstanceError:
        raise
    except msgspec.ValidationError as error:
        raise InstanceError(_readable(str(error))) from None
    except (ValueError, RecursionError) as error:
        raise InstanceError(f"the file cannot be read as JSON ({error}); give {_should_be('')}") from None
    _check_machines(instance)
    _check_apps(instance)
    _check_size(instance)
    return replace(instance, apps=[replace(app, held=_present(app.held)) for app in instance.apps])


def _fields(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields: dict[str, object] = {}
    for name, value in pairs:
        if name in fields:
            raise InstanceError(f"{_shown(name)}: the name is there twice in one object; leave out one of the two")
        fields[name] = value
    return fields


def _present(held: Mapping[str, int]) -> dict[str, int]:
    return {machine: count for machine, count in held.items() if count}


#: What each field should be; `[]` stands for any index.
_SHOULD_BE = {
    "": "one object of schema themis-auction-1",
    "schema": 'the text "themis-auction-1"',
    "lease": "seconds, 0 to 1e15",
    "machines": "a list of machines",
    "machines[]": "an object with id, rack, gpus and free",
    "machines[].id": "a name of 1 to 256 characters",
    "machines[].rack": "a name of 1 to 256 characters",
    "machines[].gpus": "a whole number of GPUs, 1 to 1e9",
    "machines[].free": "a whole number of GPUs, 0 to `gpus`",
    "apps": "a list of apps",
    "apps[]": "an object with id, elapsed, work_left, t_id, demand_max, gang, slowdown and held",
    "apps[].id": "a name of 1 to 256 characters",
    "apps[].elapsed": "seconds, 0 to 1e15",
    "apps[].work_left": "serial GPU-seconds, 0 to 1e15",
    "apps[].t_id": "seconds, more than 0, at most 1e15",
    "apps[].demand_max": "a whole number of GPUs, 1 to 1e9",
    "apps[].gang": "a whole number of GPUs, 1 to 1e9",
    "apps[].slowdown": "an object with machine, rack and cross",
    "apps[].slowdown.machine": "a factor, more than 0, at most 1e6",
    "apps[].slowdown.rack": "a factor, more than 0, at most 1e6",
    "apps[].slowdown.cross": "a factor, more than 0, at most 1e6",
    "apps[].held": "an object of whole numbers of GPUs, 0 to 1e9, by machine",
}
_OBJECTS: dict[str, type[Struct]] = {"": Instance, "machines[]": Host, "apps[]": Bidding, "apps[].slowdown": Slowdown}
_KINDS = {
    "str": "text", "int": "a whole number", "float": "a number with a fraction", "bool": "true or false",
    "null": "null", "array": "a list", "object": "an object",
}  # fmt: skip


def _readable(text: str) -> str:
    """Return msgspec's words as a sentence that names the field first and ends in what it should be."""
    what, _, where = text.rpartition(" - at ") if " - at " in text else (text, "", "")
    path = where.rpartition("$")[2].strip("`").removeprefix(".").removesuffix("[...]")
    if missing := re.search(r"missing required field `(.*)`$", what):
        path = f"{path}.{missing[1]}".removeprefix(".")
        return f"{path} is missing; give {_should_be(path)}"
    if unknown := re.search(r"unknown field `(.*)`$", what, re.DOTALL):
        known = ", ".join(field.name for field in msgspec.structs.fields(_OBJECTS.get(_shape(path), Instance)))
        return f"{f'{path}.{_shown(unknown[1])}'.removeprefix('.')}: there is no such field; those there are: {known}"
    got = re.search(r"got `(\w+)`$", what)
    found = f"is {_KINDS.get(got[1], got[1])}" if got else "has a value that cannot be used"
    return f"{path or 'the file'} {found}; give {_should_be(path)}"


def _shape(path: str) -> str:
    return re.sub(r"\[\d+\]", "[]", path)


def _should_be(path: str) -> str:
    return _SHOULD_BE.get(_shape(path), "what the schema says")


def _shown(name: str) -> str:
    """Return a name from the file as it may be shown: short, and without control characters."""
    short = name if len(name) <= 60 else name[:57] + "..."
    return short if short.isprintable() else ascii(short)


def _check_machines(instance: Instance) -> None:
    names: set[str] = set()
    for index, host in enumerate(instance.machines):
        where = f"machines[{index}]"
        _check_name(f"{where}.id", host.id, names)
        _check_name(f"{where}.rack", host.rack)
        if host.free > host.gpus:
            raise InstanceError(f"{where}.free: {host.free} of {host.gpus} GPUs are free; give at most `gpus`")


def _check_name(where: str, name: str, taken: set[str] | None = None) -> None:
    if not name.isprintable():
        raise InstanceError(f"{where}: {_shown(name)} has characters that cannot be shown; give letters and digits")
    if taken is None:
        return
    if name in taken:
        raise InstanceError(f"{where}: {_shown(name)} is there twice; give each a name of its own")
    taken.add(name)


def _check_apps(instance: Instance) -> None:
    names: set[str] = set()
    occupied = {host.id: host.free for host in instance.machines}  # free or held
    gpus = {host.id: host.gpus for host in instance.machines}
    for index, app in enumerate(instance.apps):
        where = f"apps[{index}]"
        _check_name(f"{where}.id", app.id, names)
        _check_value(where, app)
        for machine, count in app.held.items():
            if machine not in gpus:
                raise InstanceError(f"{where}.held: there is no machine {_shown(machine)}; name one of `machines`")
            occupied[machine] += count
            if occupied[machine] > gpus[machine]:
                raise InstanceError(
                    f"{where}.held: {_shown(machine)} has {gpus[machine]} GPUs, fewer than are free there or "
                    "held by this app and those before it; lower one of these"
                )


def _check_value(where: str, app: Bidding) -> None:
    slowdown = app.slowdown
    if slowdown.rack < slowdown.machine:
        raise InstanceError(f"{where}.slowdown.rack: it is less than `machine`; give at least that, as a rack is wider")
    if slowdown.cross < slowdown.rack:
        raise InstanceError(f"{where}.slowdown.cross: it is less than `rack`; give at least that, as it is wider")
    if app.elapsed + app.work_left * slowdown.machine / app.demand_max < SHORTEST_S:
        raise InstanceError(
            f"{where}.work_left: without time elapsed and work left V is infinite; give it work, or leave the app out"
        )


def _check_size(instance: Instance) -> None:
    machines, apps = instance.machines, instance.apps
    if sum(host.gpus for host in machines) > GPUS_MAX:
        raise InstanceError(f"machines: they have more than {GPUS_MAX} GPUs in all; split the cluster")
    if len(apps) * (len(apps) + len(machines)) > PAIRS_MAX:
        raise InstanceError(f"apps: {len(apps)} with {len(machines)} machines are too many; leave some out")
    free = sum(host.free for host in machines)
    if sum(min(app.demand_max, free) // app.gang for app in apps) > ROWS_MAX:
        raise InstanceError(f"apps: together they bid more than {ROWS_MAX} rows; lower demand_max or leave some out")


# --- values ---------------------------------------------------------------------------------------------------------


def log_value(instance: Instance, app: Bidding, counts: Mapping[str, int]) -> float:
    """Return log V of an app with these GPUs (by machine, held and new ones together)."""
    used = [machine for machine, count in counts.items() if count > 0]
    racks = {host.rack for host in instance.machines if host.id in used}
    factor = app.slowdown.machine if len(used) <= 1 else app.slowdown.rack if len(racks) == 1 else app.slowdown.cross
    gpus = sum(counts.values())
    effective = app.gang * (min(gpus, app.demand_max) // app.gang)
    if effective == 0:
        return math.log(app.t_id) - math.log(app.elapsed + instance.lease + app.work_left * app.slowdown.machine)
    return math.log(app.t_id) - math.log(app.elapsed + app.work_left * factor / effective)


class Entry(Struct, frozen=True):
    """An instance as the solver wants it, with what is needed to read its answer."""

    places: Map
    problem: Problem
    worths: tuple[Worth, ...]
    log_none: tuple[float, ...]  #: log V of winning nothing


def enter(instance: Instance) -> Entry:
    """Return the auction as arrays: all rows of all apps at once."""
    places = Map([Machine(host.id, host.rack, host.free) for host in instance.machines])
    apps = instance.apps
    homes = tuple(_home(places, app) for app in apps)
    held = np.array([sum(app.held.values()) for app in apps], dtype=np.int64)
    gang = np.array([app.gang for app in apps], dtype=np.int64)
    demand = np.array([app.demand_max for app in apps], dtype=np.int64)
    elapsed = np.array([app.elapsed for app in apps])
    work = np.array([app.work_left for app in apps])
    slow = np.array([(app.slowdown.machine, app.slowdown.rack, app.slowdown.cross) for app in apps]).reshape(-1, 3)
    at = np.array([_tightest(home) for home in homes], dtype=np.int64)  # the level of what is held
    kept_gangs = np.minimum(held, demand) // gang
    waiting = elapsed + instance.lease + work * slow[:, 0] if len(apps) else elapsed
    with np.errstate(divide="ignore", invalid="ignore"):
        working = elapsed + work * np.take_along_axis(slow, at[:, None] - 1, 1)[:, 0] / (gang * kept_gangs)
    shared_none = np.where(kept_gangs > 0, working, waiting) if len(apps) else elapsed
    # One row per whole gang more and level, loosest level first.
    most = np.minimum(demand // gang, (held + places.total) // gang)
    steps = np.maximum(most - kept_gangs, 0)
    owner = np.repeat(np.arange(len(apps)), steps)
    first = np.repeat(np.cumsum(steps) - steps, steps)
    effective = gang[owner] * (kept_gangs[owner] + 1 + np.arange(len(owner)) - first)
    columns = []
    for level in (CLUSTER, RACK, MACHINE):
        open_to = (at <= level)[owner]
        who, e = owner[open_to], effective[open_to]
        shared = elapsed[who] + work[who] * slow[who, level - 1] / e
        columns.append((who, e - held[who], np.full(len(who), level), np.log(shared_none[who]) - np.log(shared)))
    rows = Rows(*(np.concatenate(column) for column in zip(*columns, strict=True)))
    log_none = np.log(np.array([app.t_id for app in apps])) - np.log(shared_none)
    problem = build(places, rows, homes, [1] * len(apps))
    worths = _worths(places, instance, rows, homes, elapsed / shared_none)
    return Entry(places, problem, worths, tuple(float(value) for value in log_none))


def _worths(places: Map, instance: Instance, rows: Rows, homes: Sequence[Home], sunk: Floats) -> tuple[Worth, ...]:
    order = np.argsort(rows.owner, kind="stable")
    new, level, gain = rows.new[order], rows.level[order], rows.gain[order]
    off = np.searchsorted(rows.owner[order], np.arange(len(homes) + 1)).tolist()
    return tuple(
        Worth(
            new[low:high],
            level[low:high],
            gain[low:high],
            home=home,
            kept={places.place_of_machine[machine]: count for machine, count in app.held.items()},
            step=app.gang,
            sunk=share,
        )
        for app, home, low, high, share in zip(instance.apps, homes, off[:-1], off[1:], sunk.tolist(), strict=True)
    )


def _home(places: Map, app: Bidding) -> Home:
    machines = [places.place_of_machine[machine] for machine in app.held]
    racks = {int(places.parent[machine]) for machine in machines}
    return Home(
        machine=-1 if not machines else machines[0] if len(machines) == 1 else -2,
        rack=-1 if not racks else racks.pop() if len(racks) == 1 else -2,
    )


def _tightest(home: Home) -> int:
    if home.machine != -2:
        return MACHINE
    return RACK if home.rack != -2 else CLUSTER


# --- answers --------------------------------------------------------------------------------------------------------


class Result(Struct, frozen=True):
    """The outcome, schema ``auction-result/v1``. Sums are of log V; counts are of new GPUs, by machine."""

    schema: Literal["auction-result/v1"]
    sum_log_v: float
    upper_bound: float
    gap: float  #: of the whole problem
    proven: bool  #: the whole problem and every one without a winner
    allocation: dict[str, dict[str, int]]
    log_v: dict[str, float]
    c: dict[str, float]
    without: dict[str, float]
    without_gap: dict[str, float]
    grants: dict[str, dict[str, int]]
    leftover: dict[str, int]
    solve_ms: float
    total_ms: float


#: The fields of `Result` that are by app.
BY_APP = ("allocation", "log_v", "c", "without", "without_gap", "grants")


def solve(
    instance: Instance,
    budget_ms: float = 500.0,
    *,
    seed: int = 0,
    clock: Callable[[], float] | None = None,
) -> Result:
    """Return the outcome of the auction.

    Parameters
    ----------
    instance
        The auction; see `parse`.
    budget_ms
        Bounds the search, counted in steps of work.
    seed
        Decides ties and the lots of rounding.
    clock
        Seconds, whatever their origin: then the budget is kept by the clock too, and the times are measured.
    """
    start = clock() if clock is not None else 0.0
    # The order of bidders decides ties, so it is by lot and not that of the file.
    by_lot = replace(instance, apps=shuffled(seed, instance.apps, name=lambda app: app.id, purpose="tie"))
    entry = enter(by_lot)
    began = clock() if clock is not None else 0.0

    names = [app.id for app in by_lot.apps]
    outcome = settle(
        entry.problem,
        entry.places,
        names,
        entry.worths,
        Budget.of(budget_ms, clock),
        seed=seed,
    )
    ended = clock() if clock is not None else 0.0
    result = _result(by_lot, entry, outcome, solve_ms=(ended - began) * 1e3, total_ms=(ended - start) * 1e3)
    listed = {field: {app.id: getattr(result, field)[app.id] for app in instance.apps} for field in BY_APP}
    return replace(result, **listed)


def _result(instance: Instance, entry: Entry, outcome: Payments, *, solve_ms: float, total_ms: float) -> Result:
    solved, count = outcome.solved, len(instance.apps)
    options = solved.problem.options
    base = math.fsum(entry.log_none)
    picks = solved.picks[solved.whole].tolist()
    log_v = [
        none + (float(options.gain[pick]) if pick >= 0 else 0.0)
        for none, pick in zip(entry.log_none, picks, strict=True)
    ]
    names = [app.id for app in instance.apps]
    without = [solved.best_without(bidder) for bidder in range(count)]
    left = {host.id: host.free for host in instance.machines}
    grants = [_by_machine(entry.places, counts) for counts in outcome.kept]
    for grant in grants:
        for machine, gpus in grant.items():
            left[machine] -= gpus
    assert all(gpus >= 0 for gpus in left.values()), "more GPUs were granted than are free"
    return Result(
        schema="auction-result/v1",
        sum_log_v=base + solved.value,
        upper_bound=base + solved.upper,
        gap=solved.upper - solved.value,
        proven=not solved.open(),
        allocation=dict(zip(names, (_by_machine(entry.places, counts) for counts in outcome.won), strict=True)),
        log_v=dict(zip(names, log_v, strict=True)),
        c={name: math.exp(log_c) for name, log_c in zip(names, outcome.log_c, strict=True)},
        without={
            name: base - none + value for name, none, (value, _) in zip(names, entry.log_none, without, strict=True)
        },
        without_gap={name: upper - value for name, (value, upper) in zip(names, without, strict=True)},
        grants=dict(zip(names, grants, strict=True)),
        leftover={machine: gpus for machine, gpus in left.items() if gpus},
        solve_ms=solve_ms,
        total_ms=total_ms,
    )


def _by_machine(places: Map, counts: Mapping[int, int]) -> dict[str, int]:
    by_machine: dict[str, int] = {}
    for place, gpus in counts.items():
        name = places.machines[machine_of(place, places) - places.first_machine].id
        by_machine[name] = by_machine.get(name, 0) + gpus
    return by_machine


def warm_up() -> None:
    """Solve a small auction that reaches every loop, so that these are compiled (or read from the cache) by now."""
    machines = [Host(f"m{index}", f"r{index // 3}", 4, 3) for index in range(6)]
    slow = Slowdown(1.0, 1.3, 1.9)
    apps = [
        Bidding(f"a{index}", 10.0 * index, 5e3 + 731.0 * index, 1e3, 3 + index, 1, slow, {} if index else {"m0": 1})
        for index in range(7)
    ]  # fmt: skip
    entry = enter(Instance("themis-auction-1", 600.0, machines, apps))
    exercise(entry.problem)
    outcome = settle(entry.problem, entry.places, [app.id for app in apps], entry.worths, Budget.of(20.0), seed=0)
    assert outcome.won


def load() -> bool:
    """Use machine code from the next call on if all of it is on disk, and plain Python if not; return whether it is."""
    use_compiled()
    try:
        with from_disk():
            warm_up()
    except NotOnDiskError:
        use_plain()
        return False
    return True
