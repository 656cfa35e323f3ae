"""Wide gangs: leases that end one by one are brought to one end, so that a round has room for a gang."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from arbiter.core.arbiter import Arbiter
from arbiter.core.effects import Decided
from arbiter.core.leases import alignment
from arbiter.core.seam import Allocation
from arbiter.core.state.model import ArbiterSettings, Draining, Leased
from arbiter.core.turn import Turn
from protocol.messages import Act, AppId, GpuId, Party, TenantId
from tests.support.arbiter_site import SETTINGS, Site, gpu_id

LEASE_S = 200.0
APART_S = 20.0  #: more than a round looks ahead
ASTRAEA = replace(SETTINGS, policy="astraea", lease_s=LEASE_S)

#: What the narrow ones say of themselves: much to do, with little to gain by it.
NARROW = {"left_s": 1e6, "left_gpu_s": 1e6, "loss_drop": 0.001}


def staggered(settings: ArbiterSettings, *, nodes: int = 1, gpus: int = 4) -> Site:
    """A full site: an app on each GPU, whose leases began one after the other."""
    site = Site(settings)
    for number in range(nodes):
        site.node(f"n{number}", gpus)
    for number in range(nodes * gpus):
        site.app(f"narrow{number}-1")
        run(site, APART_S)
    assert len(ends(site)) == len(set(ends(site))) == nodes * gpus
    return site


def run(site: Site, seconds: float, **wide: Mapping[str, Any]) -> None:
    """Let time pass while apps report and nodes obey; the wide ones are of tenants of their own."""
    for _ in range(int(seconds // 5)):
        for node in site.node_sizes:
            site.node(node)
        for app in list(site.arbiter.state.apps):
            if app.startswith("narrow") and app.removesuffix("-1") not in wide:
                site.play_round(site.app(app, **NARROW))
        for name, more in wide.items():
            told = {"tenant": TenantId(name), "demand": more["gang"]} | dict(more)
            site.play_round(site.app(f"{name}-1", **told))
        site.play_round(site.wait(5.0))


def ends(site: Site) -> list[float]:
    states = [gpu.state for gpu in site.arbiter.state.gpus.values()]
    return sorted(state.lease.expires_at for state in states if isinstance(state, Leased))


def end_of(site: Site, gpu: str) -> float:
    state = site.gpu_state(gpu)
    assert isinstance(state, Leased)
    return state.lease.expires_at


def served_after(
    site: Site, limit_s: float, others: Mapping[str, Mapping[str, Any]] = {}, **more: object
) -> float | None:
    """When a wide gang of a tenant of its own has GPUs; None: not within the limit."""
    began = site.now
    while site.now < began + limit_s:
        run(site, 5.0, **others, wide={"gang": 4, **more})
        if site.held("wide-1"):
            return site.now - began
    return None


def test_a_gang_as_wide_as_a_node_waits_for_ever_where_leases_end_one_by_one() -> None:
    assert served_after(staggered(replace(ASTRAEA, align_after_leases=0.0)), 12 * LEASE_S) is None


def test_it_is_served_at_most_a_lease_after_two_of_waiting() -> None:
    site = staggered(ASTRAEA)
    waited_s = served_after(site, 6 * LEASE_S)
    assert waited_s is not None
    assert 2 * LEASE_S < waited_s <= 4 * LEASE_S
    assert len(site.held("wide-1")) == 4
    assert "no round had room for its gang of 4 for" in site.told("wide-1")
    assert "the leases of 4 GPUs on n0 end together in" in site.told("wide-1")
    told = [site.told(gpu_id("n0", index)) for index in range(4)]
    assert sum("goes on until others end, for a gang of 4" in each for each in told) == 3


def test_only_the_leases_of_one_node_are_gathered_and_nobody_leaves_before_its_end() -> None:
    site = staggered(ASTRAEA, nodes=2)
    for _ in range(150):
        run(site, 5.0, wide={"gang": 4})
        if "end together" in site.told("wide-1"):
            break
    apart = {node: len({end_of(site, gpu_id(node, index)) for index in range(4)}) for node in ("n0", "n1")}
    assert sorted(apart.values()) == [1, 4]
    assert max(ends(site)) <= site.now + LEASE_S
    assert not any(app.tally.preemptions for app in site.arbiter.state.apps.values())


def test_nothing_is_gathered_for_a_narrow_gang() -> None:
    site = staggered(ASTRAEA)
    run(site, 5 * LEASE_S, narrow9={"gang": 1})
    assert "end together" not in site.told("narrow9-1")
    assert len(set(ends(site))) == 4
    assert site.arbiter.state.blocked == ()


def test_a_gang_whose_place_is_a_slot_gets_one() -> None:
    site = staggered(ASTRAEA)
    assert served_after(site, 6 * LEASE_S, gang=2, level_max="slot") is not None
    assert site.held("wide-1") in ([gpu_id("n0", 0), gpu_id("n0", 1)], [gpu_id("n0", 2), gpu_id("n0", 3)])


def test_leases_of_one_gang_still_end_together_when_some_are_gathered() -> None:
    site = Site(ASTRAEA)
    for node in ("n0", "n1"):
        site.node(node, 2)
    pair = {"gang": 2, "spans": True}
    run(site, APART_S, pair=pair)
    mates = site.held("pair-1")
    for app in ("narrow0-1", "narrow1-1"):
        site.app(app)
        run(site, APART_S, pair=pair)
    for _ in range(150):
        run(site, 5.0, pair=pair, wide={"gang": 3, "spans": True})
        assert len(site.held("pair-1")) == 2
        if "end together" in site.told("wide-1"):
            break
    assert len({end_of(site, gpu) for gpu in mates}) == 1
    assert len(set(ends(site))) < 3


@pytest.mark.parametrize("short_s", [30.0, 60.0, 150.0])
@pytest.mark.parametrize("kinds", [1, 6])
def test_jobs_that_come_and_go_on_what_is_gathered_and_gangs_of_other_kinds_do_not_put_it_off(
    short_s: float, kinds: int
) -> None:
    """Three long jobs and, on the fourth GPU of the node, one short job after the other."""
    site = staggered(ASTRAEA, gpus=3)
    site.node("n0", 4)
    began, number, since = site.now, 0, site.now
    levels = [(spans, level) for spans in (False, True) for level in ("machine", "rack", "cluster")]
    drawn_out: dict[str, float] = {}
    while site.now < began + 5 * LEASE_S:
        for place, (spans, level) in enumerate(levels[:kinds]):
            if site.now >= began + place * LEASE_S / 3:
                asks = {"tenant": TenantId(f"wide{place}"), "spans": spans, "level_max": level}
                site.app(f"wide{place}-1", gang=4, demand=4, **asks)
        for each in (number, number + 1):
            site.app(f"short{each}-1")
        run(site, 5.0)
        if not site.held(f"short{number}-1"):
            since = site.now
        elif site.now >= since + short_s:
            site.app(f"short{number}-1", state="finished")
            number += 1
        for gpu, end in site.arbiter.state.aligned.items():
            before = drawn_out.get(gpu, end)
            assert end == before or site.now > before - SETTINGS.renewal_lead_s
            drawn_out[gpu] = end
        if any(site.held(f"wide{place}-1") for place in range(kinds)):
            break
    assert site.now - began <= 4 * LEASE_S
    assert drawn_out


def test_leases_in_phase_that_always_go_to_others_do_not_put_it_off_for_ever() -> None:
    """Of the gang on n1 slaq expects most, so it goes on whenever there is room for one; n0 has whom it puts last."""
    site = staggered(replace(ASTRAEA, policy="slaq"))
    site.node("n1", 4)
    first = {"gang": 4, "left_s": 100.0, "left_gpu_s": 400.0, "loss_drop": 1e6}
    run(site, 10.0, first=first)
    assert len(site.held("first-1")) == 4
    waited_s = served_after(site, 8 * LEASE_S, {"first": first}, left_s=1e3, left_gpu_s=4e3, loss_drop=1.0)
    assert waited_s is not None
    assert len(site.held("first-1")) == 4
    assert site.held("wide-1") == [gpu_id("n0", index) for index in range(4)]


def test_nothing_is_gathered_for_an_app_that_is_silent() -> None:
    site = staggered(ASTRAEA)
    site.app("wide-1", gang=4, demand=4, tenant=TenantId("wide"))
    for _ in range(120):
        site.node("n0")
        for number in range(4):
            site.app(f"narrow{number}-1")
        site.wait(5.0)
    assert site.arbiter.state.aligned == {}
    assert len(set(ends(site))) == 4


def test_what_drains_for_who_has_won_it_ends_with_the_rest() -> None:
    """Newcomers win each lease as it ends, and whoever leaves takes a minute: so a place is hardly ever without one."""
    site = staggered(ASTRAEA)
    apps = [f"narrow{number}-1" for number in range(4)]
    began, told_at, number = site.now, None, 0
    while site.now < began + 6 * LEASE_S and not site.held("wide-1"):
        if sum(not site.held(app) for app in apps) < 2:
            apps.append(f"new{number}-1")
            number += 1
        for node in site.node_sizes:
            site.node(node, used=leaving(site, after_s=60.0))
        for app in apps:
            own = {"tenant": TenantId(app)} if app.startswith("new") else {}
            site.play_round(site.app(app, **NARROW, **own))
        site.play_round(site.app("wide-1", gang=4, demand=4, tenant=TenantId("wide")))
        site.play_round(site.wait(5.0))
        if told_at is None and "end together" in site.told("wide-1"):
            told_at = site.now
    assert told_at is not None
    assert site.held("wide-1"), site.told("wide-1")
    assert site.now - told_at <= LEASE_S + 120.0  # the last of them leaves for a minute, too


def leaving(site: Site, *, after_s: float) -> list[GpuId]:
    """The GPUs whose apps are still there, of those that were taken less than so long ago."""
    states = ((gpu.id, gpu.state) for gpu in site.arbiter.state.gpus.values())
    return [gpu for gpu, state in states if isinstance(state, Draining) and site.now < state.since + after_s]


class Dictated:
    """A site of which the test is the policy: a GPU in play goes to whom `plan` says, else to who has it."""

    def __init__(self, settings: ArbiterSettings, **gpus: int) -> None:
        self.site = Site(settings)
        self.site.decides_late = True
        for node, count in gpus.items():
            self.site.node(node, count)
        self.apps: dict[str, dict[str, Any]] = {}
        self.plan: dict[GpuId, str] = {}
        self.stay_s = 0.0

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.beat()

    def until_gathered(self) -> None:
        for _ in range(1000):
            self.beat()
            if self.site.arbiter.state.aligned:
                return
        raise AssertionError("nothing was aligned")

    def beat(self) -> None:
        site = self.site
        for app, more in self.apps.items():
            site.app(app, **more)
        for node in site.node_sizes:
            site.node(node, used=leaving(site, after_s=self.stay_s))
        site.wait(1.0)
        while site.undecided:
            ask = site.undecided.pop(0)
            chosen = {gpu.gpu: self.plan.get(gpu.gpu, gpu.holder) for gpu in ask.view.gpus}
            assign = {gpu: AppId(app) for gpu, app in chosen.items() if app}
            self.plan = {gpu: app for gpu, app in self.plan.items() if gpu not in assign}
            site.handle(Decided(ask.round, ask.epoch, Allocation(assign=assign, outcomes=(), unnamed="holder")))

    def give(self, app: str, *gpus: GpuId, **more: object) -> None:
        """Let an app come and have these as they come into play."""
        self.apps[app] = NARROW | more
        self.plan |= dict.fromkeys(gpus, app)
        self.run(APART_S)


def test_no_lease_is_cut_short_as_another_of_its_app_is_gathered() -> None:
    """An app of single GPUs wins one that is free, and one that drains and is aligned with its neighbour."""
    rig = Dictated(ASTRAEA, n0=2, n1=1)
    first, second, apart = gpu_id("n0", 0), gpu_id("n0", 1), gpu_id("n1", 0)
    rig.give("first-1", first)
    rig.run(30.0)
    rig.give("second-1", second)
    rig.apps["wide-1"] = {"gang": 2, "demand": 2, "tenant": TenantId("wide")}
    rig.apps["both-1"] = NARROW | {"demand": 2}
    while end_of(rig.site, first) > rig.site.now + SETTINGS.renewal_lead_s + 1.0:
        rig.beat()
    state = rig.site.arbiter.state
    state.blocked = tuple(replace(each, since=each.since - 2 * LEASE_S) for each in state.blocked)
    rig.stay_s = 40.0
    rig.plan = dict.fromkeys((first, apart), "both-1")
    rig.until_gathered()
    drains = rig.site.gpu_state(first)
    assert isinstance(drains, Draining)
    assert drains.promised_to == "both-1"
    was, together = end_of(rig.site, apart), rig.site.arbiter.state.aligned[first]
    rig.run(45.0)
    assert end_of(rig.site, first) == together
    assert end_of(rig.site, apart) == was


def test_a_gang_that_came_to_a_gathered_place_is_not_drawn_out_in_parts() -> None:
    """A pair wins a GPU there and one elsewhere; both end with the place, and so neither is aligned for another."""
    rig = Dictated(replace(ASTRAEA, align_after_leases=1.0), n0=3, n1=3)
    for app, gpu in {"a0-1": ("n0", 0), "a1-1": ("n0", 1), "b0-1": ("n1", 0), "b1-1": ("n1", 1)}.items():
        rig.give(app, gpu_id(*gpu))
    rig.apps["wide-1"] = {"gang": 3, "demand": 3, "tenant": TenantId("wide")}
    rig.until_gathered()
    (place,) = {gpu.rpartition("-")[0] for gpu in rig.site.arbiter.state.aligned}
    other = "GPU-n1" if place == "GPU-n0" else "GPU-n0"
    pair = [GpuId(f"{place}-2"), GpuId(f"{other}-2")]
    rig.give("pair-1", *pair, gang=2, demand=2, spans=True)
    assert rig.site.held("pair-1") == sorted(pair)
    aligned = rig.site.arbiter.state.aligned
    assert aligned[pair[0]] == aligned[pair[1]] == end_of(rig.site, pair[0]) == end_of(rig.site, pair[1])


def test_a_site_that_shares_no_more_gathers_again() -> None:
    site = Site(replace(ASTRAEA, sharing="timeslice"))
    site.node("n0", 4)
    run(site, 60.0)
    site.lead(ASTRAEA)
    run(site, 60.0)
    for number in range(4):
        site.app(f"narrow{number}-1")
        run(site, APART_S)
    assert served_after(site, 6 * LEASE_S) is not None


def test_no_lease_grows_beyond_one_that_begins_now_where_others_are_from_longer_times() -> None:
    site = Site(replace(ASTRAEA, lease_s=10 * LEASE_S))
    site.node("n0", 4)
    site.app("narrow0-1")
    run(site, APART_S)
    (old,) = ends(site)
    site.lead(ASTRAEA)
    for number in range(1, 4):
        site.app(f"narrow{number}-1")
        run(site, APART_S)
    for _ in range(150):
        run(site, 5.0, wide={"gang": 4})
        assert [end for end in ends(site) if end > site.now + LEASE_S] == [old]


def test_after_an_absence_what_is_gathered_ends_as_its_leases_do() -> None:
    site = staggered(ASTRAEA)
    for _ in range(150):
        run(site, 5.0, wide={"gang": 4})
        if site.arbiter.state.aligned:
            break
    (end,) = set(site.arbiter.state.aligned.values())
    site.now = end - 1.0
    site.lead(ASTRAEA)
    (later,) = set(ends(site))
    assert later > end
    assert set(site.arbiter.state.aligned.values()) == {later}


def test_how_long_a_gang_has_waited_is_not_forgotten() -> None:
    site = staggered(ASTRAEA)
    run(site, LEASE_S, wide={"gang": 4})
    (blocked,) = site.arbiter.state.blocked
    assert blocked.gang == 4
    assert site.now - blocked.since == LEASE_S
    assert Arbiter.restored(site.arbiter.snapshot()).state.blocked == (blocked,)
    assert site.replayed() == site.arbiter.snapshot()


def test_the_wait_of_a_gang_begins_anew_when_it_is_released_from_a_hold() -> None:
    site = staggered(ASTRAEA)
    owner = Party("app", "wide")
    site.app("wide-1", demand=4, gang=4, tenant=TenantId("wide"))
    site.hear(owner, Act("act-1", "hold", "wide-1"))
    run(site, LEASE_S, wide={"gang": 4})
    assert not site.arbiter.state.blocked
    site.hear(owner, Act("act-2", "release", "wide-1"))
    released_at = site.now
    run(site, 120.0, wide={"gang": 4})
    (blocked,) = site.arbiter.state.blocked
    assert blocked.since == released_at


def test_a_round_with_room_for_a_gang_leaves_a_part_of_its_wait_and_one_without_room_all_of_it() -> None:
    site = staggered(ASTRAEA)
    run(site, LEASE_S, wide={"gang": 4})
    turn = Turn(site.arbiter.state, site.now, site.arbiter._index)
    gpus = sorted(site.arbiter.state.gpus)
    alignment.look(turn, gpus[:3])
    assert [site.now - blocked.since for blocked in turn.state.blocked] == [LEASE_S], "three GPUs hold no gang of four"
    alignment.look(turn, gpus)
    assert [site.now - blocked.since for blocked in turn.state.blocked] == [pytest.approx(0.6 * LEASE_S)]
