"""NCCL's communicators give their memory back with all ranks or with none. There is no NCCL here: it is played.

The store by which the ranks agree is PyTorch's own, and so is what is found of process groups that use no GPU.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from app_agent.training import communicators, figures, orders, parking, process_memory
from app_agent.training.communicators import Communicators, NotResumed
from app_agent.training.state import Identity
from app_agent.training.training_process import TrainingProcess
from tests.support.patience import PATIENCE_S

MIB = 2**20
#: A rank that waits for so long in a call of NCCL waits for a rank that does not call.
ALONE_S = 3.0


class Nccl:
    """One process group as NCCL has it: each call waits until all ranks have made it."""

    def __init__(self, world: int) -> None:
        self.ranks = [Backend(self, world) for _ in range(world)]
        self.meeting = threading.Barrier(world, timeout=ALONE_S)


class Backend:
    def __init__(self, group: Nccl, world: int) -> None:
        self.group, self.world = group, world
        self.suspended = False
        self.calls: list[str] = []
        self.fails: dict[str, int] = {}  #: calls that fail, and how often

    def name(self) -> str:
        return "nccl"

    def memory_stats(self) -> dict[str, int]:
        return {"suspend": 576 * MIB, "suspended": int(self.suspended), "persist": MIB, "total": 577 * MIB}

    def suspend(self) -> None:
        self._call("suspend")
        self.suspended = True

    def resume(self) -> None:
        self._call("resume")
        if not self.suspended:
            raise RuntimeError("invalid usage")
        self.suspended = False

    def _call(self, what: str) -> None:
        self.calls.append(what)
        if self.fails.get(what, 0) > 0:
            self.fails[what] -= 1
            if what == "suspend":
                self._meet()
            raise RuntimeError(f"{what} requires NCCL 2.29.7 or later")
        self._meet()

    def _meet(self) -> None:
        try:
            self.group.meeting.wait()
        except threading.BrokenBarrierError:
            raise AssertionError("a rank waited for another that never called") from None


@pytest.fixture(autouse=True)
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(communicators, "_given_up", False)
    communicators._tell_once.cache_clear()
    yield
    communicators._tell_once.cache_clear()


def ranks_of(*groups: tuple[str, Nccl], world: int = 3) -> list[Communicators]:
    """The communicators of each rank of the world, in these groups of all ranks."""
    store = dist.HashStore()
    return [
        Communicators({name: nccl.ranks[rank] for name, nccl in groups}, store, world, "g1-q1") for rank in range(world)
    ]


def together(*calls: Callable[[], object]) -> list[object]:
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result(PATIENCE_S) for future in [threads.submit(call) for call in calls]]


def suspended(nccl: Nccl) -> list[bool]:
    return [backend.suspended for backend in nccl.ranks]


def test_all_ranks_give_the_memory_back_together_and_take_it_again() -> None:
    everyone, pair = Nccl(3), Nccl(3)
    ranks = ranks_of(("0", everyone), ("1", pair))
    together(*(rank.suspend for rank in ranks))
    assert suspended(everyone) == suspended(pair) == [True] * 3
    assert [rank.kept_bytes() for rank in ranks] == [2 * MIB] * 3
    together(*(rank.resume for rank in ranks))
    assert suspended(everyone) == suspended(pair) == [False] * 3
    assert ranks[0].kept_bytes() == 2 * 577 * MIB
    together(*(rank.resume for rank in ranks))  # nothing is left to resume
    assert everyone.ranks[0].calls == ["suspend", "resume"]


def test_if_one_rank_cannot_be_parked_none_calls_nccl_and_none_waits_for_long() -> None:
    nccl = Nccl(3)
    ranks = ranks_of(("0", nccl))
    begun = time.monotonic()
    together(ranks[0].suspend, ranks[1].suspend, ranks[2].decline)
    assert time.monotonic() - begun < communicators.AGREE_S
    together(*(rank.resume for rank in ranks))
    assert [backend.calls for backend in nccl.ranks] == [[], [], []]


def test_ranks_wait_for_one_that_does_not_come_for_a_while_and_it_obeys_them_when_it_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(communicators, "AGREE_S", 0.05)
    nccl = Nccl(3)
    ranks = ranks_of(("0", nccl))
    together(ranks[0].suspend, ranks[1].suspend)
    ranks[2].suspend()
    assert [backend.calls for backend in nccl.ranks] == [[], [], []]


def test_a_rank_that_declines_too_late_does_not_undo_what_all_have_agreed_on() -> None:
    ranks = ranks_of(("0", Nccl(3)))
    together(*(rank.suspend for rank in ranks))
    ranks[0].decline()
    assert ranks[1]._settle("none")


def test_an_nccl_that_cannot_suspend_is_left_alone_and_told_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    nccl = Nccl(3)
    for backend in nccl.ranks:
        backend.fails = {"suspend": 1, "resume": 9}
    ranks = ranks_of(("0", nccl))
    together(*(rank.suspend for rank in ranks))
    together(*(rank.resume for rank in ranks))
    assert [backend.calls for backend in nccl.ranks] == [["suspend"]] * 3, "no rank waits, so none resumes"
    said = (
        "gpu-arbiter: NCCL's memory stays on the GPU while this job is parked: suspend requires NCCL 2.29.7 or later\n"
    )
    assert capsys.readouterr().err == said
    assert communicators._given_up


def test_if_suspend_fails_on_one_rank_all_resume_since_the_others_wait_for_it() -> None:
    nccl = Nccl(3)
    nccl.ranks[1].fails = {"suspend": 1}
    ranks = ranks_of(("0", nccl))
    together(*(rank.suspend for rank in ranks))
    assert suspended(nccl) == [True, False, True]
    together(*(rank.resume for rank in ranks))
    assert suspended(nccl) == [False] * 3
    assert communicators._given_up, "it is not tried again, on any rank"


def test_a_rank_without_memory_to_resume_stays_as_it_is_and_may_try_again() -> None:
    nccl = Nccl(3)
    nccl.ranks[1].fails = {"resume": 1}
    ranks = ranks_of(("0", nccl))
    together(*(rank.suspend for rank in ranks))

    def twice() -> None:
        with pytest.raises(NotResumed, match="still parked: resume requires"):
            ranks[1].resume()
        assert nccl.ranks[1].suspended
        ranks[1].resume()

    together(ranks[0].resume, twice, ranks[2].resume)
    assert suspended(nccl) == [False] * 3
    assert not communicators._given_up


class LostStore:
    """The store of a process that is gone."""

    def add(self, *_: object) -> int:
        raise RuntimeError("Connection reset by peer")

    compare_set = add


def test_without_the_store_nothing_is_suspended_and_parking_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    nccl = Nccl(2)
    team = Communicators({"0": nccl.ranks[0]}, LostStore(), 2, "g1-q1")
    team.suspend()
    team.decline()
    team.resume()
    assert nccl.ranks[0].calls == []
    assert "could not agree to suspend NCCL: Connection reset" in capsys.readouterr().err


# --- what is found ----------------------------------------------------------------------------------------------------


def play(monkeypatch: pytest.MonkeyPatch, groups: Mapping[str, object], world: int = 2) -> None:
    """As if these were the process groups of this process, by name."""
    monkeypatch.setattr(c10d, "_world", SimpleNamespace(pg_names={Group(each): name for name, each in groups.items()}))
    monkeypatch.setattr(c10d, "is_initialized", lambda: True)
    monkeypatch.setattr(c10d, "get_world_size", lambda: world)
    monkeypatch.setattr(c10d, "_get_default_store", dist.HashStore)


class Group:
    """A process group whose collectives on GPUs are made by this backend."""

    def __init__(self, backend: object) -> None:
        self._backend = backend

    def _get_backend(self, device: torch.device) -> object:
        assert device.type == "cuda"
        return self._backend


class Old:
    """A backend of a PyTorch that cannot suspend."""

    def name(self) -> str:
        return "nccl"


def found(rank: int = 0, world: int = 2) -> list[str]:
    return list(communicators.found(rank, world, "g1-q1")._groups)


def test_groups_are_taken_in_the_order_of_their_names_whatever_the_order_in_which_they_were_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nccl = Nccl(2)
    play(monkeypatch, {"2": nccl.ranks[0], "0": nccl.ranks[0], "1": SimpleNamespace(name=lambda: "gloo")})
    assert found() == ["0", "2"]
    assert communicators.held_bytes() == 2 * 577 * MIB


@pytest.mark.parametrize(("world", "ours"), [(1, 1), (4, 2)], ids=["one process", "several nodes"])
def test_nccl_is_suspended_only_if_it_has_several_ranks_and_all_are_on_this_node(
    monkeypatch: pytest.MonkeyPatch, world: int, ours: int
) -> None:
    play(monkeypatch, {"0": Nccl(2).ranks[0]}, world)
    assert found(world=ours) == []


def test_a_pytorch_that_cannot_suspend_is_told_of_once_and_by_one_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play(monkeypatch, {"0": Old()})
    assert found(rank=1) == []
    assert capsys.readouterr().err == ""
    assert found() == found() == []
    assert capsys.readouterr().err.count("PyTorch 2.13 or newer can suspend it") == 1
    assert communicators.held_bytes() == 0


def test_what_failed_once_is_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, {"0": Nccl(2).ranks[0]})
    monkeypatch.setattr(communicators, "_given_up", True)
    assert found() == []


def test_pytorch_keeps_its_process_groups_where_they_are_looked_for_and_gloo_is_no_nccl() -> None:
    program = """
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from app_agent.training import communicators
assert not communicators.found(0, 2, "k")._groups and communicators.held_bytes() == 0
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert list(c10d._world.pg_names.values()) == ["0"]
assert not dict(communicators._nccl_groups(c10d)) and communicators.held_bytes() == 0
assert c10d._get_default_store().compare_set("word", "", "all") == b"all"
backend = dist.group.WORLD._get_backend(__import__("torch").device("cpu"))
assert backend.name() == "gloo"
assert all(hasattr(backend, call) for call in ("suspend", "resume", "memory_stats"))
"""
    subprocess.run([sys.executable, "-c", program], check=True)


# --- at the boundary --------------------------------------------------------------------------------------------------


def test_they_are_suspended_before_the_state_is_moved_and_only_if_it_can_be_parked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor, sizes = torch.ones(10_000), list[int]()
    parked = parking.park(lambda: sizes.append(tensor.untyped_storage().nbytes()))
    parked.restore()
    assert sizes == [40_000]
    monkeypatch.setattr(parking, "_kept", None)
    monkeypatch.setattr(parking, "_available_bytes", lambda: 0)
    with pytest.raises(parking.ParkRefused):
        parking.park(lambda: sizes.append(0))
    assert sizes == [40_000]


class Team:
    """Communicators of which `resume` fails the first time."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def suspend(self) -> None:
        self.calls.append("suspend")

    def decline(self) -> None:
        self.calls.append("decline")

    def kept_bytes(self) -> int:
        return 7 * MIB

    def resume(self) -> None:
        self.calls.append("resume")
        if self.calls.count("resume") == 1:
            raise NotResumed("no memory yet")


