"""The arbiter: parked jobs that the driver of their node can move are granted other GPUs there, and sent to them."""

from __future__ import annotations

import pytest

from arbiter.core.effects import EventRecord
from protocol.messages import GpuId, TaskOrder, TaskStatus
from tests.support.arbiter_site import SETTINGS, Site, gpu_id, task, wish
from tests.support.wishes import replace

ONE, TWO, THREE = (gpu_id("n1", index) for index in range(3))
POLICIES = ("backfill", "las", "srtf", "fitgpp", "drf", "gandiva")


def parked(gpus: tuple[str, ...] = (ONE,), others: tuple[str, ...] = (TWO, THREE), **facts: object) -> TaskStatus:
    return task("ana-1", 0, gpus, "suspended", other_gpus=tuple(map(GpuId, others)), **facts)


def ask(site: Site, gpus: tuple[str, ...] = (ONE,), others: tuple[str, ...] = (TWO, THREE)) -> None:
    """The parked job of ana-1 asks for its GPUs, or for as many others."""
    job = replace(wish("ana-1", 0, gpus), suspended=True, other_gpus=tuple(map(GpuId, others)))
    site.app("ana-1", demand=len(gpus), gang=len(gpus), jobs=[job])


def site_with(policy: str = "backfill", *, taken: tuple[str, ...] = (ONE,)) -> Site:
    """A site whose only node has three GPUs; bob-1 trains on those that are `taken`."""
    site = Site(replace(SETTINGS, policy=policy))
    site.node("n1", 3)
    if taken:
        site.app("bob-1", demand=len(taken), gang=len(taken), jobs=[wish("bob-1", 0, [])])
        site.wait(10.0)
        assert len(site.held("bob-1")) == len(taken)
        held = site.held("bob-1")
        site.app("bob-1", demand=len(taken), gang=len(taken), jobs=[wish("bob-1", 0, held)])
        site.node("n1", tasks=[task("bob-1", 0, held, step=9)], used=held)
    return site


def order(site: Site) -> TaskOrder:
    return next(order for order in site.plans["n1"].tasks if order.app == "ana-1")


def running(site: Site) -> TaskStatus:
    held = site.held("bob-1")
    return task("bob-1", 0, held, step=9)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_whose_gpu_another_has_is_granted_another_gpu_of_its_node(policy: str) -> None:
    site = site_with(policy)
    (own,) = site.held("bob-1")
    others = tuple(gpu for gpu in (ONE, TWO, THREE) if gpu != own)
    site.node("n1", tasks=[running(site), parked((own,), others)], used=[own])
    ask(site, (own,), others)
    site.wait(10.0)
    (given,) = site.held("ana-1")
    assert given in others
    job = replace(wish("ana-1", 0, [given]), suspended=True, other_gpus=tuple(map(GpuId, others)))
    site.app("ana-1", jobs=[job])
    assert (order(site).want, order(site).gpus) == ("run", (given,))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_job_that_cannot_be_moved_waits_for_its_own_gpu(policy: str) -> None:
    site = site_with(policy)
    (own,) = site.held("bob-1")
    site.node("n1", tasks=[running(site), parked((own,), ())], used=[own])
    ask(site, (own,), ())
    site.wait(10.0)
    assert site.held("ana-1") == []


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("own", [ONE, TWO, THREE])
def test_a_job_whose_own_gpu_is_free_is_not_moved(policy: str, own: str) -> None:
    site = site_with(policy, taken=())
    others = tuple(gpu for gpu in (ONE, TWO, THREE) if gpu != own)
    site.node("n1", tasks=[parked((own,), others)])
    ask(site, (own,), others)
    site.wait(10.0)
    assert site.held("ana-1") == [own]


def test_a_job_is_seen_as_bound_to_its_own_gpu_again_once_that_is_free() -> None:
    site = Site(replace(SETTINGS, policy="backfill"))
    site.node("n1", 4)
    site.app("bob-1", demand=3, gang=3, jobs=[wish("bob-1", 0, [])])
    site.wait(10.0)
    held = site.held("bob-1")
    site.app("bob-1", demand=3, gang=3, jobs=[wish("bob-1", 0, held)])
    there = parked((held[2],), (held[0], held[1]))
    site.node("n1", tasks=[task("bob-1", 0, held, step=9), there], used=held)
    ask(site, (held[2],), (held[0], held[1]))
    site.wait(10.0)
    assert site.arbiter.state.round > 1, "no round has looked at it, and found none that it can use"
    assert site.held("ana-1") == []
    site.app("bob-1", state="finished")
    site.node("n1", tasks=[there])
    site.wait(5.0)
    assert site.held("ana-1") == [held[2]]


def test_a_plan_pairs_each_new_gpu_with_one_that_the_task_leaves() -> None:
    site = site_with()
    (own,) = site.held("bob-1")
    kept, new = sorted({ONE, TWO, THREE} - {own})
    site.node("n1", tasks=[running(site), parked((own, kept), (new,))], used=[own])
    ask(site, (own, kept), (new,))
    site.wait(10.0)
    assert site.held("ana-1") == [kept, new]
    ask(site, (new, kept), (own,))
    assert order(site).gpus == (new, kept)


def test_an_app_that_asks_for_gpus_of_which_the_node_says_nothing_sends_no_task_there() -> None:
    site = site_with()
    (own,) = site.held("bob-1")
    others = tuple(gpu for gpu in (ONE, TWO, THREE) if gpu != own)
    site.node("n1", tasks=[running(site), parked((own,), ())], used=[own])
    ask(site, (own,), others)
    site.wait(10.0)
    (given,) = site.held("ana-1")
    ask(site, (given,), others)
    assert (order(site).want, order(site).gpus) == ("vacate", (own,))


def test_a_job_that_is_parked_on_a_quarantined_gpu_is_moved_and_not_ended() -> None:
    site = site_with(taken=())
    site.node("n1", tasks=[parked((ONE,), (TWO, THREE))], quarantined=[ONE])
    ask(site)
    site.wait(10.0)
    assert order(site).want != "stop"
    (given,) = site.held("ana-1")
    ask(site, (given,))
    assert (order(site).want, order(site).gpus) == ("run", (given,))


def test_where_a_job_went_is_told_in_its_story_and_as_an_event() -> None:
    site = site_with()
    (own,) = site.held("bob-1")
    others = tuple(gpu for gpu in (ONE, TWO, THREE) if gpu != own)
    site.node("n1", tasks=[running(site), parked((own,), others)], used=[own])
    ask(site, (own,), others)
    site.wait(10.0)
    (given,) = site.held("ana-1")
    ask(site, (given,), others)
    moved = task("ana-1", 0, [given], "resuming", step=11)
    effects = site.node("n1", tasks=[running(site), moved], used=[own, given])
    assert f"ana-1.0-a0 on n1 is resuming at step 11 on {given} instead of {own}" in site.told("ana-1")
    (event,) = [each for each in effects if isinstance(each, EventRecord) and each.task == moved.task]
    assert (event.kind, event.what) == ("moved", f"ana-1.0-a0 on n1, at step 11 on {given} instead of {own}")
