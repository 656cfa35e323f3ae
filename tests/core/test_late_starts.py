"""An app that has waited long for its first GPUs gets a gang before the auction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, nan

import pytest
from msgspec.structs import replace

from arbiter.core.policies.themis.policy import Settings, Themis
from arbiter.core.seam import Allocation, AppView, GpuView, TenantView, View
from protocol.messages import AppId, GpuId, TenantId
from tests.support.auctions import app_of, bid_of, gpus_of, view_of

WITHIN_S, NOW = 3600.0, 10_000.0
GPUS = gpus_of(2, 2)


def runs(name: str, gpu: GpuView, tenant: str = "t") -> AppView:
    """Return an app that came early, and whose lease of a GPU ends."""
    app = app_of(name, demand_max=2, renewable=[gpu.gpu])
    return replace(app, leases=1, allocated=(900.0, 0.0), tenant=TenantId(tenant))


def waits(name: str, wait_s: float, *, gang: int = 1, tenant: str = "t") -> AppView:
    """Return an app that has had no GPU so far."""
    return replace(app_of(name, gang=gang, demand_max=gang), arrived_at=NOW - wait_s, tenant=TenantId(tenant))


RUNNING = tuple(runs(f"r{number}", gpu) for number, gpu in enumerate(GPUS))


def decided(*waiting: AppView, running: Sequence[AppView] = RUNNING, **changes: object) -> Allocation:
    """Return the decision where those that run are worse off by far, and bid, and those that wait are not asked to."""
    # What payments leave goes to the worst off, and by no lot.
    settings = Settings(fairness_knob=0.0, leftover="worst-off", **{"start_within_s": WITHIN_S} | changes)  # type: ignore[arg-type]
    return Themis(settings).allocate(round_of(*waiting, running=running), bids_of(running))


def round_of(*waiting: AppView, running: Sequence[AppView] = RUNNING) -> View:
    gpus = tuple(replace(gpu, holder=app.app) for gpu, app in zip(GPUS, running, strict=True))
    apps = sorted((*running, *waiting), key=lambda app: (app.arrived_at, app.app))
    rhos = {app.app: 9.0 if app in running else 0.01 for app in apps}
    view = view_of(gpus, apps, rhos)
    due = TenantView(fair_gpus=2.0, quota_gpus=2.0, allocated_gpu_s=1800.0, fair_gpu_s=1800.0, quota_gpu_s=1800.0)
    tenants = {app.tenant: due for app in apps}
    return replace(view, now=NOW, offered=tuple(app.app for app in running), tenants=tenants)


def bids_of(running: Sequence[AppView]) -> Mapping[AppId, object]:
    return {app.app: bid_of(app.app, 9.0, (1, "cluster", 2.0), (2, "cluster", 1.0)) for app in running}


def of(app: str, allocation: Allocation) -> set[GpuId]:
    return {gpu for gpu, owner in allocation.assign.items() if owner == app}


def reason(app: str, allocation: Allocation) -> str:
    (told,) = [outcome.reason for outcome in allocation.outcomes if outcome.app == app]
    return told


def test_an_app_that_has_waited_long_for_its_first_gpus_comes_before_the_auction() -> None:
    found = decided(waits("late", WITHIN_S), waits("young", WITHIN_S - 1.0))
    assert len(of("late", found)) == 1
    assert of("young", found) == set(), "its rho is the least, and it has not waited for so long"
    assert reason("late", found) == "gets 1 GPU before the auction, as it has waited for 3600 s without any"
    assert reason("young", found).endswith(
        "; it comes before the auctions once it has waited for 3600 s; 1 GPU went to late (1) before the auction"
    )
    assert len(found.assign) == len(GPUS), "the others are auctioned"


def test_the_oldest_comes_first_and_each_gets_one_gang() -> None:
    late = [waits(f"w{number}", WITHIN_S + 10.0 * number) for number in range(6)]
    found = decided(*late)
    assert set(found.assign.values()) == {"w5", "w4", "w3", "w2"}
    assert reason("w0", found).endswith(
        "; it has waited for 3600 s, so it comes before the auctions as far as there are GPUs for its gang; "
        "4 GPUs went to w2 (1), w3 (1), w4 (1), w5 (1) before the auction"
    )
    greedy = replace(waits("search", WITHIN_S), demand_max=4)
    assert len(of("search", decided(greedy))) < 4, "the rest is auctioned"


def test_a_gang_gets_all_of_it_or_nothing() -> None:
    found = decided(waits("first", 2 * WITHIN_S), waits("gang", WITHIN_S, gang=2), waits("wide", WITHIN_S, gang=4))
    assert len(of("first", found)) == 1
    assert len({gpu.node for gpu in GPUS if gpu.gpu in of("gang", found)}) == 1
    assert len(of("gang", found)) == 2
    assert of("wide", found) == set()


@pytest.mark.parametrize(
    "changed",
    [
        {"allocated": (1.0, 0.0)},
        {"leases": 1},
        {"kept": (replace(gpus_of(1)[0], gpu=GpuId("far/gpu-0")),), "demand_max": 2},
    ],
    ids=["it has had some", "it is promised some", "it holds one"],
)
def test_an_app_that_has_had_gpus_does_not_come_first(changed: dict[str, object]) -> None:
    app = replace(waits("app", 2 * WITHIN_S), **changed)
    found = decided(app)
    assert of("app", found) == set()
    assert "it comes before" not in reason("app", found)
    assert "waited long" not in reason("app", found)


def test_the_time_before_its_release_from_a_hold_does_not_count() -> None:
    held = replace(waits("held", 5 * WITHIN_S), released_at=NOW - WITHIN_S + 1.0)
    found = decided(held)
    assert not of("held", found)
    prospect = f"; it comes before the auctions once it has waited for {WITHIN_S:.0f} s since its release"
    assert prospect in reason("held", found)
    found = decided(replace(held, released_at=NOW - WITHIN_S))
    assert len(of("held", found)) == 1
    assert f"as it has waited for {WITHIN_S:.0f} s, since its release, without any" in reason("held", found)
    came_later = replace(held, arrived_at=NOW - 1.0, released_at=NOW - WITHIN_S)
    assert came_later.waits_since == NOW - 1.0
    assert not of("held", decided(came_later)), "an app that waited for another one came when that was over"


def test_an_app_that_does_not_answer_gets_nothing_and_is_promised_nothing() -> None:
    view = round_of(waits("late", WITHIN_S))
    silent = replace(view, rhos={app: rho for app, rho in view.rhos.items() if app != "late"})
    found = Themis(Settings(fairness_knob=0.0, start_within_s=WITHIN_S)).allocate(silent, bids_of(RUNNING))  # type: ignore[arg-type]
    assert of("late", found) == set()
    assert reason("late", found) == "did not answer the probe in time, so it took no part"


def test_an_app_that_was_put_to_the_end_of_the_queue_waits_its_turn() -> None:
    view = round_of(waits("late", WITHIN_S), waits("younger", WITHIN_S - 1.0))
    ends = sorted(view.apps, key=lambda app: app.app == "late")
    found = Themis(Settings(fairness_knob=0.0, start_within_s=WITHIN_S)).allocate(
        replace(view, apps=tuple(ends)),
        bids_of(RUNNING),  # type: ignore[arg-type]
    )
    assert len(of("late", found)) == 1, "a young app before it in the queue does not hide it"


def test_a_single_does_not_take_the_only_place_of_a_late_gang() -> None:
    gpus = (*gpus_of(2), *gpus_of(1, first=1))
    runner = runs("r", gpus[2])
    held = (*gpus[:2], replace(gpus[2], holder=runner.app))
    late = (waits("single", 2 * WITHIN_S), waits("gang", WITHIN_S, gang=2))
    view = replace(view_of(held, (runner, *late)), now=NOW, offered=(runner.app,))
    found = Themis(Settings(fairness_knob=0.0, start_within_s=WITHIN_S)).allocate(view, bids_of([runner]))  # type: ignore[arg-type]
    assert of("gang", found) == {gpu.gpu for gpu in gpus[:2]}
    assert of("single", found) == {gpus[2].gpu}


def test_an_app_that_wants_less_than_a_gang_is_not_late_and_is_in_the_way_of_no_other() -> None:
    short = replace(waits("short", 2 * WITHIN_S, gang=2), demand_max=1)
    found = decided(short, waits("gang", WITHIN_S, gang=2))
    assert len(of("gang", found)) == 2
    assert of("short", found) == set()
    assert "before the auctions" not in reason("short", found)


def test_a_late_single_takes_the_gpu_of_a_single_and_not_of_a_gang() -> None:
    gpus = gpus_of(3)
    gang = replace(app_of("gang", gang=2, demand_max=2, renewable=[gpu.gpu for gpu in gpus[:2]]), leases=2)
    single = runs("single", gpus[2])
    held = (*(replace(gpu, holder=gang.app) for gpu in gpus[:2]), replace(gpus[2], holder=single.app))
    view = replace(view_of(held, (gang, single, waits("late", WITHIN_S))), now=NOW, offered=(gang.app, single.app))
    found = Themis(Settings(fairness_knob=0.0, start_within_s=WITHIN_S)).allocate(view, bids_of([gang, single]))  # type: ignore[arg-type]
    assert of("late", found) == {gpus[2].gpu}


def test_a_bidder_is_told_of_the_gpus_that_went_before_the_auction() -> None:
    found = decided(*(waits(f"w{number}", WITHIN_S) for number in range(4)))
    assert reason("r0", found).endswith("; of the GPUs it held, 1 went to w0 (1)")
    (told,) = [outcome for outcome in found.outcomes if outcome.app == "w0"]
    assert (told.bid, told.won) == (False, 0)


def test_apps_are_told_that_all_gpus_went_before_the_auction() -> None:
    found = decided(*(waits(f"w{number}", WITHIN_S) for number in range(len(RUNNING) + 1)), waits("new", 0.0))
    told = reason("r0", found)
    assert told.startswith("bid, and no other GPU is in play; of the GPUs it held, 1 went to w")
    left = reason(f"w{len(RUNNING)}", found)
    assert left == (
        "did not bid, its rho 0.01 being not above 9, the least of the bidders, and no other GPU is in play; "
        f"it has waited for {WITHIN_S:.0f} s, so it comes before the auctions as far as there are GPUs for its gang; "
        "4 GPUs went to w0 (1), w1 (1), w2 (1), w3 (1) before the auction"
    )


def test_without_the_setting_it_waits_for_its_rho() -> None:
    found = decided(waits("late", NOW), start_within_s=inf)
    assert of("late", found) == set()
    assert "it comes before" not in reason("late", found)
    assert len(of("late", decided(waits("late", 0.0), start_within_s=0.0))) == 1


@pytest.mark.parametrize("wrong", [-1.0, nan])
def test_a_time_below_0_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match=r"start_within_s is .*; it must be 0 or more"):
        Settings(start_within_s=wrong)


def test_tenants_first_the_gpus_are_of_the_part_of_its_own_tenant() -> None:
    both = [runs("a0", GPUS[0], "a"), runs("a1", GPUS[1], "a"), runs("b0", GPUS[2], "b"), runs("b1", GPUS[3], "b")]
    late = [waits(f"late{number}", WITHIN_S, tenant="b") for number in range(4)]
    found = decided(*late, running=both, tenants_first=True)
    taken = {app: of(app, found) for app in ("a0", "a1", "b0", "b1", *(app.app for app in late))}
    of_a = taken["a0"] | taken["a1"]
    assert len(of_a) == 2, "tenant a has its part"
    assert len(set().union(*(taken[app.app] for app in late))) == 2
    assert taken["b0"] | taken["b1"] == set()


@pytest.mark.parametrize("wants", [1, 4])
def test_tenants_first_late_apps_are_no_reason_to_serve_their_tenant_before_an_equal_one(wants: int) -> None:
    both = [runs("a0", GPUS[0], "a"), runs("a1", GPUS[1], "a"), runs("a2", GPUS[2], "a"), runs("b0", GPUS[3], "b")]
    late = [replace(waits(f"late{number}", WITHIN_S, tenant="b"), demand_max=wants) for number in range(4)]
    view = round_of(*late, running=both)
    more = TenantView(fair_gpus=2.0, allocated_gpu_s=18_000.0, fair_gpu_s=1800.0)
    view = replace(view, tenants={TenantId("a"): replace(more, allocated_gpu_s=3600.0), TenantId("b"): more})
    found = Themis(Settings(fairness_knob=0.0, start_within_s=WITHIN_S)).allocate(view, bids_of(both))  # type: ignore[arg-type]
    assert len(of("a0", found) | of("a1", found) | of("a2", found)) >= 3, "both have had more than what is fair"


def test_tenants_first_late_apps_take_the_turns_of_the_worst_off_of_their_tenant() -> None:
    both = [runs("a0", GPUS[0], "a"), runs("a1", GPUS[1], "a"), runs("a2", GPUS[2], "a"), runs("b0", GPUS[3], "b")]
    late = [waits(f"late{number}", WITHIN_S, tenant="b") for number in range(3)]
    view = round_of(*late, running=both)
    more = TenantView(fair_gpus=2.0, allocated_gpu_s=18_000.0, fair_gpu_s=1800.0)
    view = replace(view, tenants={TenantId("a"): more, TenantId("b"): more}, rhos={**view.rhos, AppId("b0"): 20.0})
    found = Themis(Settings(fairness_knob=0.0, start_within_s=WITHIN_S)).allocate(view, bids_of(both))  # type: ignore[arg-type]
    assert [len(of(app.app, found)) for app in late] == [1, 0, 0], (
        "one of its apps is worse off than those of the other"
    )
    assert len(of("a0", found) | of("a1", found) | of("a2", found)) == 3


def test_tenants_first_what_a_late_gang_got_counts_before_the_next_gang_of_its_tenant() -> None:
    late = [waits(f"gang{number}", WITHIN_S, gang=2, tenant="b") for number in range(2)]
    view = round_of(*late)
    tenant = replace(view.tenants[TenantId("b")], allocated_gpu_s=1800.0, fair_gpu_s=1640.0)
    view = replace(view, tenants={**view.tenants, TenantId("b"): tenant}, gathered=frozenset(gpu.gpu for gpu in GPUS))
    found = Themis(Settings(fairness_knob=0.0, start_within_s=WITHIN_S)).allocate(view, bids_of(RUNNING))  # type: ignore[arg-type]
    assert sorted(len(of(app.app, found)) for app in late) == [0, 2]


def test_tenants_first_the_part_of_a_tenant_holds_the_gang_of_its_late_app() -> None:
    mixed = [runs("a0", GPUS[0], "a"), runs("b0", GPUS[1], "b"), runs("a1", GPUS[2], "a"), runs("b1", GPUS[3], "b")]
    found = decided(waits("gang", WITHIN_S, gang=2, tenant="b"), running=mixed, tenants_first=True)
    assert len({gpu.node for gpu in GPUS if gpu.gpu in of("gang", found)}) == 1
    assert len(of("a0", found) | of("a1", found)) == 2, "the other tenant has its part"
    young = decided(waits("gang", WITHIN_S - 1.0, gang=2, tenant="b"), running=mixed, tenants_first=True)
    assert of("gang", young) == set()


def test_tenants_first_a_late_gang_of_a_tenant_that_has_had_more_than_is_fair_waits_for_its_part() -> None:
    def given(had_gpu_s: float) -> set[GpuId]:
        view = round_of(waits("gang", WITHIN_S, gang=2, tenant="b"))
        tenants = {**view.tenants, TenantId("b"): replace(view.tenants[TenantId("b")], allocated_gpu_s=had_gpu_s)}
        view = replace(view, tenants=tenants, gathered=frozenset(gpu.gpu for gpu in GPUS[:2]))
        policy = Themis(Settings(fairness_knob=0.0, start_within_s=WITHIN_S))
        return of("gang", policy.allocate(view, bids_of(RUNNING)))  # type: ignore[arg-type]

    assert len(given(had_gpu_s=1800.0)) == 2
    assert given(had_gpu_s=18_000.0) == set()


def test_tenants_first_apps_are_told_that_all_gpus_went_before_the_auctions() -> None:
    late = [waits(f"{tenant}-late", WITHIN_S, gang=2, tenant=tenant) for tenant in ("a", "b")]
    view = replace(round_of(*late, waits("new", 1.0)), gathered=frozenset(gpu.gpu for gpu in GPUS))
    policy = Themis(Settings(fairness_knob=0.0, start_within_s=WITHIN_S))
    found = policy.allocate(view, bids_of(RUNNING))  # type: ignore[arg-type]
    assert of("a-late", found) | of("b-late", found) == {gpu.gpu for gpu in GPUS}
    told = "no other GPU is in play; 4 GPUs went to a-late (2), b-late (2) before the auction"
    assert reason("new", found) == told
    crowd = policy.allocate(replace(view, tells=False), bids_of(RUNNING))  # type: ignore[arg-type]
    assert crowd.rest == told, "the sentence for all apps of a round with too many to tell each of them"


def test_an_app_that_wants_nothing_is_not_told_that_it_comes_first() -> None:
    idle = replace(waits("idle", WITHIN_S), demand_max=0)
    assert "comes before" not in reason("idle", decided(idle))
    assert "waited" not in reason("idle", decided(idle))


@pytest.mark.parametrize("tenants_first", [False, True])
def test_a_late_gang_gets_the_gpus_that_were_brought_together_before_the_worst_off(tenants_first: bool) -> None:
    late, worse = waits("late", WITHIN_S, gang=2), waits("worse", 60.0, gang=2)
    view = round_of(late, worse)
    view = replace(
        view, rhos={**view.rhos, "worse": 99.0}, gathered=frozenset(gpu.gpu for gpu in GPUS[:2]),
        offered=(*(app.app for app in RUNNING), AppId("worse")),
    )  # fmt: skip
    bids = {**bids_of(RUNNING), AppId("worse"): bid_of("worse", 99.0, (2, "machine", 98.0))}
    settings = Settings(fairness_knob=0.0, tenants_first=tenants_first, start_within_s=WITHIN_S)
    found = Themis(settings).allocate(view, bids)  # type: ignore[arg-type]
    assert of("late", found) == {gpu.gpu for gpu in GPUS[:2]}
    assert reason("late", found).startswith("gets 2 GPUs before the auction, as it has waited for 3600 s")
    without = Themis(replace(settings, start_within_s=inf)).allocate(view, bids)  # type: ignore[arg-type]
    assert of("worse", without) == {gpu.gpu for gpu in GPUS[:2]}