def training(monkeypatch: pytest.MonkeyPatch, team: Team) -> TrainingProcess:
    """A process at a boundary, where it is told to park; its training thread is this test's."""
    one = TrainingProcess("/nowhere", Identity("me-1.0-a0", 0, 1, 2), [])
    one.step, one.can_park = 5, True
    asked: list[Any] = []
    monkeypatch.setattr(communicators, "found", lambda *what: asked.append(what) or team)
    order(one, "suspend", 1)
    return one


def order(one: TrainingProcess, do: str, seq: int) -> None:
    orders.take(one, {"do": do, "gen": 3, "seq": seq, "at_step": -1, "bytes": 0})


def said(one: TrainingProcess, seq: int) -> dict[str, Any]:
    """What was said to an order, once it was."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        for line in list(one.link._outbox):
            if line.get("seq") == seq:
                return line
        time.sleep(0.001)
    raise AssertionError(f"nothing was said to order {seq}: {list(one.link._outbox)}")


def test_a_rank_whose_communicators_are_not_back_stays_parked_and_goes_on_when_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor, team = torch.ones(10_000), Team()
    one = training(monkeypatch, team)
    thread = threading.Thread(target=one.obey, args=(None,), kwargs={"by_hook": False}, daemon=True)
    thread.start()
    assert said(one, 1)["residue_bytes"] >= 7 * MIB
    order(one, "resume", 2)
    assert (said(one, 2)["type"], said(one, 2)["reason"]) == ("refused", "no memory yet")
    assert tensor.untyped_storage().nbytes() == 0
    order(one, "resume", 3)
    assert said(one, 3)["type"] == "resumed"
    thread.join(PATIENCE_S)
    assert tensor.eq(1).all()
    assert team.calls == ["suspend", "resume", "resume"]


def test_a_rank_that_refuses_to_be_parked_says_so_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    team = Team()
    one = training(monkeypatch, team)

    def refuse(_: object) -> None:
        raise parking.ParkRefused("a CUDA graph is alive")

    monkeypatch.setattr(parking, "park", refuse)
    one.obey(None, by_hook=False)
    assert said(one, 1)["type"] == "refused"
    assert team.calls == ["decline"]


def test_the_memory_of_nccl_counts_where_room_is_looked_for_and_not_in_the_limit_of_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = TrainingProcess("/nowhere", Identity("me-1.0-a0", 0), [])
    one.nccl_bytes = 577 * MIB
    assert figures.progress(one)["peak_bytes"] == 0, "unknown"
    one.peak_bytes, one.reserved_bytes, one.devices = 1000 * MIB, 1200 * MIB, (0,)
    told = figures.progress(one)
    assert (told["peak_bytes"], told["reserved_bytes"]) == (1577 * MIB, 1777 * MIB)
    caps: list[int] = []
    monkeypatch.setattr(process_memory, "cap", lambda limit, _: caps.append(limit))
    for limit in (2577 * MIB, 0):
        one.cap = limit
        figures.enforce_cap(one)
    assert caps == [2000 * MIB, 0]
