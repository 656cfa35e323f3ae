from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from arbiter.core.placement import lots
from arbiter.core.placement.assignment import PARTS_KEPT, Deal, Holes, pick
from arbiter.core.placement.locality import LOOSENESS, group, place_of
from arbiter.core.placement.lots import draw
from arbiter.core.seam import GpuNames, GpuView
from protocol.messages import LEVELS, GpuId, Level, locality
from tests.support.auctions import app_of, gpus_of, view_of
from tests.support.wishes import replace


def choose(
    pool: Sequence[GpuView],
    count: int,
    *,
    level_max: Level = "cluster",
    gang: int = 1,
    spans: bool = False,
    near: Sequence[GpuView] = (),
    held: Collection[GpuId] = (),
    avoid: Collection[GpuId] = (),
) -> tuple[GpuView, ...]:
    """What an app of such gangs is given of `pool`, which others claim `avoid` of."""
    app = replace(app_of("a-1", gang=gang, level_max=level_max), spans=spans)
    return tuple(pick(Holes(pool, dict.fromkeys(avoid, 1)), app, count, near=near, held=held))


def nodes(gpus: object) -> Counter[str]:
    return Counter(gpu.node for gpu in gpus)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("picked", "level"),
    [((), "slot"), ((0,), "slot"), ((0, 1), "slot"), ((0, 2), "machine"), ((0, 8), "rack"), ((0, 4), "cluster")],
)
def test_the_worst_pair_of_gpus_sets_the_locality(picked: tuple[int, ...], level: Level) -> None:
    cluster = gpus_of(4, 4, 4, slots=2, racks=2)
    assert locality(cluster[i] for i in picked) == level


def test_a_bundle_goes_where_it_leaves_the_smallest_hole() -> None:
    assert nodes(choose(gpus_of(4, 2, 3), 2)) == {"n01": 2}


def test_a_bundle_too_large_for_one_machine_takes_the_largest_first() -> None:
    assert nodes(choose(gpus_of(2, 4, 3), 6)) == {"n01": 4, "n00": 2}


def test_gpus_the_app_holds_come_first() -> None:
    cluster = gpus_of(4, 2)
    held = [cluster[1].gpu, cluster[3].gpu]
    assert {gpu.gpu for gpu in choose(cluster, 2, held=held)} == set(held)
    racks = gpus_of(2, 2, racks=2)
    assert nodes(choose(racks, 2, level_max="rack", held=[racks[2].gpu, racks[3].gpu])) == {"n01": 2}


def test_gpus_that_others_hold_come_last() -> None:
    cluster = gpus_of(2, 4)
    bundle = choose(cluster, 2, avoid=[cluster[0].gpu])
    assert nodes(bundle) == {"n01": 2}


def test_a_bundle_stays_in_one_slot_when_one_is_large_enough() -> None:
    cluster = gpus_of(4, slots=2)[1:]
    assert locality(choose(cluster, 2)) == "slot"


def test_no_gang_is_ever_split_over_machines() -> None:
    assert choose(gpus_of(1, 1, 1), 2, gang=2) == ()
    assert nodes(choose(gpus_of(3, 3, 1), 6, gang=2)) == {"n00": 2, "n01": 2}


def test_a_broken_gang_is_completed_before_another_is_begun() -> None:
    cluster = gpus_of(4, 4)
    assert nodes(choose(cluster[1:], 1, gang=2, near=cluster[:1])) == {"n00": 1}


def test_the_level_bounds_what_is_held_and_new_together() -> None:
    cluster = gpus_of(2, 4)
    assert nodes(choose(cluster[1:], 4, level_max="machine", near=cluster[:1])) == {"n00": 1}
    assert choose(cluster[2:], 4, level_max="machine", near=cluster[:1]) == ()
    assert choose(cluster[2:], 1, level_max="machine", near=[cluster[0], cluster[5]]) == ()


def test_a_spanning_bundle_takes_one_machine_then_one_rack_then_few_machines() -> None:
    assert nodes(choose(gpus_of(2, 4, 2), 4, gang=4, spans=True)) == {"n01": 4}
    # Racks r0: 2 + 2, r1: 3.
    assert nodes(choose(gpus_of(2, 3, 2, racks=2), 4, gang=4, spans=True)) == {"n00": 2, "n02": 2}
    # Racks r0: 1 + 2, r1: 3: neither has four.
    assert nodes(choose(gpus_of(1, 3, 2, racks=2), 4, gang=4, spans=True)) == {"n00": 1, "n01": 3}
    assert choose(gpus_of(1, 3, 2, racks=2), 4, level_max="rack", gang=4, spans=True) == ()
    assert choose(gpus_of(2, 1), 4, gang=4, spans=True) == ()


def test_what_a_spanning_bundle_has_counts_for_its_gangs_and_its_level() -> None:
    cluster = gpus_of(2, 2, 3, racks=2)  # r0: n00 and n02, r1: n01
    near = cluster[:1]
    assert nodes(choose(cluster[1:], 7, gang=4, spans=True, near=near)) == {"n00": 1, "n02": 2}
    assert nodes(choose(cluster[1:], 7, gang=3, spans=True, near=near, level_max="machine")) == {}
    assert nodes(choose(cluster[1:], 7, gang=2, spans=True, near=near, level_max="machine")) == {"n00": 1}


