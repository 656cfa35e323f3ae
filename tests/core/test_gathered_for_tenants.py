"""Under `astraea` GPUs that were brought together go to a gang whose tenant has not had more than what is fair."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from arbiter.core.policies.common.gathered import gang_bundles
from arbiter.core.policies.tenants.astraea import Astraea
from arbiter.core.seam import AppView, GpuView, TenantView, View
from protocol.messages import AppId, GpuId, TenantId
from tests.support.auctions import app_of, gpus_of, view_of

GPUS = gpus_of(4, 2)
NODE = GPUS[:4]
A, B = TenantId("a"), TenantId("b")
FAIR_S = 10_000.0


def app(name: str, tenant: TenantId, *, gang: int = 1, had_s: float = 0.0, gpu: GpuView | None = None) -> AppView:
    held = [] if gpu is None else [gpu.gpu]
    return replace(app_of(name, gang=gang, demand_max=gang, renewable=held), tenant=tenant, allocated=(had_s, 0.0))


def tenant(index: float, due: float = 3.0) -> TenantView:
    """One that has had so many times what is fair, and is due so many GPUs now."""
    return TenantView(fair_gpus=due, gpus_per_weight=1.0, allocated_gpu_s=index * FAIR_S, fair_gpu_s=FAIR_S)


def view(
    a: float = 1.0,
    b: float = 0.99,
    *,
    wide_had_s: float = 0.0,
    gathered: tuple[GpuView, ...] = NODE,
    a_due: float = 3.0,
) -> View:
    """Six singles, of the tenants by turns, have the six GPUs; a gang of four of tenant `a` waits. `b` is behind."""
    singles = [app(f"s{place}", (A, B)[place % 2], had_s=600.0, gpu=gpu) for place, gpu in enumerate(GPUS)]
    wide = app("wide", A, gang=4, had_s=wide_had_s)
    gpus = [replace(gpu, holder=single.app) for gpu, single in zip(GPUS, singles, strict=True)]
    made = replace(view_of(gpus, [*singles, wide], {}), tenants={A: tenant(a, a_due), B: tenant(b)})
    return replace(made, gathered=frozenset(gpu.gpu for gpu in gathered))


def wide_gets(round_: View) -> set[GpuId]:
    allocation = Astraea().allocate(round_, {})
    assert len(set(allocation.assign)) == len(allocation.assign)
    return {gpu for gpu, owner in allocation.assign.items() if owner == AppId("wide")}


def test_a_gang_whose_tenant_is_not_the_first_gets_the_gpus_that_were_brought_together() -> None:
    assert wide_gets(view(gathered=())) == set(), "dealt one by one they go to the other tenant first"
    assert wide_gets(view()) == {gpu.gpu for gpu in NODE}


@pytest.mark.parametrize(("due", "served"), [(4.0, True), (4.000000000000001, True), (4.5, False)])
def test_a_tenant_that_is_due_more_gpus_than_its_gang_has_waits_for_its_turn(due: float, served: bool) -> None:
    assert bool(wide_gets(view(a_due=due))) is served


def test_gpus_that_do_not_hold_the_gang_are_dealt_as_ever() -> None:
    assert wide_gets(view(gathered=NODE[:3])) == set()
    assert wide_gets(view(gathered=(*NODE[:2], *GPUS[4:]))) == set(), "the four lie on two nodes"


@pytest.mark.parametrize(("b", "served"), [(0.99, False), (1.2, True)])
def test_a_tenant_that_has_had_more_than_is_fair_waits_for_those_that_have_not(b: float, served: bool) -> None:
    assert bool(wide_gets(view(a=1.2, b=b, a_due=0.0))) is served


def test_what_a_gang_got_counts_for_its_tenant_at_once() -> None:
    allocation = Astraea().allocate(view(a=0.985), {})
    assert wide_gets(view(a=0.985)) == {gpu.gpu for gpu in NODE}
    others = {owner for owner in allocation.assign.values() if owner != "wide"}
    assert others <= {"s1", "s3", "s5"}, "its tenant was the first before, and is the second now"
    assert len(others) == 2


@pytest.mark.parametrize("held", [{"kept": GPUS[4:]}, {"renewable": tuple(gpu.gpu for gpu in GPUS[4:])}])
def test_an_app_that_holds_gpus_gets_none_in_this_way(held: dict[str, Any]) -> None:
    pair = replace(app("pair", A, gang=2), demand_max=4)
    for each, gets in ((pair, True), (replace(pair, **held), False)):
        assert bool(list(gang_bundles(view(), [each], lambda *_: True))) is gets


def test_free_gpus_come_first_and_each_gang_has_gpus_of_its_own() -> None:
    free = gpus_of(2, first=3)
    held = [replace(gpu, holder=AppId("s0")) for gpu in gpus_of(2)]
    made = replace(view_of([*held, *free], [app("s0", B)], {}), gathered=frozenset(gpu.gpu for gpu in (*held, *free)))
    pairs = [app(name, A, gang=2) for name in ("p0", "p1", "p2")]
    found = [(each.app, bundle) for each, bundle in gang_bundles(made, pairs, lambda *_: True)]
    assert found == [("p0", tuple(free)), ("p1", tuple(held))]
    assert [each.app for each, _ in gang_bundles(made, pairs, lambda *_: False)] == ["p0"], "free GPUs are no loss"


def test_the_gang_gets_the_gpus_that_were_brought_together_and_no_others() -> None:
    other = gpus_of(4, first=7)
    more = [app(f"m{place}", A, had_s=600.0, gpu=gpu) for place, gpu in enumerate(other)]
    base = view()
    gpus = [*base.gpus, *(replace(gpu, holder=each.app) for gpu, each in zip(other, more, strict=True))]
    made = replace(base, gpus=tuple(gpus), apps=(*base.apps, *more))
    assert wide_gets(made) == {gpu.gpu for gpu in NODE}
    others = replace(made, gathered=frozenset(gpu.gpu for gpu in other))
    assert wide_gets(others) == {gpu.gpu for gpu in other}


def test_what_one_gang_got_counts_before_the_next_gang_of_its_tenant() -> None:
    more = gpus_of(4, first=7)
    singles = [app(f"m{place}", B, had_s=600.0, gpu=gpu) for place, gpu in enumerate(more)]
    second = app("wide2", A, gang=4)
    base = view(a=1.06, a_due=4.0)
    gpus = [*base.gpus, *(replace(gpu, holder=each.app) for gpu, each in zip(more, singles, strict=True))]
    gathered = base.gathered | {gpu.gpu for gpu in more}
    made = replace(base, gpus=tuple(gpus), apps=(*base.apps, *singles, second), gathered=gathered)
    served = {owner for owner in Astraea().allocate(made, {}).assign.values() if owner.startswith("wide")}
    assert served == {"wide"}, "its tenant has had more than 1.05 times what is fair with the first"


def test_a_gang_that_has_had_gpus_before_waits_for_its_turn() -> None:
    assert wide_gets(view(wide_had_s=0.0)) != set()
    assert wide_gets(view(wide_had_s=1.0)) == set()


def test_the_others_keep_what_is_left_and_each_is_told_why() -> None:
    allocation = Astraea().allocate(view(), {})
    rest = {gpu.gpu: allocation.assign[gpu.gpu] for gpu in GPUS[4:]}
    assert rest == {"g01-00": "s1", "g01-01": "s3"}, "the other tenant comes first, and its apps by arrival"
    told = {outcome.app: outcome.reason for outcome in allocation.outcomes}
    assert told.keys() == {AppId("wide"), *(AppId(f"s{place}") for place in range(6))}
    assert told[AppId("wide")].endswith(": gets 4 GPUs, as leases were brought to one end for a gang like its own")
    assert "for a gang" not in told[AppId("s1")]


def test_the_published_rule_has_no_such_turns() -> None:
    class AsPublished(Astraea):
        until_fair = False

    allocation = AsPublished().allocate(view(), {})
    assert "wide" not in allocation.assign.values()
