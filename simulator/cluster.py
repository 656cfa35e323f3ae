"""Clusters to simulate: nodes, their racks, slots and GPUs, from a name, a TOML file or ``NODESxGPUS``.

A cluster file holds a few settings and one table per kind of node, most often two or three lines each::

    name = "mine"
    rack_size = 8          # nodes in one rack
    racks = "filled"       # filled in the order of the tables; "mixed": every rack has some of each kind

    [[machines]]
    count = 16
    gpus = 8
    slots = [4, 4]         # GPUs of each NVLink or PCIe island; islands of two if left out
    gpu_type = "v100"
    memory_gib = 16        # of one GPU
    cpus = 32              # of each node, where jobs ask for them; not bounded if left out
    host_memory_gib = 256  # likewise
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from protocol.config import in_words
from protocol.gpu_kinds import suits
from protocol.messages import NodeId, Requirements

#: Nodes of a rack by default: eight nodes of eight GPUs, as power and switches allow in practice.
RACK_SIZE = 8
#: GPUs of a slot by default: two and two behind one PCIe switch.
SLOT_SIZE = 2
#: More than any published cluster; a slip of the keyboard should not fill the memory.
GPUS_MAX = 65_536
GIB = 2**30

_GRID = re.compile(r"(\d+)x(\d+)", re.ASCII)
_SHIPPED = resources.files("simulator") / "clusters"


class ClusterError(ValueError):
    """The cluster cannot be used; the message names the field and the mend."""


class NodeSpec(Struct, frozen=True):
    """One node: `slots[i]` GPUs in its i-th slot, all of one type with `memory_bytes` each."""

    id: NodeId
    rack: str
    slots: tuple[int, ...]
    gpu_type: str
    memory_bytes: int
    cpus: float = 0.0  #: CPU cores; 0: unknown, so without bound
    host_bytes: int = 0  #: host memory, likewise

    @property
    def gpus(self) -> int:
        """The GPUs of this node."""
        return sum(self.slots)


class Cluster(Struct, frozen=True):
    """A cluster; its nodes in the order of their ids."""

    name: str
    nodes: tuple[NodeSpec, ...]
    whole_gpus: int = 0  #: GPUs of the cluster that it is a part of, for which drawn traces are made; 0: it is whole

    @property
    def gpus(self) -> int:
        """The GPUs of all nodes."""
        return sum(node.gpus for node in self.nodes)

    def gpus_for(self, wished: Requirements) -> int:
        """Return how many of the GPUs are of the kind that a user asked for."""
        return sum(node.gpus for node in self.nodes if suits(wished, node.gpu_type, node.memory_bytes))

    @property
    def gpus_of_largest_node(self) -> int:
        """The largest gang that one node can hold."""
        return max(node.gpus for node in self.nodes)


_Positive = Annotated[int, Meta(ge=1, le=GPUS_MAX)]


class _NodeKind(Struct, frozen=True, forbid_unknown_fields=True):
    """One kind of node in a cluster file."""

    count: _Positive
    gpus: _Positive
    slots: Annotated[tuple[_Positive, ...], Meta(min_length=1)] | None = None
    gpu_type: Annotated[str, Meta(min_length=1)] = "generic"
    memory_gib: Annotated[float, Meta(gt=0, le=4096)] = 16
    cpus: Annotated[float, Meta(ge=0, le=1e6)] = 0
    host_memory_gib: Annotated[float, Meta(ge=0, le=1e6)] = 0


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    """A cluster file."""

    name: Annotated[str, Meta(min_length=1)]
    machines: Annotated[tuple[_NodeKind, ...], Meta(min_length=1)]
    rack_size: _Positive = RACK_SIZE
    racks: Literal["filled", "mixed"] = "filled"


def parse_cluster(text: str) -> Cluster:
    """Return the cluster that `text` names.

    Parameters
    ----------
    text
        ``NODESxGPUS`` such as ``8x8`` (slots of two GPUs, racks of eight nodes), the name of a shipped cluster, or the
        path of a TOML file. With ``/2`` behind it, the half of the nodes of each kind; likewise other numbers.

    Raises
    ------
    ClusterError
        With the field that is wrong and the mend.
    """
    whole, slash, parts = text.rpartition("/")
    if slash and parts.isdecimal() and not Path(text).is_file():
        return part_of(parse_cluster(whole), int(parts))
    grid = _GRID.fullmatch(text)
    if grid:
        return _grid(text, int(grid[1]), int(grid[2]))
    if text in shipped():
        return from_toml((_SHIPPED / f"{text}.toml").read_text(), source=text)
    return from_toml(_read(text), source=text)


def part_of(cluster: Cluster, parts: int) -> Cluster:
    """Return one of so many equal parts of `cluster`: of each kind of node the first ones.

    Raises
    ------
    ClusterError
        If the nodes of a kind cannot be divided so.
    """
    kinds: dict[NodeSpec, list[NodeSpec]] = {}
    for node in cluster.nodes:
        kinds.setdefault(replace(node, id=NodeId(""), rack=""), []).append(node)
    for alike in kinds.values():
        if not parts or len(alike) % parts:
            raise ClusterError(
                f"the cluster {cluster.name}/{parts}: {len(alike)} nodes of {alike[0].gpus} GPUs are not {parts} equal "
                "parts; give a number that divides the nodes of each kind"
            )
    kept = {node for alike in kinds.values() for node in alike[: len(alike) // parts]}
    nodes = tuple(node for node in cluster.nodes if node in kept)
    return Cluster(f"{cluster.name}/{parts}", nodes, cluster.whole_gpus or cluster.gpus)


def shipped() -> tuple[str, ...]:
    """Return the names of the clusters that come with the simulator."""
    files = (Path(entry.name) for entry in _SHIPPED.iterdir())
    return tuple(sorted(file.stem for file in files if file.suffix == ".toml"))


def from_toml(text: str, *, source: str) -> Cluster:
    """Return the cluster that a file's `text` describes; `source` is its name in errors.

    Raises
    ------
    ClusterError
        With `source`, the field and the mend.
    """
    try:
        file = msgspec.convert(tomllib.loads(text), _File)
    except tomllib.TOMLDecodeError as error:
        raise ClusterError(f"{source} is not TOML: {error}; the head of simulator/cluster.py has an example") from None
    except msgspec.ValidationError as error:
        raise ClusterError(f"{source}: {in_words(error)}; the head of simulator/cluster.py has an example") from None
    for kind in file.machines:
        if kind.slots is not None and sum(kind.slots) != kind.gpus:
            wrong = f"slots of {kind.gpus}-GPU nodes are {list(kind.slots)}, which add up to {sum(kind.slots)}"
            raise ClusterError(f"{source}: {wrong}; make them add up to {kind.gpus}")
    _require_size(sum(kind.count * kind.gpus for kind in file.machines), f"{source}: machines")
    return Cluster(file.name, tuple(_nodes(file)))


def _grid(text: str, nodes: int, gpus: int) -> Cluster:
    """Return a cluster of equal nodes."""
    if nodes < 1 or gpus < 1:
        raise ClusterError(f"the cluster {text} is empty; give NODESxGPUS with both at least 1, such as 8x8")
    _require_size(nodes * gpus, f"the cluster {text}: NODESxGPUS")
    return Cluster(text, tuple(_nodes(_File(text, (_NodeKind(nodes, gpus),)))))


def _read(text: str) -> str:
    """Return the text of the file of that name."""
    try:
        return Path(text).read_text()
    except (OSError, UnicodeDecodeError, ValueError):
        names = ", ".join(shipped())
        raise ClusterError(
            f"the cluster {text!r} is no size, no readable file and no shipped name; "
            f"give NODESxGPUS such as 8x8, a TOML file, or one of {names}"
        ) from None


def _require_size(gpus: int, field: str) -> None:
    """Refuse clusters of more than `GPUS_MAX` GPUs."""
    if gpus > GPUS_MAX:
        raise ClusterError(f"{field} come to {gpus} GPUs; {GPUS_MAX} are the most that are simulated")


def _nodes(file: _File) -> Iterator[NodeSpec]:
    """Yield the nodes: ids of one width, so that their order as text is their order."""
    count = sum(kind.count for kind in file.machines)
    racks = -(-count // file.rack_size)
    width, rack_width = max(3, len(str(count))), max(2, len(str(racks)))
    kinds = [kind for kind in file.machines for _ in range(kind.count)]
    for index, kind in enumerate(kinds):
        rack = index % racks if file.racks == "mixed" else index // file.rack_size
        yield NodeSpec(
            id=NodeId(f"n{index + 1:0{width}}"),
            rack=f"r{rack + 1:0{rack_width}}",
            slots=kind.slots or _pairs(kind.gpus),
            gpu_type=kind.gpu_type,
            memory_bytes=round(kind.memory_gib * GIB),
            cpus=kind.cpus,
            host_bytes=round(kind.host_memory_gib * GIB),
        )


def _pairs(gpus: int) -> tuple[int, ...]:
    """Return slots of two GPUs, the last of one GPU for an odd number."""
    return (SLOT_SIZE,) * (gpus // SLOT_SIZE) + ((gpus % SLOT_SIZE,) if gpus % SLOT_SIZE else ())
