"""Clusters: by size, by name, from a file, and what is said of a wrong one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from simulator.cluster import GIB, Cluster, ClusterError, from_toml, parse_cluster, shipped

DATA = Path(__file__).resolve().parents[1] / "data" / "simulation"


def sizes(cluster: Cluster) -> dict[int, int]:
    return dict(Counter(node.gpus for node in cluster.nodes))


def racks(cluster: Cluster) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for node in cluster.nodes:
        found.setdefault(node.rack, []).append(node.gpus)
    return found


def test_a_size_gives_slots_of_two_and_racks_of_eight_nodes() -> None:
    cluster = parse_cluster("9x5")
    assert cluster.name == "9x5"
    assert cluster.gpus == 45
    assert [node.id for node in cluster.nodes] == [f"n00{number}" for number in range(1, 10)]
    assert {node.slots for node in cluster.nodes} == {(2, 2, 1)}
    assert racks(cluster) == {"r01": [5] * 8, "r02": [5]}
    assert parse_cluster("1x1").nodes[0].slots == (1,)


def test_ids_stay_in_order_beyond_a_thousand_nodes() -> None:
    ids = [node.id for node in parse_cluster("1024x8").nodes]
    assert ids[0] == "n0001"
    assert ids == sorted(ids)


def test_a_file_gives_each_kind_its_slots_type_and_memory() -> None:
    cluster = parse_cluster(str(DATA / "mixed.toml"))
    assert cluster.name == "mixed"
    assert cluster.gpus == 15
    assert cluster.gpus_of_largest_node == 6
    assert [(node.slots, node.gpu_type, node.memory_bytes) for node in cluster.nodes] == [
        ((4, 2), "a100", 40 * GIB),
        ((4, 2), "a100", 40 * GIB),
        ((2, 1), "generic", 16 * GIB),
    ]
    assert racks(cluster) == {"r01": [6, 3], "r02": [6]}


@pytest.mark.parametrize(
    ("name", "gpus", "machines", "rack_count"),
    [
        ("themis-32", 32, {4: 4, 2: 8}, 3),
        ("themis-64", 64, {4: 12, 2: 8}, 3),
        ("themis-168", 168, {8: 16, 4: 6, 1: 16}, 5),
        ("themis-256", 256, {8: 24, 4: 12, 1: 16}, 6),
        ("fitgpp-84x8", 672, {8: 84}, 11),
        ("astraea-100x8", 800, {8: 100}, 13),
        ("philly-140x8", 1120, {8: 140}, 18),
    ],
)
def test_the_papers_clusters_are_shipped(name: str, gpus: int, machines: dict[int, int], rack_count: int) -> None:
    cluster = parse_cluster(name)
    assert (cluster.name, cluster.gpus, sizes(cluster)) == (name, gpus, machines)
    assert len(racks(cluster)) == rack_count
    assert {node.slots for node in cluster.nodes if node.gpus == 8} <= {(2, 2, 2, 2)}


def test_every_shipped_file_is_named_as_its_cluster() -> None:
    assert set(shipped()) == {
        "themis-32", "themis-64", "themis-168", "themis-256", "fitgpp-84x8", "astraea-100x8", "philly-140x8",
    }  # fmt: skip
    assert all(parse_cluster(name).name == name for name in shipped())


def test_mixed_racks_have_machines_of_every_kind() -> None:
    assert [Counter(sizes_) for sizes_ in racks(parse_cluster("themis-64")).values()] == [
        Counter({4: 4, 2: 3}),
        Counter({4: 4, 2: 3}),
        Counter({4: 4, 2: 2}),
    ]


ONE = "[[machines]]\ncount = 1\ngpus = 4\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = 'x'\n", ("machines", "x.toml")),
        ("name = 'x'\nmachines = []\n", ("machines is too short",)),
        (ONE, ("name",)),
        ("name = 'x'\nracks = 'tall'\n" + ONE, ("racks is 'tall'",)),
        ("name = 'x'\nrack_size = 0\n" + ONE, ("rack_size must be at least 1",)),
        ("name = 'x'\n" + ONE + "slots = [2, 1]\n", ("slots", "add up to 3", "make them add up to 4")),
        ("name = 'x'\n" + ONE + "slots = []\n", ("slots",)),
        ("name = 'x'\n" + ONE + "memory_gib = 0\n", ("memory_gib must be more than 0;",)),
        ("name = 'x'\n" + ONE + "memory_gib = nan\n", ("memory_gib must be more than 0;",)),
        ("name = 'x'\n[[machines]]\ncount = 1\n", ("missing required field `machines[0].gpus`; add it",)),
        ("name = 'x'\n" + ONE + "slots = 'two'\n", ("machines[0].slots must be a list or nothing, and is text",)),
        ("name = 'x'\n" + ONE + "gpu = 4\n", ("unknown field `machines[0].gpu`",)),
        ("name = 'x'\n[[machines]]\ncount = 20000\ngpus = 4\n", ("machines", "80000 GPUs", "65536")),
        ("name = \n", ("not TOML",)),
    ],
)
def test_a_wrong_file_is_refused_with_field_and_mend(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ClusterError) as refused:
        from_toml(text, source="x.toml")
    sentence = str(refused.value)
    assert all(word in sentence for word in ("x.toml", *words)), sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0x8", ("0x8", "at least 1")),
        ("8x0", ("8x0", "at least 1")),
        ("65537x1", ("65537 GPUs",)),
        ("no-such", ("no-such", "8x8", "themis-64")),
        ("8x", ("8x", "NODESxGPUS")),
        ("", ("NODESxGPUS",)),
    ],
)
def test_a_wrong_name_is_refused_with_what_would_do(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ClusterError) as refused:
        parse_cluster(text)
    assert all(word in str(refused.value) for word in words), str(refused.value)
