"""An instance as the table that a mixed-integer program chooses from: one column per app, node and count.

A node is a place in the tree machine < rack < cluster, numbered machines first, then racks, then the cluster. A column
gives an app `count` new GPUs anywhere below its node, so that the union with what it holds lies within the node's
level. Written from the schema alone, so that its agreement with the arbiter's own code means something.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

from benchmarks.auctions.instances import App, Instance

Level = Literal["machine", "rack", "cross"]
LEVELS: tuple[Level, ...] = ("machine", "rack", "cross")


class Column(Struct, frozen=True):
    """`count` new GPUs below `node`: log V grows by `gain` above that of no new GPU."""

    app: int
    node: int
    level: Level
    count: int
    gain: float


class Table(Struct, frozen=True):
    """One auction: capacities of the tree, and the columns of all apps.

    `free[m]` free GPUs of machine m, `rack_of[m]` its rack, 0 to `racks - 1`. `null[a]` is log V of app a with no new
    GPU, `roams[a]` says that it holds nothing and any machine is as good as another of its size.
    """

    apps: tuple[str, ...]
    free: tuple[int, ...]
    rack_of: tuple[int, ...]
    racks: int
    null: tuple[float, ...]
    roams: tuple[bool, ...]
    columns: tuple[Column, ...]

    @property
    def root(self) -> int:
        """The number of the cluster's node."""
        return len(self.free) + self.racks

    def nodes_above(self, node: int) -> tuple[int, ...]:
        """Return `node` and the nodes that contain it."""
        if node < len(self.free):
            return node, len(self.free) + self.rack_of[node], self.root
        return (node,) if node == self.root else (node, self.root)

    def capacities(self) -> list[int]:
        """Return the free GPUs below each node."""
        below = [0] * (self.root + 1)
        for machine, count in enumerate(self.free):
            for node in self.nodes_above(machine):
                below[node] += count
        return below

    def log_v(self, picked: Iterable[Column]) -> list[float]:
        """Return log V of each app when it gets its column among `picked`."""
        values = list(self.null)
        for column in picked:
            values[column.app] += column.gain
        return values


def table_of(instance: Instance) -> Table:
    """Return the columns of all apps: per node, the counts that make one more whole gang and are worth something."""
    machines = instance["machines"]
    rack_number = {rack: i for i, rack in enumerate(dict.fromkeys(machine["rack"] for machine in machines))}
    bare = Table(
        apps=tuple(app["id"] for app in instance["apps"]),
        free=tuple(machine["free"] for machine in machines),
        rack_of=tuple(rack_number[machine["rack"]] for machine in machines),
        racks=len(rack_number),
        null=(),
        roams=(),
        columns=(),
    )
    machine_number = {machine["id"]: i for i, machine in enumerate(machines)}
    held = [tuple(machine_number[name] for name, n in app["held"].items() if n) for app in instance["apps"]]
    capacities = bare.capacities()
    columns: list[Column] = []
    null: list[float] = []
    for index, (app, home) in enumerate(zip(instance["apps"], held, strict=True)):
        null.append(_log_v(app, sum(app["held"].values()), _level(bare, home), instance["lease"]))
        for node, level in _nodes(bare, home):
            columns += _columns(app, index, node, level, capacities[node], instance["lease"], null[-1])
    return Table(
        bare.apps, bare.free, bare.rack_of, bare.racks, tuple(null), tuple(not home for home in held), tuple(columns)
    )


def _columns(
    app: App, index: int, node: int, level: Level, capacity: int, lease: float, null: float
) -> Iterable[Column]:
    kept = sum(app["held"].values())
    before = _whole(app, kept)
    for count in range(1, min(capacity, app["demand_max"] - kept) + 1):
        whole = _whole(app, kept + count)
        if whole > before:
            before = whole
            gain = _log_v(app, kept + count, level, lease) - null
            if gain > 0.0:
                yield Column(index, node, level, count, gain)


def _whole(app: App, count: int) -> int:
    return min(count, app["demand_max"]) // app["gang"] * app["gang"]


def _log_v(app: App, count: int, level: Level, lease: float) -> float:
    """Return log V with `count` GPUs in all, held and new, within `level`.

    *Source:* Themis (NSDI 2020), Eq. 1: V = 1 / rho = T_id / T_sh; without a whole gang, one more lease of waiting and
    then one GPU.
    """
    whole = _whole(app, count)
    if whole:
        t_sh = app["elapsed"] + app["work_left"] * app["slowdown"][level] / whole
    else:
        t_sh = app["elapsed"] + lease + app["work_left"] * app["slowdown"]["machine"]
    return math.log(app["t_id"]) - math.log(t_sh)


def _level(table: Table, home: Sequence[int]) -> Level:
    if len(home) <= 1:
        return "machine"
    return "rack" if len({table.rack_of[machine] for machine in home}) == 1 else "cross"


def _nodes(table: Table, home: Sequence[int]) -> Iterable[tuple[int, Level]]:
    """Return the nodes that can hold the union with what is held, and the level of each."""
    machines = len(table.free)
    if not home:
        yield from ((machine, "machine") for machine in range(machines))
        yield from ((machines + rack, "rack") for rack in range(table.racks))
    elif len(home) == 1:
        yield home[0], "machine"
    if home and _level(table, home) != "cross":
        yield machines + table.rack_of[home[0]], "rack"
    yield table.root, "cross"


def undominated(table: Table) -> Table:
    """Return `table` without columns that another one of the same app makes needless.

    A column falls to one of a looser or equal level that needs no more GPUs and gains no less: what fits in the tighter
    place fits in the looser one. Nothing is lost. Columns of a level fall together, whatever their nodes.
    """
    best: dict[tuple[int, Level, int], float] = {}
    for column in table.columns:
        best[column.app, column.level, column.count] = column.gain
    kept = {key for app in range(len(table.apps)) for key in _front(best, app)}
    columns = tuple(column for column in table.columns if (column.app, column.level, column.count) in kept)
    return Table(table.apps, table.free, table.rack_of, table.racks, table.null, table.roams, columns)


def _front(best: dict[tuple[int, Level, int], float], app: int) -> Iterable[tuple[int, Level, int]]:
    """Yield the keys of `app` that are not dominated: from few GPUs to many, loosest level first, each a new best."""
    mine = sorted((key for key in best if key[0] == app), key=lambda key: (key[2], -LEVELS.index(key[1])))
    reached = dict.fromkeys(LEVELS, 0.0)  # the greatest gain at this level or a looser one, with no more GPUs
    for key in mine:
        if best[key] > reached[key[1]]:
            for level in LEVELS[: LEVELS.index(key[1]) + 1]:
                reached[level] = max(reached[level], best[key])
            yield key


def placed(table: Table, picked: Iterable[Column]) -> list[dict[int, int]]:
    """Return per app its new GPUs by machine: machine columns where they say, the others where there is room."""
    free = list(table.free)
    placement: list[dict[int, int]] = [{} for _ in table.apps]
    for column in sorted(picked, key=lambda column: LEVELS.index(column.level)):
        left = column.count
        for machine, room in enumerate(free):
            taken = min(room, left)
            if taken and column.node in table.nodes_above(machine):
                placement[column.app][machine] = taken
                free[machine] -= taken
                left -= taken
        assert left == 0, "The columns ask for more GPUs than there are."
    return placement
