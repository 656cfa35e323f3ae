"""What apps declared that they would take, beside what they took: for each app, and for its owner."""

from __future__ import annotations

import pytest

from arbiter.core.members import declarations
from arbiter.core.members.declarations import KEPT, OVERRUN_MAX, overrun
from arbiter.core.state.model import App, Declared, State
from protocol.messages import AppId
from tests.support.arbiter_site import SETTINGS, Site
from tests.support.wishes import replace


def site_of(gpus: int = 1) -> Site:
    site = Site(replace(SETTINGS, lease_s=1000.0))
    site.node("n0", gpus)
    return site


def app_of(site: Site, name: str) -> App:
    return site.arbiter.state.apps[AppId(name)]


@pytest.mark.parametrize("basis", ["guess", "declared", "measured"])
def test_what_an_app_told_first_stands_whatever_it_calls_its_grounds(basis: str) -> None:
    site = site_of()
    site.app("ana-1", basis="guess")
    site.wait(5.0)
    granted_at = site.now - 5.0
    site.app("ana-1", left_s=500.0, left_gpu_s=500.0, basis=basis)
    declared_gpu_s = app_of(site, "ana-1").declared_gpu_s
    assert declared_gpu_s == pytest.approx(500.0 + site.now - granted_at)
    for left_s in (2000.0, 100.0):
        site.wait(5.0)
        site.app("ana-1", left_s=left_s, left_gpu_s=left_s, basis="measured")
        assert app_of(site, "ana-1").declared_gpu_s == declared_gpu_s


def test_where_gpus_are_shared_no_app_is_held_to_a_declaration() -> None:
    site = site_of()
    site.app("ana-1", left_s=500.0, left_gpu_s=500.0)
    assert app_of(site, "ana-1").declared_gpu_s == 500.0
    site.lead(replace(SETTINGS, lease_s=1000.0, sharing="timeslice"))
    site.app("ana-1", left_s=400.0, left_gpu_s=400.0)
    assert app_of(site, "ana-1").declared_gpu_s == 0.0


def test_an_app_that_does_not_say_what_is_left_declares_nothing() -> None:
    site = site_of()
    site.app("ana-1")
    assert app_of(site, "ana-1").declared_gpu_s == 0.0


@pytest.mark.parametrize(("ends", "counts"), [("finished", True), ("failed", False)])
def test_an_app_that_finishes_counts_for_its_owner_and_one_that_fails_does_not(ends: str, counts: bool) -> None:
    site = site_of()
    site.app("ana-1", left_s=4.0, left_gpu_s=4.0, basis="declared")
    site.wait(8.0)
    site.app("ana-1", state=ends, demand=0)
    site.node("n0")
    site.app("ana-2", left_s=4.0, left_gpu_s=4.0)
    site.app("bob-1", left_s=4.0, left_gpu_s=4.0)
    assert app_of(site, "ana-2").overrun == (pytest.approx(2.0) if counts else 1.0)
    assert app_of(site, "bob-1").overrun == 1.0
    assert site.replayed() == site.arbiter.snapshot()


def test_older_apps_count_less() -> None:
    site = site_of()
    site.arbiter.state.declarations["ana"] = Declared(100.0, 300.0)
    site.app("ana-1", left_s=4.0, left_gpu_s=4.0, basis="declared")
    site.wait(4.0)
    site.app("ana-1", state="finished", demand=0)
    known = site.arbiter.state.declarations["ana"]
    assert known.declared_gpu_s == pytest.approx(100.0 * KEPT + 4.0)
    assert known.had_gpu_s == pytest.approx(300.0 * KEPT + 4.0)


@pytest.mark.parametrize(
    ("declared", "had", "times"), [(0.0, 0.0, 1.0), (10.0, 5.0, 1.0), (10.0, 25.0, 2.5), (1.0, 1e9, OVERRUN_MAX)]
)
def test_an_owner_is_taken_at_its_word_or_to_need_more_but_not_without_end(
    declared: float, had: float, times: float
) -> None:
    state = State(declarations={"ana": Declared(declared, had)})
    assert overrun(state, "ana") == times
    assert declarations.overrun(state, "bob") == 1.0
