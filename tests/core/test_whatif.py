"""What is named as being in an app's way is: with it gone, the next round gives the app its GPUs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from arbiter.core.state.model import ArbiterSettings
from arbiter.core.whatif import Obstacle, WhatIf
from protocol.messages import AppId
from tests.support.arbiter_site import SETTINGS, Site, gpu_id, task, wish, with_auction

FIFO = replace(SETTINGS, policy="backfill", node_timeout_s=1000.0, app_timeout_s=1000.0)


def a_site(settings: ArbiterSettings = FIFO, **nodes: int) -> Site:
    site = Site(settings)
    for name, gpus in (nodes or {"n1": 4}).items():
        site.node(name, gpus)
    site.wait(6.0)
    return site


def run(site: Site, app: str, gang: int = 1, **more: object) -> list[str]:
    """Let an app come and train on what it gets."""
    site.play_round(site.app(app, gang=gang, demand=gang, **more) + site.wait(2.0))  # type: ignore[arg-type]
    gpus = site.held(app)
    if gpus:
        site.app(app, gang=gang, demand=gang, jobs=[wish(app, 0, gpus)], **more)  # type: ignore[arg-type]
    return gpus


def report(site: Site, **more: object) -> None:
    """The node says what runs on it."""
    state = site.arbiter.state
    holders = {app for app in state.apps if site.held(app)}
    tasks = [task(app, 0, site.held(app)) for app in sorted(holders)]
    site.node("n1", tasks=tasks, used=[gpu for each in tasks for gpu in each.gpus], **more)  # type: ignore[arg-type]


def binding(site: Site, app: str) -> Obstacle | None:
    return WhatIf(site.arbiter.snapshot(), AppId(app), site.now).binding()


def test_an_app_that_the_next_round_serves_has_nothing_in_its_way() -> None:
    site = a_site()
    site.decides_late = True
    site.app("ana-1")
    assert binding(site, "ana-1") == Obstacle()


def test_the_app_that_holds_what_another_needs_is_named() -> None:
    site = a_site()
    run(site, "ana-1", 1)
    run(site, "bob-1", 3)
    assert run(site, "cem-1", 2) == []
    assert binding(site, "cem-1") == Obstacle(apps=(AppId("bob-1"),))


def test_gpus_out_of_service_are_named_with_who_holds_the_rest() -> None:
    """`explain` hid that three GPUs of four were quarantined, and who had the other."""
    site = a_site()
    run(site, "ana-1", 1)
    sick = [gpu_id("n1", number) for number in (1, 2, 3)]
    report(site, quarantined=sick)
    run(site, "bob-1", 4)
    found = binding(site, "bob-1")
    assert found == Obstacle(apps=(AppId("ana-1"),), gpus=tuple(sick))


def test_only_as_many_sick_gpus_as_have_to_be_mended_are_named() -> None:
    site = a_site()
    sick = [gpu_id("n1", number) for number in (1, 2, 3)]
    report(site, quarantined=sick)
    run(site, "bob-1", 2)
    found = binding(site, "bob-1")
    assert found is not None
    assert (len(found.gpus), found.apps) == (1, ())


def test_a_lost_node_is_named() -> None:
    site = a_site(replace(FIFO, node_timeout_s=30.0), n1=1, n2=4)
    for _ in range(8):
        site.wait(5.0)
        site.node("n1")
    run(site, "ana-1", 4)
    assert binding(site, "ana-1") == Obstacle(nodes=("n2",))  # type: ignore[arg-type]


def test_who_comes_first_is_named_where_a_strict_order_holds_an_app_up() -> None:
    site = a_site(replace(FIFO, policy="fifo"))
    run(site, "ana-1", 2)
    run(site, "bob-1", 4)
    run(site, "cem-1", 2)
    found = binding(site, "cem-1")
    assert found is not None
    assert found.apps == (AppId("bob-1"),), "two GPUs are free, and bob-1 waits for all four"


def test_gpus_that_their_node_does_not_report_any_more_are_named() -> None:
    site = a_site(n1=4)
    run(site, "ana-1", 4)
    site.app("ana-1", state="finished")
    site.node("n1")
    site.node("n1", 2)
    run(site, "bob-1", 4)
    assert binding(site, "bob-1") == Obstacle(gpus=(gpu_id("n1", 2), gpu_id("n1", 3)))  # type: ignore[arg-type]


@with_auction
@pytest.mark.parametrize("policy", ["las", "srtf", "drf", "gandiva-fair", "hived", "themis"])
def test_under_every_kind_of_policy_the_holder_of_the_only_gpu_is_named(policy: str) -> None:
    site = a_site(replace(FIFO, policy=policy), n1=1)
    run(site, "ana-1", 1, left_s=10.0, left_gpu_s=10.0)
    run(site, "bob-1", 1, left_s=500.0, left_gpu_s=500.0)
    inquiry = WhatIf(site.arbiter.snapshot(), AppId("bob-1"), site.now)
    assert inquiry.binding() == Obstacle(apps=(AppId("ana-1"),))
    assert inquiry.estimate is (policy == "themis")


def test_trying_out_changes_nothing() -> None:
    site = a_site()
    run(site, "ana-1", 3)
    run(site, "bob-1", 2)
    before = site.arbiter.snapshot()
    binding(site, "bob-1")
    assert site.arbiter.snapshot() == before
    site.arbiter.validate()