def test_a_larger_spanning_bundle_is_better_than_a_tighter_one() -> None:
    assert len(choose(gpus_of(4, 2, 2, racks=3), 8, gang=2, spans=True)) == 8


def test_a_spanning_bundle_stays_where_it_is_held_rather_than_move_closer_together() -> None:
    cluster = gpus_of(1, 1, 2)
    held = [gpu.gpu for gpu in cluster[:2]]
    assert [gpu.gpu for gpu in choose(cluster, 2, gang=2, spans=True, held=held)] == held


def test_a_spanning_bundle_lies_on_one_machine_when_that_is_enough_at_every_level() -> None:
    # Racks r0: 4 + 4, r1: 2 + 2, the tighter hole.
    for level in ("rack", "cluster"):
        assert len(nodes(choose(gpus_of(4, 2, 4, 2, racks=2), 4, gang=4, spans=True, level_max=level))) == 1
    # Where all of them are claimed, too: somebody must leave anyway.
    cluster = gpus_of(4, 2, 4, 2, racks=2)
    everyone = [gpu.gpu for gpu in cluster]
    assert len(nodes(choose(cluster, 4, gang=4, spans=True, level_max="rack", avoid=everyone))) == 1


def test_a_spanning_bundle_joins_what_the_app_has_in_its_rack() -> None:
    # Racks r0: n00 and n02, r1: n01, whose hole is the tightest and holds all it gets.
    cluster = gpus_of(2, 2, 3, racks=2)
    near = cluster[:2]
    assert nodes(choose(cluster[2:], 2, gang=2, spans=True, near=near)) == {"n02": 2}
    assert nodes(choose(cluster[2:4], 2, gang=2, spans=True, near=near)) == {"n01": 2}


