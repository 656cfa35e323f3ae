"""The index: what one node costs, and that counts kept step by step are those of a fresh look."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from arbiter.core.state import model
from arbiter.core.state.index import ENDS_KEPT, Feed, Index
from arbiter.core.state.model import Gpu, State
from arbiter.core.turn import Turn
from protocol.messages import GpuId
from tests.support.arbiter_site import SETTINGS, Site, gpu_id

NODES, GPUS = 30, 4


def _looks(site: Site, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many GPUs the arbiter looks at during some act, checks aside."""
    looks = 0
    real = model.in_service

    def counted(state: State, gpu: Gpu) -> bool:
        nonlocal looks
        looks += 1
        return real(state, gpu)

    with monkeypatch.context() as patch:
        patch.setattr(model, "in_service", counted)
        patch.setattr(site.arbiter, "validate", lambda: None)
        act()
    return looks


def test_a_node_that_comes_or_is_lost_costs_its_own_gpus_and_not_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = Site(replace(SETTINGS, beat_s=1000.0))
    for number in range(NODES):
        site.node(f"n{number}", GPUS)
    site.wait(SETTINGS.node_timeout_s - 1.0)
    came = _looks(site, lambda: site.node("late", GPUS), monkeypatch)
    assert 0 < came < GPUS * NODES / 2
    for number in range(1, NODES):
        site.node(f"n{number}", GPUS)
    lost = _looks(site, lambda: site.wait(2.0), monkeypatch)
    assert isinstance(site.arbiter.state.nodes["n0"].state, model.Lost)  # type: ignore[index]
    assert 0 < lost < GPUS * NODES / 2
    site.arbiter.validate()


def test_counts_follow_every_change_and_are_those_of_a_fresh_look() -> None:
    site = Site()
    site.node("n1", 2)
    site.node("n2", 2)
    assert site.arbiter._index.counts() == (4, 4)
    site.node("n1", 2, sick=[gpu_id("n1", 0)])
    assert site.arbiter._index.counts() == (3, 3)
    site.node("n1", 2)
    site.wait(SETTINGS.node_timeout_s + 1.0)  # n1 and n2 are lost: their GPUs are hoped for, and cannot be assigned
    assert site.arbiter._index.counts() == Index(site.arbiter.state).counts() == (4, 0)
    site.node("n2", 2)
    assert site.arbiter._index.counts() == (4, 2)


def test_a_feed_has_all_gpus_at_first_and_then_those_that_changed() -> None:
    site = Site()
    site.node("n1", 2)
    feed, index = Feed(), site.arbiter._index
    assert set(feed.take(index)) == {gpu_id("n1", 0), gpu_id("n1", 1)}
    assert not feed.take(index)
    site.app("ana-1")
    assert set(feed.take(index)) == {GpuId(gpu_id("n1", 0))}


def test_the_next_end_of_a_lease_is_known_without_keeping_all_that_ever_was() -> None:
    site = Site(replace(SETTINGS, policy="drf"))
    site.node("n1", 2)
    site.app("ana-1", gang=2, demand=2)
    index, turn = site.arbiter._index, Turn(site.arbiter.state, site.now, site.arbiter._index)
    first = index.ends[GpuId(gpu_id("n1", 0))]
    for later in range(1, 500):  # the other one ends later and later, behind the first
        known = site.arbiter.state.gpus[GpuId(gpu_id("n1", 1))]
        assert isinstance(known.state, model.Leased)
        turn.put_gpu(known, model.Leased(replace(known.state.lease, expires_at=first + later)))
        assert index.next_end == min(index.ends.values()) == first
    assert len(index._ending) <= ENDS_KEPT + 3 * len(index.ends)
