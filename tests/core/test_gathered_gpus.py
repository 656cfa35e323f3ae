"""GPUs that were brought together for a gang go to a gang that is worse off than their holders, before the auction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from msgspec.structs import replace

from arbiter.core.policies.themis.policy import Settings, Themis
from arbiter.core.seam import Allocation, AppView, GpuView, View
from protocol.messages import AppId, Bid, GpuId
from tests.support.auctions import app_of, bid_of, gpus_of, view_of

GPUS = gpus_of(4, 2)
NODE, OTHER = GPUS[:4], GPUS[4:]


def held(app: str, gpus: Sequence[GpuView]) -> tuple[GpuView, ...]:
    return tuple(replace(gpu, holder=AppId(app)) for gpu in gpus)


def names(gpus: Sequence[GpuView]) -> tuple[GpuId, ...]:
    return tuple(gpu.gpu for gpu in gpus)


def single(name: str, gpu: GpuView) -> AppView:
    return app_of(name, demand_max=1, renewable=[gpu.gpu])


WIDE = app_of("wide", gang=4, demand_max=4)
SINGLES = tuple(single(f"s{place}", gpu) for place, gpu in enumerate(GPUS))
RHOS = {"wide": 9.0} | {app.app: 1.0 + place / 10 for place, app in enumerate(SINGLES)}
#: What another GPU is worth to a single is much, and what four are worth to the gang, which has waited long, is little.
BIDS = {AppId("wide"): bid_of("wide", 9.0, (4, "machine", 8.9))} | {
    app.app: bid_of(app.app, 2.0, (1, "cluster", 1.0)) for app in SINGLES
}


def round_of(
    *,
    apps: Sequence[AppView] = (*SINGLES, WIDE),
    rhos: Mapping[str, float] = RHOS,
    gathered: Sequence[GpuView] = NODE,
) -> View:
    """Every single holds one GPU in play, four of them those of a node."""
    gpus = tuple(replace(gpu, holder=app.app) for gpu, app in zip(GPUS, SINGLES, strict=True))
    offered = tuple(app.app for app in apps)
    return replace(view_of(gpus, apps, rhos), gathered=frozenset(names(gathered)), offered=offered)


def decided(view: View, bids: Mapping[AppId, Bid] = BIDS, *, tenants_first: bool = False) -> Allocation:
    return Themis(Settings(fairness_knob=0.0, tenants_first=tenants_first)).allocate(view, bids)


def of(app: str, allocation: Allocation) -> set[GpuId]:
    return {gpu for gpu, owner in allocation.assign.items() if owner == app}


@pytest.mark.parametrize("tenants_first", [False, True])
def test_the_worst_off_gang_gets_the_gpus_that_were_brought_together(tenants_first: bool) -> None:
    lost = decided(round_of(gathered=()), tenants_first=tenants_first)
    assert of("wide", lost) == set(), "in the auction it does not win them"
    won = decided(round_of(), tenants_first=tenants_first)
    assert of("wide", won) == set(names(NODE))
    assert of("s4", won) | of("s5", won) <= set(names(OTHER))
    (outcome,) = (each for each in won.outcomes if each.app == "wide")
    assert set(outcome.gpus) == set(names(NODE))
    assert "brought to one end for a gang like its own: with a rho of 9" in outcome.reason
    assert (outcome.bid, outcome.won) == (True, 0), "it bid, and won nothing in the auction"


def test_apps_that_lose_them_are_told_to_whom_they_went() -> None:
    told = {outcome.app: outcome.reason for outcome in decided(round_of()).outcomes}
    assert all(told[app.app].endswith("; of the GPUs it held, 1 went to wide (1)") for app in SINGLES[:4])
    assert "wide" not in told["s4"].rpartition("of the GPUs it held")[2]


def test_a_gang_that_is_better_off_than_a_holder_has_to_win_them() -> None:
    view = round_of(rhos=RHOS | {"wide": 1.25})
    assert of("wide", decided(view)) == set(), "s3 holds one of them, and is worse off"


def test_a_gang_that_may_not_bid_is_not_served_first() -> None:
    view = replace(round_of(), offered=tuple(app.app for app in SINGLES))
    assert of("wide", decided(view, {app: bid for app, bid in BIDS.items() if app != "wide"})) == set()


def test_a_gang_whose_agent_is_silent_is_not_served_first() -> None:
    assert of("wide", decided(round_of(), {app: bid for app, bid in BIDS.items() if app != "wide"})) == set()


def test_a_gang_whose_bid_asks_for_nothing_is_not_served_first() -> None:
    assert of("wide", decided(round_of(), BIDS | {AppId("wide"): bid_of("wide", 9.0)})) == set()


def test_a_gang_that_can_use_certain_gpus_only_gets_no_others() -> None:
    bids = BIDS | {AppId("wide"): bid_of("wide", 9.0, (4, "machine", 8.9), only=names(OTHER))}
    assert of("wide", decided(round_of(), bids)) == set()


def test_a_bid_does_not_widen_what_an_app_can_use() -> None:
    bids = BIDS | {AppId("wide"): bid_of("wide", 9.0, (4, "machine", 8.9), only=names(GPUS))}
    view = round_of(apps=(*SINGLES, replace(WIDE, only=names((*NODE[:3], *OTHER)))))
    assert of("wide", decided(view, bids)) == set()


def test_a_gang_that_wants_less_than_a_gang_now_is_not_served_first() -> None:
    view = round_of(apps=(*SINGLES, replace(WIDE, demand_max=2)))
    assert of("wide", decided(view)) == set()


def test_an_app_of_one_gpu_has_to_win_it_in_the_auction() -> None:
    small = app_of("wide", gang=1, demand_max=1)
    reasons = [each.reason for each in decided(round_of(apps=(*SINGLES, small))).outcomes if each.app == "wide"]
    assert len(reasons) == 1
    assert "brought to one end" not in reasons[0]


def test_an_app_that_holds_gpus_is_not_served_first() -> None:
    kept = replace(WIDE, demand_max=8, kept=gpus_of(4, first=7))
    view = round_of(apps=(*SINGLES, kept))
    bids = BIDS | {AppId("wide"): bid_of("wide", 9.0, (8, "cluster", 8.9))}
    assert of("wide", decided(view, bids)) == set()


def test_an_app_whose_gpus_are_in_play_is_not_served_first() -> None:
    pair = app_of("pair", gang=2, demand_max=4, renewable=names(OTHER))
    gpus = (*(replace(gpu, holder=app.app) for gpu, app in zip(NODE, SINGLES, strict=False)), *held("pair", OTHER))
    apps = (*SINGLES[:4], pair)
    view = view_of(gpus, apps, RHOS | {"pair": 9.0})
    view = replace(view, gathered=frozenset(names(NODE)), offered=tuple(app.app for app in apps))
    bids = BIDS | {AppId("pair"): bid_of("pair", 9.0, (2, "machine", 8.9), (4, "cluster", 8.8))}
    assert of("pair", decided(view, bids)) == set(names(OTHER))


def test_an_app_that_bid_and_told_no_rho_is_not_served_first() -> None:
    told = {app: rho for app, rho in RHOS.items() if app != "wide"}
    assert of("wide", decided(round_of(rhos=told))) == set()


def test_a_gang_that_the_gpus_do_not_hold_is_not_served_first() -> None:
    assert of("wide", decided(round_of(gathered=(*NODE[:3], *OTHER)))) == set(), "its four must be on one node"


def test_of_two_gangs_the_worse_off_one_is_served_and_the_other_bids_for_the_rest() -> None:
    pair = app_of("pair", gang=2, demand_max=2)
    view = round_of(apps=(*SINGLES, WIDE, pair), rhos=RHOS | {"pair": 8.0})
    won = decided(view, BIDS | {AppId("pair"): bid_of("pair", 8.0, (2, "machine", 0.1))})
    assert of("wide", won) == set(names(NODE))
    (outcome,) = (each for each in won.outcomes if each.app == "pair")
    assert outcome.reason.startswith("bid and won 2 of the 2 GPUs in play")


def test_a_gang_that_is_served_first_gets_one_gang() -> None:
    more = replace(WIDE, demand_max=8, gang=2)
    won = decided(round_of(apps=(*SINGLES, more)), BIDS)
    assert len(of("wide", won)) == 2


def test_all_gpus_in_play_may_go_in_this_way() -> None:
    gpus = held("s0", NODE)
    holder = app_of("s0", demand_max=4, renewable=names(NODE))
    view = replace(view_of(gpus, [holder, WIDE], {"s0": 1.0, "wide": 9.0}), gathered=frozenset(names(NODE)))
    won = decided(replace(view, offered=(AppId("s0"), AppId("wide"))), {AppId("wide"): BIDS[AppId("wide")]})
    assert of("wide", won) == set(names(NODE))
    assert {outcome.app for outcome in won.outcomes} == {"s0", "wide"}
