"""Profiles of models: their slowdown when GPUs lie apart, and when they share a GPU with another model.

Three sources, each filling in for the one before it: tables of measurements, if a folder of them is given; a small
table of our own, ``tables/models.csv``; and for models in neither, the crude factors that Themis starts from.

Our own table is made up, not measured: a model with large gradients for its computing time gets factors up to 1.3
across nodes and 2 across racks, a model that computes most of the time about 1.05 and 1.1. `busy` is the part of its
time for which it keeps a GPU busy. Two on one GPU then run at 1 / (busy + busy) of their own speeds, or at their whole
speeds where the sum is below 1.

The effect of two models on each other on one GPU was measured for models at batch sizes: such a *kind* is written as
``resnet50@64``, and as ``resnet50`` where the batch size is unknown.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from statistics import median
from typing import TypeVar

from msgspec import Struct

from protocol.messages import LEVELS, Level

#: Iteration time by locality, relative to a single node. *Source:* Themis (NSDI 2020), S(G) of Eq. 1 to begin with.
CRUDE: Mapping[Level, float] = {"slot": 1.0, "machine": 1.0, "rack": 1.1, "cluster": 1.3}
#: Slowdowns were measured across nodes, never across racks: these are extrapolated by the ratio of the crude factors.
ACROSS_RACKS = CRUDE["cluster"] / CRUDE["rack"]
#: For unknown models: two of them together do 1.37 times the work of one alone, the median of Gavel's pairs on a V100.
BUSY = 0.73
#: The part of a GPU that the kernels of a model fill while it is busy. Made up, not measured: under MPS the kernels of
#: two overlap as far as they leave each other room.
FILLS = 0.8
#: The part of a GPU's memory that an unknown job takes at its peak: two of them fit together.
MEMORY = 0.42
#: Two that take more than this together do not fit on a GPU: the drivers and the allocators want the rest.
FITS = 0.95
#: The rows taken of the tables: the cluster where placement matters, the GPU and the run that have both tables.
PLACEMENT_CLUSTER, THROUGHPUT_GPU, THROUGHPUT_SOURCE = "aws", "v100", "gavel_sim_2020"

SLOWDOWN_CSV = Path("placement", "slowdown.csv")
CONSOLIDATION_CSV = Path("throughput", "consolidation_slowdown.csv")
COLOCATED_CSV = Path("throughput", "colocated.csv")

_NOT_OF_NAMES = re.compile(r"[^a-z0-9]")


class ProfileError(ValueError):
    """The tables cannot be used; the message names the file, the field and the mend."""


class ModelProfile(Struct, frozen=True):
    """One row of our own table: slowdowns across nodes and across racks, and the part of its time on the GPU."""

    model: str
    domain: str
    network_intensive: bool
    rack: float
    cluster: float
    busy: float


class Profiles(Struct, frozen=True):
    """All figures about models.

    Attributes
    ----------
    apart
        ``apart[model][gpus]``: slowdown across nodes of one rack, and across racks, of a job of so many GPUs.
    busy
        ``busy[model]``: the part of its time for which it keeps a GPU busy.
    pairs
        ``pairs[a, b]``: speeds of a and b on one GPU relative to each alone; 0 and 0: they do not fit together. Of
        kinds, and of models by the median over their batch sizes.
    memory
        ``memory[kind]``: the part of a GPU's memory that it takes at its peak.
    """

    apart: Mapping[str, Mapping[int, tuple[float, float]]]
    busy: Mapping[str, float]
    pairs: Mapping[tuple[str, str], tuple[float, float]]
    memory: Mapping[str, float] = {}

    def slowdown(self, model: str, gpus: int, level: Level) -> float:
        """Return S >= 1: iteration time on `gpus` GPUs that lie within one `level`, relative to one node.

        A job size that was not measured takes the next smaller one that was, else the smallest.
        """
        assert level in LEVELS, level
        if gpus <= 1 or level in {"slot", "machine"}:
            return 1.0
        sizes = self.apart.get(key_of(model))
        if sizes is None:
            return CRUDE[level]
        size = max((size for size in sizes if size <= gpus), default=min(sizes))
        rack, cluster = sizes[size]
        return rack if level == "rack" else cluster

    def interference(self, kind_a: str, kind_b: str, *, mps: bool = False) -> tuple[float, float]:
        """Return the speeds of two jobs on one GPU, each relative to itself alone; (0, 0): they do not fit together.

        Models may be written in any way, kinds as `kind_of` does. Under `mps` the kernels of both overlap; pairs that
        were measured go at the speeds of their table all the same, which does not say how they ran.
        """
        if (kind_a, kind_b) in self.pairs:
            return self.pairs[kind_a, kind_b]
        a, b = _model_of(kind_a), _model_of(kind_b)
        if (a, b) in self.pairs:
            return self.pairs[a, b]
        together = self.busy.get(a, BUSY) + self.busy.get(b, BUSY)
        speed = 1 / max(1.0, together * FILLS if mps else together)
        return speed, speed

    def utilisation(self, kind: str) -> float | None:
        """Return the part of its time for which a job alone keeps a GPU busy, None for unknown models.

        The tables measure pairs, not utilisation: a GPU that does r times the work of one job with two of them was busy
        for 1 / r of the time with one, or more. That is the definition here; it is at most 1.
        """
        a = _model_of(kind)
        twice = sum(self.pairs.get((kind, kind), (0.0, 0.0))) or sum(self.pairs.get((a, a), (0.0, 0.0)))
        return min(1.0, 1.0 / twice) if twice else self.busy.get(a)

    def memory_share(self, kind: str) -> float:
        """Return the part of a GPU's memory that a job takes at its peak."""
        return self.memory.get(kind, MEMORY)