def test_a_spanning_bundle_too_large_for_one_machine_takes_one_rack_even_if_its_app_held_gpus_that_are_gone() -> None:
    cluster = gpus_of(2, 3, 2, racks=2)
    assert nodes(choose(cluster, 4, gang=4, spans=True, held=[GpuId("gone")])) == {"n00": 2, "n02": 2}
    assert nodes(choose(cluster, 4, gang=4, spans=True, held=[cluster[2].gpu]))["n01"] > 0


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    slots=st.integers(1, 2),
    racks=st.integers(1, 2),
    count=st.integers(0, 12),
    gang=st.integers(1, 4),
    level=st.sampled_from(LEVELS),
    data=st.data(),
)
def test_every_bundle_keeps_its_bounds_and_is_as_large_as_gangs_and_places_allow(
    sizes: list[int], slots: int, racks: int, count: int, gang: int, level: Level, data: st.DataObject
) -> None:
    cluster = gpus_of(*sizes, slots=slots, racks=racks)
    held = data.draw(st.sets(st.sampled_from([gpu.gpu for gpu in cluster])))
    bundle = choose(cluster, count, level_max=level, gang=gang, held=[GpuId(gpu) for gpu in held])
    assert len({gpu.gpu for gpu in bundle}) == len(bundle) <= count
    assert all(found % gang == 0 for found in nodes(bundle).values())
    assert LOOSENESS[locality(bundle)] <= LOOSENESS[level]
    if level == "cluster":
        most = sum(size // gang * gang for size in sizes)
        assert len(bundle) == min(most, count // gang * gang)
    spread = choose(cluster, count, level_max=level, gang=gang, spans=True, held=[GpuId(gpu) for gpu in held])
    assert len({gpu.gpu for gpu in spread}) == len(spread) <= count
    assert LOOSENESS[locality(spread)] <= LOOSENESS[level]
    room = max(map(len, group(cluster, lambda gpu: place_of(gpu, level)).values()))
    assert len(spread) == min(room, count) // gang * gang
    if level != "slot" and not held and len(spread) <= max(sizes):
        assert len(nodes(spread)) <= 1


def test_lots_rank_only_equal_ones_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []

    def counted(seed: int, *names: str) -> float:
        drawn.append(names[-1])
        return draw(seed, *names)

    monkeypatch.setattr(lots, "draw", counted)
    keys = {"a": 2.0, "b": 1.0, "c": 1.0, "d": 3.0, "e": 3.0}
    order = lots.ranked(7, keys, key=keys.__getitem__, name=str, purpose="test")
    first = [next(order) for _ in range(3)]
    equal = sorted(("b", "c"), key=lambda name: (draw(7, "test", name), name))
    assert first == [*equal, "a"]
    assert sorted(drawn) == ["b", "c"]


ACTS = st.lists(
    st.tuples(st.sampled_from(["leave", "remove", "add", "level"]), st.integers(0, 11), st.integers(1, 3)), max_size=30
)


def changed(holes: Holes, departures: dict[GpuId, int], gpu: GpuView, act: str, weight: int) -> dict[GpuId, int]:
    """Do one act; return the departures after it."""
    if act == "leave":
        holes.add_departure(gpu.gpu, weight)
        return departures | ({gpu.gpu: weight} if gpu.gpu in holes else {})
    if act == "remove" and gpu.gpu in holes:
        holes.remove(gpu.gpu)
        return {each: weight for each, weight in departures.items() if each != gpu.gpu}
    if act == "add" and gpu.gpu not in holes:
        holes.add(gpu)
    elif act == "level":
        holes.level_departures()
        return dict.fromkeys(departures, 1)
    return departures


@given(ACTS)
def test_what_taking_gpus_of_a_node_would_disturb_follows_every_change(acts: list[tuple[str, int, int]]) -> None:
    gpus = list(gpus_of(6, 6))
    holes, departures = Holes(gpus, {gpus[0].gpu: 2}), {gpus[0].gpu: 2}
    for act, number, weight in acts:
        departures = changed(holes, departures, gpus[number], act, weight)
        for node, pool in holes.nodes.items():
            for take in range(1, len(pool) + 1):
                least = sorted(departures.get(each, 0) for each in pool)[:take]
                found = holes.disturbed(node, pool, take, ())
                assert found == (least[-1], sum(each > 0 for each in least))


@given(ACTS)
def test_the_best_node_is_the_one_that_a_look_at_all_would_find(acts: list[tuple[str, int, int]]) -> None:
    gpus = list(gpus_of(4, 4, 4))
    holes, departures = Holes(gpus, {gpus[0].gpu: 2}), {gpus[0].gpu: 2}
    for act, number, weight in acts:
        departures = changed(holes, departures, gpus[number], act, weight)
        sizes = {node: len(pool) for node, pool in holes.nodes.items()}
        vacant = {node: sum(gpu not in departures for gpu in pool) for node, pool in holes.nodes.items()}
        assert holes.largest() == max(sizes.values(), default=0)
        for count in (1, 2, 4):
            roomy = [(sizes[node], node) for node in sizes if vacant[node] >= count]
            assert holes.tightest(count) == (min(roomy)[1] if roomy else None)
        for left, chunk in ((1, 1), (2, 2), (3, 1), (6, 2)):
            keys = []
            for node, pool in holes.nodes.items():
                take = min(len(pool), left) // chunk * chunk
                least = sorted(departures.get(gpu, 0) for gpu in pool)[:take]
                if take:
                    disturbed = (max(least), sum(each > 0 for each in least))
                    fits = (0, *disturbed, len(pool)) if take == left else (1, -take, *disturbed, len(pool))
                    keys.append((fits, node, take))
            assert holes.best(left, chunk) == (min(keys)[1:] if keys else None)


DEALT = st.lists(
    st.tuples(
        st.sampled_from(["fill", "renew", "back", "aside", "depart", "level"]), st.integers(0, 5), st.integers(1, 4)
    ),
    max_size=20,
)


@example([("fill", 1, 2), ("back", 1, 1), ("fill", 3, 4)])
@given(DEALT)
def test_apps_that_can_use_the_same_gpus_get_what_each_would_if_it_named_them_alone(
    acts: list[tuple[str, int, int]],
) -> None:
    """What is left for them is kept between two of them: it must follow all that happens to what is left."""
    gpus = gpus_of(4, 4, 4)
    of_kinds = [GpuNames(gpu.gpu for gpu in gpus[:8]), GpuNames(gpu.gpu for gpu in gpus[4:])]
    apps = [app_of(f"a-{each}", gang=1 + each % 2, only=()) for each in range(6)]
    apps = [replace(app, only=of_kinds[each % 2]) for each, app in enumerate(apps)]
    apps[0] = replace(apps[0], renewable=tuple(gpu.gpu for gpu in gpus[2:6]))
    kept, alone = Deal(view_of(gpus, apps)), Deal(view_of(gpus, apps))
    for act, number, count in acts:
        own = replace(apps[number], only=tuple(apps[number].only or ()))  # no other app names this very object
        assert [gpu.gpu for gpu in kept._pool(apps[number])] == [gpu.gpu for gpu in alone._pool(own)]
        assert kept._pool(apps[number]).departures == alone._pool(own).departures
        for deal, app in ((kept, apps[number]), (alone, own)):
            match act:
                case "fill":
                    deal.fill(app, count * app.gang)
                case "renew":
                    deal.renew(app)
                case "back":
                    deal.take_back(app.app)
                case "aside":
                    deal.set_aside(app, 1)
                case "depart":
                    deal.left.add_departure(gpus[number].gpu, count)
                case _:
                    deal.left.level_departures()
        assert kept.assign == alone.assign
        assert kept.hole(apps[number]) == alone.hole(own)
        assert kept.misfit(apps[number]) == alone.misfit(own)


def test_what_is_left_is_kept_for_few_kinds() -> None:
    gpus = gpus_of(4)
    deal = Deal(view_of(gpus, []))
    for each in range(3 * PARTS_KEPT):
        deal.hole(replace(app_of(f"a-{each}"), only=GpuNames(gpu.gpu for gpu in gpus)))
    assert len(deal._parts) == PARTS_KEPT
