"""What the arbiter counts beside its apps: preemptions by reason, steps lost, claims that were off, idle GPU time."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from arbiter.core.arbiter import Arbiter
from arbiter.core.effects import EventRecord
from protocol.core import Tick
from tests.core.test_claim_audit import LEFT_S, Court, running
from tests.core.test_gpu_time import FIFO, a_running_app, tell
from tests.support.arbiter_site import SETTINGS, Effect, Site, gpu_id


def counted(site: Site) -> dict[str, int]:
    return dict(site.arbiter.state.counts.preemptions)


def idle_s(site: Site) -> float:
    return site.arbiter.state.history.idle.at(site.now)


def taken(effects: list[Effect]) -> int:
    """How many GPUs the events of preemption name."""
    return sum(len(each.gpus) for each in effects if isinstance(each, EventRecord) and each.kind == "preempted")


def test_each_gpu_that_is_taken_counts_once_for_its_reason() -> None:
    site = Site(replace(SETTINGS, policy="fifo"))
    site.node("n1", 2)
    site.node("n2", 2)
    site.app("ana-1", gang=2, demand=4)
    site.wait(0.0)
    assert (len(site.held("ana-1")), counted(site)) == (4, {})
    effects = site.node("n1", 2, sick=[gpu_id("n1", 0)]) + site.wait(0.0)
    assert (taken(effects), counted(site)) == (1, {"out-of-service": 1})
    effects = site.wait(40.0)  # both nodes are silent, and lost
    assert (taken(effects), counted(site)) == (3, {"out-of-service": 4})


def test_steps_that_an_app_lost_are_counted_once_and_outlive_it() -> None:
    site, gpu = a_running_app()
    for lost in (3, 3, 10):
        site.app("ana-1", steps_lost=lost)
    assert site.arbiter.state.counts.steps_lost == 10
    site.app("ben-1", steps_lost=4)
    site.app("ana-1", state="finished", steps_lost=10)
    tell(site, gpu, "exited", outcome="finished")
    assert site.arbiter.state.counts.steps_lost == 14


def test_a_claim_that_is_off_is_counted_once_per_change_for_its_owner() -> None:
    court = Court()
    for _ in range(3):
        assert court.round(running(), left_gpu_s=2 * LEFT_S)
    assert court.site.arbiter.state.counts.claims_off == {"ana": 1}
    court.round(running(), left_gpu_s=4 * LEFT_S)
    assert court.site.arbiter.state.counts.claims_off == {"ana": 2}


def test_gpus_that_are_nobodys_have_idle_time_and_no_others() -> None:
    site = Site(FIFO)
    site.node("n1", 3)
    site.wait(10.0)
    assert idle_s(site) == 30.0
    site.app("ana-1")
    site.wait(0.0)
    (gpu,) = site.held("ana-1")
    site.node("n1", used=[gpu])
    site.wait(10.0)
    assert idle_s(site) == 50.0, "one is leased"
    site.app("ana-1", state="finished")
    site.node("n1", used=[gpu])
    site.wait(5.0)
    assert idle_s(site) == 60.0, "it is being left, and still its app's"
    site.node("n1", used=[], sick=[gpu_id("n1", 2)])
    site.wait(10.0)
    assert idle_s(site) == 80.0, "a sick one is out of service"


def test_an_arbiter_of_before_counts_from_now_on() -> None:
    site, _ = a_running_app()
    site.wait(10.0)
    raw = msgspec.msgpack.decode(site.arbiter.snapshot())
    del raw["counts"], raw["history"]["idle"]
    again = Arbiter.restored(msgspec.msgpack.encode(raw))
    again.validate()
    assert again.state.history.idle.at(site.now) == 0.0
    again.handle(Tick(), site.now)
    again.validate()
    assert again.state.history.idle.at(site.now + 7.0) == 7.0, "one of two GPUs is idle"
    assert again.state.counts.preemptions == {}