def key_of(model: str) -> str:
    """Return the name of a model in the tables, for any way to write it: ``ResNet-50`` is ``resnet50``."""
    return _NOT_OF_NAMES.sub("", model.lower())


def kind_of(model: str, batch_size: int) -> str:
    """Return the name under which a model at a batch size is known, 0 being unknown."""
    return f"{key_of(model)}@{batch_size}" if batch_size else key_of(model)


def _model_of(kind: str) -> str:
    return key_of(kind.partition("@")[0])


def crude() -> Profiles:
    """Return profiles that know no model: the crude factors for all."""
    return Profiles({}, {}, {})


def built_in() -> Profiles:
    """Return the profiles of our own table."""
    rows = models()
    return Profiles(
        apart={row.model: {2: (row.rack, row.cluster)} for row in rows},
        busy={row.model: row.busy for row in rows},
        pairs={},
    )


def measured(folder: Path | str) -> Profiles:
    """Return the measurements in `folder`, and our own table for models that they lack.

    Parameters
    ----------
    folder
        With any of ``placement/slowdown.csv``, ``throughput/consolidation_slowdown.csv``, ``throughput/colocated.csv``.

    Raises
    ------
    ProfileError
        If it holds none of them, or one lacks a column.
    """
    files = [Path(folder) / name for name in (CONSOLIDATION_CSV, SLOWDOWN_CSV, COLOCATED_CSV)]
    if not any(file.is_file() for file in files):
        wanted = ", ".join(str(name) for name in (SLOWDOWN_CSV, CONSOLIDATION_CSV, COLOCATED_CSV))
        raise ProfileError(f"the folder of profiles {folder} holds no table; give one with any of {wanted}")
    own, (consolidation, slowdown, colocated) = built_in(), files
    apart = dict(own.apart) | _if_there(consolidation, _consolidation) | _if_there(slowdown, _placement)
    pairs = _if_there(colocated, _pairs)
    return Profiles(apart, own.busy, pairs, _memory(pairs))


@cache
def models() -> tuple[ModelProfile, ...]:
    """Return our own table, in the order of its lines."""
    file = resources.files("simulator") / "tables" / "models.csv"
    return tuple(
        ModelProfile(
            model=row["model"],
            domain=row["domain"],
            network_intensive=row["network_intensive"] == "yes",
            rack=float(row["rack"]),
            cluster=float(row["cluster"]),
            busy=float(row["busy"]),
        )
        for row in csv.DictReader(file.read_text().splitlines())
    )


_Apart = dict[str, Mapping[int, tuple[float, float]]]
_Pairs = dict[tuple[str, str], tuple[float, float]]
_KeyT = TypeVar("_KeyT")
_ValueT = TypeVar("_ValueT")


def _if_there(file: Path, read: Callable[[Path], dict[_KeyT, _ValueT]]) -> dict[_KeyT, _ValueT]:
    """Return the table that `read` makes of `file`, an empty one without the file."""
    return read(file) if file.is_file() else {}


def _placement(file: Path) -> _Apart:
    """Return slowdowns of jobs that fit one node, by the median over the ways to spread them.

    Larger jobs lie apart in either case, so their comparison answers another question.
    """
    found: dict[str, dict[int, list[float]]] = {}
    for row in _rows(file, ("cluster", "model", "gpus", "packed_nodes", "slowdown_median")):
        if row["cluster"] == PLACEMENT_CLUSTER and row["packed_nodes"] == "1":
            _collect(found, file, row, "gpus", "slowdown_median")
    return _median_apart(found)


def _consolidation(file: Path) -> _Apart:
    """Return slowdowns of jobs on several nodes instead of one, by the median over batch sizes."""
    found: dict[str, dict[int, list[float]]] = {}
    for row in _rows(file, ("gpu_type", "model", "scale_factor", "slowdown")):
        if row["gpu_type"] == THROUGHPUT_GPU:
            _collect(found, file, row, "scale_factor", "slowdown")
    return _median_apart(found)


