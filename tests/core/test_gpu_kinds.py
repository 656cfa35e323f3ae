"""A kind of GPUs as a wish: which names it means, and that no app ever has a GPU of another kind under any policy."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from arbiter.core.effects import Decided
from arbiter.core.registry import POLICIES
from arbiter.core.rounds import seats
from arbiter.core.rounds.decision import decide
from arbiter.core.rounds.views import make_view
from arbiter.core.seam import GpuNames
from arbiter.core.state.index import KINDS_KEPT
from arbiter.core.state.model import Active, ArbiterSettings, Draining, Refused
from arbiter.core.turn import Turn
from arbiter.core.whatif import Obstacle, WhatIf
from arbiter.ledger import Ledger
from arbiter.queries import Queries
from launch import views
from protocol import gpu_kinds
from protocol.messages import AppId, GpuId, Holdings, NodeId, Offer, Party, Probe, Query, Requirements, Utility
from tests.support.arbiter_site import AUCTION, SETTINGS, Site, gpu_id, sent, task, wish, with_auction

pytestmark = with_auction

GIB = 2**30
MIB = 2**20
A100, H200 = "NVIDIA A100-SXM4-80GB", "NVIDIA H200"
everywhere = pytest.mark.parametrize("policy", sorted(POLICIES))


# --- which GPUs a wish means ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu_type", "model"),
    [
        ("H200", "NVIDIA H200"),
        ("h200", "NVIDIA H200"),
        ("NVIDIA H200", "NVIDIA H200"),
        ("A100", A100),
        ("a100-sxm4", A100),
        ("a100_80gb", A100),
        ("nvidia_a100-sxm4-80gb", A100),
        ("H100", "NVIDIA H100 80GB HBM3"),
        ("h100 pcie", "NVIDIA H100 PCIe"),
        ("V100", "Tesla V100-SXM2-16GB"),
        ("rtx_4090", "NVIDIA GeForce RTX 4090"),
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("L40S", "NVIDIA L40S"),
    ],
)
def test_a_type_means_the_gpus_whose_name_has_its_words(gpu_type: str, model: str) -> None:
    assert gpu_kinds.is_of(model, gpu_type)


@pytest.mark.parametrize(
    ("gpu_type", "model"),
    [
        ("A10", A100),
        ("A100", "NVIDIA A10"),
        ("L40", "NVIDIA L40S"),
        ("H200", "NVIDIA GH200 480GB"),
        ("H100 PCIe", "NVIDIA H100 80GB HBM3"),
        ("4090", "NVIDIA GeForce RTX 3090"),
        ("SXM", A100),
        ("H200", ""),
    ],
)
def test_a_part_of_a_word_means_no_gpu(gpu_type: str, model: str) -> None:
    assert not gpu_kinds.is_of(model, gpu_type)


@pytest.mark.parametrize(
    ("asked", "reported", "suits"),
    [
        (80 * GIB, 81_559 * MIB, True),  # an H100 of 80 GB
        (80 * GIB, 81_920 * MIB, True),
        (16 * GIB, 15_109 * MIB, True),  # a T4 of 16 GB
        (48 * GIB, 46_068 * MIB, True),  # an L40S of 48 GB
        (80 * GIB, 143_771 * MIB, True),
        (80 * GIB, 72 * GIB, False),
        (24 * GIB, 16 * GIB, False),
        (1, 0, False),
    ],
)
def test_memory_is_asked_for_by_the_size_that_a_card_is_sold_as(asked: int, reported: int, suits: bool) -> None:
    assert gpu_kinds.suits(Requirements(min_memory_bytes=asked), H200, reported) is suits


def test_any_of_several_types_will_do_and_memory_counts_besides() -> None:
    wished = Requirements(gpu_types=("H100", "A100"), min_memory_bytes=60 * GIB)
    assert gpu_kinds.suits(wished, A100, 80 * GIB)
    assert not gpu_kinds.suits(wished, "NVIDIA A100-PCIE-40GB", 40 * GIB)
    assert not gpu_kinds.suits(wished, H200, 141 * GIB)
    assert gpu_kinds.in_words(wished) == "H100 or A100 with at least 60 GiB"
    assert gpu_kinds.in_words(Requirements(min_memory_bytes=GIB)) == "GPUs with at least 1 GiB"
    assert gpu_kinds.in_words(Requirements()) == ""


# --- a site of two kinds --------------------------------------------------------------------------------------------


def a_site(policy: str = "fifo", *, settings: ArbiterSettings = SETTINGS, **nodes: tuple[str, ...]) -> Site:
    """Return a site with these models of GPUs; by default two A100 on n1, two H200 on n2."""
    site = Site(replace(settings, policy=policy, node_timeout_s=1e6, app_timeout_s=1e6, admission_wait_s=1.0))
    for name, models in (nodes or {"n1": (A100, A100), "n2": (H200, H200)}).items():
        site.node(name, len(models), models=models)
    site.wait(2.0)
    return site


def come(site: Site, app: str, gang: int = 1, demand: int = 0, **more: object) -> list[str]:
    """Let an app come and have the rounds of some seconds; return the GPUs that it has."""
    known = {"left_s": 1000.0, "left_gpu_s": 1000.0 * gang, "ideal_s": 1000.0}
    effects = site.app(app, gang=gang, demand=demand or gang, **(known | more))  # type: ignore[arg-type]
    for _ in range(6):
        effects = site.play_round(effects) + site.wait(1.0)
    return site.held(app)


def names(node: str, *numbers: int) -> list[str]:
    return [gpu_id(node, number) for number in numbers]


@everywhere
def test_an_app_gets_gpus_of_the_kind_that_it_asks_for(policy: str) -> None:
    site = a_site(policy)
    assert come(site, "ana-1", 2, gpu_types=("H200",)) == names("n2", 0, 1)
    assert come(site, "bob-1", 2, gpu_types=("A100",)) == names("n1", 0, 1)


@everywhere
def test_an_app_whose_kind_is_held_by_others_waits_beside_free_gpus_and_keeps_nobody_from_them(policy: str) -> None:
    site = a_site(policy)
    come(site, "ana-1", 2, gpu_types=("H200",), spans=False)
    assert come(site, "bob-1", 2, gpu_types=("H200",)) == []
    assert come(site, "cem-1", 2) == names("n1", 0, 1)


@everywhere
def test_who_asks_for_more_than_there_is_of_its_kind_takes_no_part_of_the_rest(policy: str) -> None:
    site = a_site(policy, n1=(A100,) * 4, n2=(H200,) * 2)
    assert come(site, "ana-1", 1, demand=6, gpu_types=("H200",)) == names("n2", 0, 1)
    assert come(site, "bob-1", 1, demand=4) == names("n1", 0, 1, 2, 3)


@everywhere
def test_on_a_node_of_two_kinds_a_job_lies_on_its_kind_alone(policy: str) -> None:
    site = a_site(policy, n1=(A100, H200, A100, H200))
    assert come(site, "ana-1", 2, gpu_types=("H200",)) == names("n1", 1, 3)
    assert come(site, "bob-1", 1) in (names("n1", 0), names("n1", 2))


@everywhere
@pytest.mark.parametrize("kind", ["batch", "interactive"])
def test_no_job_makes_room_on_gpus_of_another_kind(policy: str, kind: str) -> None:
    site = a_site(policy, settings=replace(SETTINGS, interactive_share=1.0))
    come(site, "ana-1", 2, gpu_types=("A100",))
    come(site, "bob-1", 2, gpu_types=("H200",))
    assert come(site, "cem-1", 1, gpu_types=("H200",), kind=kind) in ([], names("n2", 0), names("n2", 1))
    assert site.held("ana-1") == names("n1", 0, 1), site.told("ana-1")


@pytest.mark.parametrize("policy", ["fifo", "gandiva", "themis", "fitgpp"])
def test_a_guest_comes_to_gpus_of_its_kind_only(policy: str) -> None:
    site = a_site(policy, settings=replace(SETTINGS, sharing="timeslice", seats=3), n1=(A100,), n2=(H200,))
    for owner, node in (("ana-1", "n1"), ("bob-1", "n2")):
        (gpu,) = come(site, owner, gpu_types=(("A100",) if node == "n1" else ("H200",)))
        site.app(owner, jobs=[wish(owner, 0, [gpu])], gpu_types=(("A100",) if node == "n1" else ("H200",)))
        running = task(owner, 0, [gpu], cooperative=True, can_checkpoint=True, step=5)
        site.node(node, tasks=[running], used=[gpu])
    (gpu,) = come(site, "cem-1", gpu_types=("H200",))
    assert gpu.startswith(gpu_id("n2", 0)), site.told("cem-1")


def test_an_app_books_time_slots_on_nodes_of_its_kind() -> None:
    site = a_site("oasis", n1=(A100,) * 4, n2=(H200,) * 2)
    utility = Utility(1000.0, 0.0, 0.0)
    come(site, "ana-1", 2, gpu_types=("H200",), utility=utility)
    booking = site.arbiter.state.apps[AppId("ana-1")].booking
    assert booking is not None
    assert {node for _, gpus in booking.time_slots for node, _ in gpus} == {"n2"}
    assert site.held("ana-1") == names("n2", 0, 1)


def test_a_wide_gang_gets_a_round_with_room_on_gpus_of_its_kind() -> None:
    """Leases there end one by one, and every app renews: without alignment the gang would never have room."""
    site = a_site(
        "astraea", settings=replace(SETTINGS, align_after_leases=1.0, lease_s=40.0), n1=(H200, H200), n2=(A100, A100)
    )
    rest = {"left_s": 1e6, "left_gpu_s": 1e6}
    for app in ("ana-1", "bob-1"):
        site.play_round(site.app(app, gpu_types=("H200",), **rest) + site.wait(13.0))  # type: ignore[arg-type]
    assert len(site.held("ana-1") + site.held("bob-1")) == 2
    site.app("cem-1", gang=2, demand=2, gpu_types=("H200",), **rest)  # type: ignore[arg-type]
    for _ in range(40):
        site.wait(5.0)
        for name in ("n1", "n2"):
            site.node(name)
        if "end together" in site.told("cem-1"):
            break
    assert "2 GPUs on n1 end together" in site.told("cem-1")


# --- a strict order -------------------------------------------------------------------------------------------------


def test_in_a_strict_order_what_the_first_waits_for_is_set_aside_and_the_rest_goes_on() -> None:
    site = a_site("fifo", n1=(A100, A100), n2=(H200, H200))
    come(site, "ana-1", 1, gpu_types=("H200",))
    assert come(site, "bob-1", 2, gpu_types=("H200",)) == []
    assert come(site, "cem-1", 1, gpu_types=("H200",)) == [], "it would keep bob-1 waiting"
    assert come(site, "dan-1", 1) == names("n1", 0)
    assert come(site, "eve-1", 2) == [], "it does not fit, and blocks those behind it"
    assert come(site, "fay-1", 1) == []


# --- the mechanism, whatever a policy says --------------------------------------------------------------------------


def test_a_policy_that_is_wrong_grants_no_gpu_of_another_kind() -> None:
    site = a_site()
    site.decides_late = True
    site.app("ana-1", gpu_types=("H200",))
    (asked,) = site.undecided
    decided = decide(asked)
    wrong = replace(decided.allocation, assign={GpuId(gpu_id("n1", 0)): AppId("ana-1")})
    site.handle(Decided(decided.round, decided.epoch, wrong))
    assert site.holder(gpu_id("n1", 0)) is None
    assert "in vain: that app asks for another kind" in site.told("rounds")


def test_an_app_that_asks_for_another_kind_later_leaves_what_it_has() -> None:
    site = a_site()
    (gpu,) = come(site, "ana-1", gpu_types=("H200",))
    site.app("ana-1", gpu_types=("A100",))
    assert isinstance(site.gpu_state(gpu), Draining)
    assert "asks for A100 now" in site.told("ana-1")


def test_a_gpu_that_drains_for_an_app_is_not_given_to_it_when_it_asks_for_another_kind_by_then() -> None:
    site = a_site("las", n1=(H200,), n2=(A100,))
    (gpu,) = come(site, "ana-1", left_gpu_s=1e6)
    come(site, "zed-1", gpu_types=("A100",))
    site.node("n1", used=[gpu])
    site.now += 7200.0
    come(site, "bob-1", gpu_types=("H200",))
    state = site.gpu_state(gpu)
    assert isinstance(state, Draining)
    assert state.promised_to == "bob-1"
    site.app("bob-1", gpu_types=("A100",))
    site.node("n1")
    site.wait(0.0)
    assert site.holder(gpu) != "bob-1"


def test_what_is_offered_and_the_time_alone_are_of_the_kind_that_an_app_asks_for() -> None:
    site = a_site("themis", settings=AUCTION, n1=(A100,) * 3, n2=(H200,) * 2)
    effects = site.app("ana-1", gang=1, demand=5, gpu_types=("H200",)) + site.wait(0.0)
    effects += site.app("bob-1", gang=1, demand=5) + site.wait(1.0)
    probes = {probe.app: probe.cluster_gpus for probe in sent(effects, Probe)}
    assert probes["ana-1"] == 2
    offers = sent(site.play_round(effects) + site.wait(2.0), Offer)
    for offer in offers:
        assert {gpu.node for gpu in offer.gpus} <= ({"n2"} if offer.app == "ana-1" else {"n1", "n2"})
    assert "ana-1" in {offer.app for offer in offers}
    told = {each.app: each.cluster_gpus for each in sent(site.wait(6.0), Holdings)}
    assert (told["ana-1"], told["bob-1"]) == (2, 5)


# --- what a user is told --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gang", "wished", "reason"),
    [
        (
            1,
            {"gpu_types": ("H100",)},
            "ana-1 needs 1 H100 on one node, and there is none of that kind; the GPUs here are NVIDIA A100-SXM4-80GB "
            "(1 GiB), NVIDIA H200 (1 GiB); ask for another kind",
        ),
        (
            3,
            {"gpu_types": ("H200",)},
            "ana-1 needs 3 H200 on one node, and the largest node has 2 of that kind; the GPUs here are NVIDIA "
            "A100-SXM4-80GB (1 GiB), NVIDIA H200 (1 GiB); ask for at most 2 with --gpus, or for another kind",
        ),
        (1, {"min_memory_bytes": 80 * GIB}, "ana-1 needs 1 GPU with at least 80 GiB on one node, and"),
    ],
)
def test_what_no_node_that_is_known_ever_has_is_refused(gang: int, wished: dict[str, object], reason: str) -> None:
    site = a_site(n1=(A100,) * 4, n2=(H200,) * 2)
    assert come(site, "ana-1", gang, **wished) == []
    state = site.arbiter.state.apps[AppId("ana-1")].state
    assert isinstance(state, Refused)
    assert state.reason.startswith(reason)


def test_an_app_whose_kind_is_out_of_service_is_admitted_and_waits() -> None:
    site = a_site()
    site.node("n2", sick=names("n2", 0, 1))
    assert come(site, "ana-1", 2, gpu_types=("H200",)) == []
    assert isinstance(site.arbiter.state.apps[AppId("ana-1")].state, Active)
    found = WhatIf(site.arbiter.snapshot(), AppId("ana-1"), site.now).binding()
    assert found == Obstacle(kind=True)
    assert "none of them is one; 2 of that kind are out of service" in str(explained(site, "ana-1")["waiting_for"])
    site.node("n2")
    site.wait(2.0)
    assert site.held("ana-1") == names("n2", 0, 1)


def explained(site: Site, app: str) -> dict[str, object]:
    queries = Queries(site.arbiter, Ledger(":memory:"))
    query = Query("q1", "explain", app)
    found = WhatIf(site.arbiter.snapshot(), AppId(app), site.now).binding()
    (send,) = queries.ask(Party("app", app.rsplit("-", 1)[0]), query, site.now, found=(found, False))
    document: dict[str, object] = msgspec.json.decode(send.message.document)  # type: ignore[union-attr]
    return document


def test_the_kind_is_named_as_what_binds_where_gpus_of_another_kind_are_free() -> None:
    site = a_site()
    come(site, "ana-1", 2, gpu_types=("H200",))
    come(site, "bob-1", 2, gpu_types=("H200",))
    told = explained(site, "bob-1")
    sentence = "it waits for 2 H200: 2 GPUs are free, and none of them is one; ana-1 (2) has others of that kind"
    assert told["waiting_for"] == sentence
    binding = told["binding"]
    assert isinstance(binding, dict)
    assert (binding["kind"], binding["text"]) == ("H200", sentence)
    assert told["gpu_types"] == ["H200"]
    assert views.explanation(told, site.now).count(sentence) == 1


def test_a_hole_that_is_too_small_is_told_by_its_kind() -> None:
    site = a_site("backfill", n1=(A100, A100), n2=(H200, H200))
    come(site, "ana-1", 1, gpu_types=("H200",))
    come(site, "bob-1", 2, gpu_types=("H200",))
    assert "it needs 2 H200 within one node, and the largest hole of that kind is 1" in site.told("bob-1")


def test_who_holds_the_kind_is_named_as_what_binds_where_nothing_is_free() -> None:
    site = a_site()
    come(site, "ana-1", 2, gpu_types=("H200",))
    come(site, "bob-1", 2)
    come(site, "cem-1", 2, gpu_types=("H200",))
    assert WhatIf(site.arbiter.snapshot(), AppId("cem-1"), site.now).binding() == Obstacle(apps=(AppId("ana-1"),))


def test_the_capacity_names_the_kinds_of_nodes() -> None:
    site = a_site(n1=(A100, H200), n2=(H200, H200), n3=(H200, H200))
    site.node("n1", sick=names("n1", 1))
    (send,) = Queries(site.arbiter, Ledger(":memory:")).ask(Party("app", "ana"), Query("q1", "capacity"), site.now)
    capacity = msgspec.json.decode(send.message.document)  # type: ignore[union-attr]
    fit = gpu_kinds.fit_of(Requirements(gpu_types=("H200",)), capacity)
    assert fit is not None
    assert (fit.known, fit.in_service) == (2, 2)
    assert [kind["nodes"] for kind in capacity["kinds"]] == [1, 2]
    lone = gpu_kinds.fit_of(Requirements(gpu_types=("A100",)), capacity)
    assert lone is not None
    assert lone.known == 1
    assert gpu_kinds.misfit(Requirements(gpu_types=("A100",)), 2, lone) == (
        "each job needs 2 A100 on one node, and the largest node has 1 of that kind; the GPUs here are "
        "NVIDIA A100-SXM4-80GB (1 GiB), NVIDIA H200 (1 GiB)",
        "ask for at most 1 with --gpus, or for another kind",
    )
    assert {NodeId(node) for node in site.arbiter.state.nodes} == {"n1", "n2", "n3"}


def test_apps_that_name_one_kind_can_use_the_very_same_gpus_also_after_one_was_ill() -> None:
    """A round deals with what they have in common once, and not for each of them."""
    site = a_site()
    index, wished = site.arbiter._index, Requirements(gpu_types=("H200",))
    before = index.suited(wished).gpus
    assert before == tuple(names("n2", 0, 1))
    assert before.names == frozenset(before)
    index.recount()
    assert index.suited(wished).gpus is before
    assert index.suited(Requirements(gpu_types=("A100",))).gpus == tuple(names("n1", 0, 1))
    for number in range(2 * KINDS_KEPT):
        index._kept(GpuNames([GpuId(f"GPU-{number}")]))
    assert len(index._names) == KINDS_KEPT


def test_apps_that_name_one_kind_are_offered_the_same_gpus_once() -> None:
    site = a_site("themis")
    for app in ("ada-1", "ada-2"):
        site.app(
            app,
            gang=1,
            demand=1,
            left_s=1000.0,
            left_gpu_s=1000.0,
            ideal_s=1000.0,
            gpu_types=("H200",),
        )
    turn = Turn(site.arbiter.state, site.now, site.arbiter._index)
    offers = seats.instead(turn, make_view(turn, seats.shown(turn), {}))
    assert offers[AppId("ada-1")] is offers[AppId("ada-2")]
    assert [gpu.gpu for gpu in offers[AppId("ada-1")]] == names("n2", 0, 1)
