"""What apps declared that they would take, beside what they took: for each app, and for its owner."""

from __future__ import annotations

import pytest

from arbiter.core.members import declarations
from arbiter.core.members.declarations import KEPT, OVERRUN_MAX, overrun
from arbiter.core.rounds import seats
from arbiter.core.rounds.views import make_view
from arbiter.core.state.index import Index
from arbiter.core.state.model import App, Declared, State
from arbiter.core.turn import Turn
from protocol.messages import AppId
from tests.support.arbiter_site import SETTINGS, Site, gpu_id, wish
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


# --- the demand to which an app is held -----------------------------------------------------------------------------


def says(site: Site, asks: int, *gpus: int) -> int:
    """An app asks for so many GPUs, its jobs having these; return what it is held to."""
    jobs = [wish("ana-1", index, [gpu_id("n0", gpu)]) for index, gpu in enumerate(gpus)]
    site.app("ana-1", demand=asks, jobs=jobs, left_s=500.0, left_gpu_s=500.0)
    return app_of(site, "ana-1").demand_held


def shown(site: Site) -> int:
    """What a policy is shown of it."""
    turn = Turn(site.arbiter.state, site.now, Index(site.arbiter.state))
    (view,) = make_view(turn, seats.shown(turn), {}).apps
    return view.demand_held


def test_an_app_is_held_to_what_it_asks_for_when_its_jobs_have_the_most() -> None:
    site = site_of(4)
    assert (says(site, 8), shown(site)) == (0, 8)
    assert (says(site, 6), shown(site)) == (0, 6), "its jobs have had none, so what it asks for now counts"
    site.wait(5.0)
    assert len(site.held("ana-1")) == 4
    assert says(site, 8, 0) == 8
    assert says(site, 4, 0, 1) == 4, "as its jobs have more, it tells less"
    assert (says(site, 8, 0), shown(site)) == (4, 4), "it may ask for more while it lacks GPUs again"
    assert says(site, 6, 0, 1) == 6, "a search may begin more trials on as many GPUs"
    assert says(site, 5, 0, 1) == 6
    assert site.replayed() == site.arbiter.snapshot()


def test_gpus_that_an_app_claims_and_that_are_not_its_own_do_not_count() -> None:
    site = site_of(2)
    assert (says(site, 8, 0, 1), shown(site)) == (0, 8)


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