def _collect(
    found: dict[str, dict[int, list[float]]], file: Path, row: Mapping[str, str], size: str, value: str
) -> None:
    """Put one measurement with the others of its model and job size."""
    sizes = found.setdefault(key_of(row["model"]), {})
    sizes.setdefault(round(_number(file, row, size)), []).append(_number(file, row, value))


def _median_apart(found: Mapping[str, Mapping[int, Sequence[float]]]) -> _Apart:
    """Return the median of each; where lying apart was measured to be faster it counts as no slower."""
    return {
        model: {size: _apart_of(max(1.0, median(values))) for size, values in sorted(sizes.items())}
        for model, sizes in found.items()
    }


def _apart_of(rack: float) -> tuple[float, float]:
    """Return the slowdowns across nodes and across racks."""
    return rack, rack * ACROSS_RACKS if rack > 1 else rack


def _pairs(file: Path) -> _Pairs:
    """Return speeds of pairs: of kinds, and of models by the median over batch sizes; (0, 0) if most do not fit.

    A table without batch sizes has models alone.
    """
    columns = ("source", "gpu_type", "model_a", "model_b", "feasible", "ratio_a", "ratio_b")
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    kinds: _Pairs = {}
    for row in _rows(file, columns):
        if (row["source"], row["gpu_type"]) != (THROUGHPUT_SOURCE, THROUGHPUT_GPU):
            continue
        a, b = key_of(row["model_a"]), key_of(row["model_b"])
        fits = row["feasible"] == "1"
        speeds = (_number(file, row, "ratio_a"), _number(file, row, "ratio_b")) if fits else (0.0, 0.0)
        found.setdefault((a, b), []).append(speeds)
        found.setdefault((b, a), []).append(speeds[::-1])
        if row.get("batch_a") and row.get("batch_b"):
            one = kind_of(a, round(_number(file, row, "batch_a")))
            other = kind_of(b, round(_number(file, row, "batch_b")))
            kinds[one, other], kinds[other, one] = _at_most_1(speeds), _at_most_1(speeds[::-1])
    return {pair: _median_pair(speeds) for pair, speeds in found.items()} | kinds


def _at_most_1(speeds: tuple[float, float]) -> tuple[float, float]:
    return min(1.0, speeds[0]), min(1.0, speeds[1])


def _memory(pairs: Mapping[tuple[str, str], tuple[float, float]]) -> dict[str, float]:
    """Return each kind's part of a GPU's memory; by these parts kinds fit together as in the tables, if possible.

    No table has the memory itself, only the pairs of kinds that did not fit. Kinds are taken off one after the other. A
    kind that fits with all others left takes little, less than all of these. Otherwise the kind that fits with the
    fewest takes nearly all the memory that the kinds before it leave. That is exact for a threshold graph, and the
    pairs that fit by size always form one.

    *Source:* Chvatal and Hammer, Aggregation of inequalities in integer programming (1977): threshold graphs.
    """
    left = sorted({kind for pair in pairs for kind in pair if "@" in kind})
    apart = {(a, b) for (a, b), speeds in pairs.items() if not any(speeds) and "@" in a and "@" in b}
    found: dict[str, float] = {}
    count = len(left)
    while left:
        place = 0.05 + 0.4 * len(found) / count
        clashes = {kind: sum((kind, other) in apart for other in left) for kind in left}
        little = min(left, key=lambda kind: (clashes[kind], kind))
        much = max(left, key=lambda kind: (clashes[kind], kind))
        kind = much if clashes[little] else little
        found[kind] = FITS - place + 0.2 / count if clashes[little] else place
        left.remove(kind)
    return found


def _median_pair(speeds: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the median of the pairs that fitted, at most 1; (0, 0) if most did not."""
    fitting = [pair for pair in speeds if pair != (0.0, 0.0)]
    if 2 * len(fitting) < len(speeds):
        return 0.0, 0.0
    return min(1.0, median(a for a, _ in fitting)), min(1.0, median(b for _, b in fitting))


def _rows(file: Path, columns: Sequence[str]) -> Iterator[Mapping[str, str]]:
    """Yield the lines of a table."""
    rows = csv.DictReader(file.read_text().splitlines())
    missing = set(columns) - set(rows.fieldnames or ())
    if missing:
        raise ProfileError(f"{file} lacks the columns {', '.join(sorted(missing))}; add them or leave the file out")
    yield from rows


def _number(file: Path, row: Mapping[str, str], name: str) -> float:
    """Return a number of a table."""
    try:
        return float(row[name])
    except ValueError:
        raise ProfileError(f"{file}: {name} of {row} is {row[name]!r}; give a number") from None
