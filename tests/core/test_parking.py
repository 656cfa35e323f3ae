"""Parking moves every byte and loses none; aliases stay aliases."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Self

import numpy as np
import pytest
import torch

from app_agent.training import parking

MODEL_BYTES = 4 * (256 * 256 + 256)


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Dropout(0.5))
    return model, torch.optim.AdamW(model.parameters())


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums are the same to the bit however busy the machine is: no library divides them among its threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_training_goes_on_as_if_nothing_had_happened() -> None:
    model, optimizer = build()
    train(model, optimizer, steps=6)
    disturbed, its_optimizer = build()
    train(disturbed, its_optimizer)
    for _ in range(2):
        parking.park().restore()
    train(disturbed, its_optimizer)
    torch.testing.assert_close(list(disturbed.parameters()), list(model.parameters()), rtol=0.0, atol=0.0)


def test_weights_gradients_and_moments_are_gone_while_parked() -> None:
    model, optimizer = build()
    train(model, optimizer)
    weight = model[0].weight  # type: ignore[index]
    held = [weight, weight.grad, *(optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq"))]
    parked = parking.park()
    assert [tensor.untyped_storage().nbytes() for tensor in held] == [0, 0, 0, 0]
    assert parked.bytes >= 4 * 4 * 256 * 256
    parked.restore()
    assert [tensor.untyped_storage().nbytes() for tensor in held] == [4 * 256 * 256] * 4


def test_a_gradient_that_python_has_never_seen_is_parked_too() -> None:
    weight = torch.ones(10_000, requires_grad=True)
    (2 * weight).sum().backward()
    parked = parking.park()
    assert weight.grad is not None
    assert weight.grad.untyped_storage().nbytes() == 0
    parked.restore()
    assert weight.grad.eq(2).all()


def test_a_script_that_froze_its_objects_is_parked_whole_and_its_objects_stay_frozen() -> None:
    """The survey found nothing of it, and its memory stayed on the GPU for as long as it was parked."""
    program = """
import gc, torch
from app_agent.training import parking
weight = torch.nn.Parameter(torch.ones(10_000))
weight.sum().backward()
gc.freeze()
frozen = gc.get_freeze_count()
assert parking.survey().bytes >= 80_000, parking.survey().bytes
parked = parking.park()
assert weight.untyped_storage().nbytes() == weight.grad.untyped_storage().nbytes() == 0
parked.restore()
assert weight.eq(1).all() and weight.grad.eq(1).all()
assert gc.get_freeze_count() > 0.9 * frozen, (frozen, gc.get_freeze_count())
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_garbage_of_a_script_that_froze_its_objects_is_not_frozen_with_them() -> None:
    program = """
import gc, torch, weakref
from app_agent.training import parking
class Knot: pass
gc.freeze()
knot = Knot()
knot.itself = knot
gone = weakref.ref(knot)
del knot
parking.survey()
assert gone() is None
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("known", [True, False])
def test_what_cublas_keeps_is_given_back_before_the_cache_is_emptied(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """On a GPU; here PyTorch's calls are noted, and a build without this one is no obstacle."""
    calls: list[str] = []
    if known:
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: calls.append("workspaces"), raising=False)
    else:
        monkeypatch.delattr(torch._C, "_cuda_clearCublasWorkspaces", raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("cache"))
    parked = parking.Parked([], None, 0)
    parked._devices = (0,)
    parked._release()
    assert calls == (["workspaces", "cache"] if known else ["cache"])


@pytest.mark.parametrize(
    "alias",
    [
        lambda tensor: tensor[10:20],
        lambda tensor: tensor.t(),
        lambda tensor: tensor.detach(),
        torch.nn.Parameter,
    ],
)
def test_two_names_of_one_memory_stay_so_and_are_parked_once(alias: Callable[[torch.Tensor], torch.Tensor]) -> None:
    owner = torch.randn(100, 100)
    other, before = alias(owner), parking.park()
    before.restore()
    copy = other.detach().clone()
    parked = parking.park()
    parked.restore()
    assert parked.bytes - before.bytes <= copy.nbytes  # the copy, and not the alias
    assert torch.equal(other.detach(), copy)
    owner.zero_()
    assert not other.detach().any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_every_type_of_number_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (9_999,)).to(dtype)
    copy = tensor.clone()
    parking.park().restore()
    assert torch.equal(tensor, copy)


def test_not_a_number_keeps_its_payload() -> None:
    tensor = torch.full((4_096,), float("nan"))
    tensor.view(torch.int32)[7] = 0x7FC0BEEF
    parking.park().restore()
    assert tensor.view(torch.int32)[7] == 0x7FC0BEEF


def test_memory_that_others_hold_by_address_stays_and_is_counted() -> None:
    from_numpy = torch.from_numpy(np.ones(100_000))
    exported = torch.ones(100_000)
    array = exported.numpy()
    shared = torch.ones(100_000).share_memory_()
    tensors = [from_numpy, exported, shared]
    parked = parking.park()
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [800_000, 400_000, 400_000]
    assert parked.residue_bytes >= 1_600_000
    parked.restore()
    array[:] = 5
    assert exported.eq(5).all()


def test_what_has_no_memory_of_its_own_is_left_alone() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Wrapper(torch.Tensor):
        """A tensor around another, as DTensor is: it claims memory that it does not have."""

        def __new__(cls, inner: torch.Tensor) -> Self:
            return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

        @classmethod
        def __torch_dispatch__(cls, *_: object) -> None:
            pytest.fail("parking looked into a wrapper")

    wrapper = Wrapper(torch.ones(100_000))
    with FakeTensorMode():
        fake = torch.empty(100_000)
    others = [torch.empty(100_000, device="meta"), torch.eye(300).to_sparse(), torch.empty(0), fake, wrapper]
    parking.park().restore()
    assert [len(tensor) for tensor in others] == [100_000, 300, 0, 100_000, 100_000]


class Graph(torch.cuda.CUDAGraph):
    """As PyTorch's own, for a machine that has no CUDA."""

    def __new__(cls) -> Self:
        return object.__new__(cls)

    def __init__(self) -> None:
        pass


def test_a_living_cuda_graph_is_refused_with_the_mend_and_nothing_is_touched() -> None:
    tensor, graph = torch.ones(10_000), Graph()
    with pytest.raises(parking.ParkRefused, match=r"CUDA graph is alive.*checkpoint"):
        parking.park()
    assert tensor.eq(1).all()
    del graph


class Search:
    """Searches of this process, where PyTorch's allocator counts as it does on a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.walks = 0
        self._weight = torch.ones(10_000)  # a count of nothing is no count
        self._objects = parking._objects
        monkeypatch.setattr(parking, "_known", None)
        monkeypatch.setattr(parking, "_objects", self._walk)
        monkeypatch.setattr(parking, "_asked_bytes", self._asked_bytes)

    def _walk(self) -> list[object]:
        self.walks += 1
        return self._objects()

    def _asked_bytes(self, torch: ModuleType, device_type: str) -> int:
        tensors, _ = parking._look(torch, self._objects())
        found = parking._Found(parking._storages(torch, tensors, device_type), device_type)
        return sum(storage.nbytes() for storage in found.storages)


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Search:
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", lambda self: None)
    return Search(monkeypatch)


@pytest.mark.usefixtures("one_thread")
def test_later_searches_look_at_few_objects_and_find_all_that_a_walk_finds(search: Search) -> None:
    model, optimizer = build()
    train(model, optimizer, steps=8)
    disturbed, its_optimizer = build()
    train(disturbed, its_optimizer, steps=2)
    gc.collect()
    assert parking.survey().bytes > 4 * MODEL_BYTES
    for _ in range(2):
        train(disturbed, its_optimizer)  # with new gradients, which Python has not seen
        young = torch.ones(50_000)
        parked = parking.park()
        held = [young, *disturbed.parameters()]
        held += [each.grad for each in disturbed.parameters()]
        held += [value for state in its_optimizer.state.values() for value in state.values() if value.numel() > 1024]
        assert not any(each.untyped_storage().nbytes() for each in held if each.numel() > 1024)
        parked.restore()
        assert young.eq(1).all()
    assert search.walks == 1
    assert all(map(torch.equal, model.parameters(), disturbed.parameters()))


def test_a_tensor_that_few_objects_do_not_show_has_all_looked_at(search: Search) -> None:
    parking.survey()
    hidden = torch.ones(10_000)
    gc.collect()  # it is young no more
    parked = parking.park()
    assert (search.walks, hidden.untyped_storage().nbytes()) == (2, 0)
    parked.restore()
    assert hidden.eq(1).all()
    del hidden, parked
    parking.park().restore()
    assert search.walks == 2


def test_a_cuda_graph_that_few_objects_do_not_show_is_refused_all_the_same(search: Search) -> None:
    parking.survey()
    graph = Graph()
    gc.collect()
    graph.capture_begin()  # type: ignore[call-arg]  # it takes a pool, or none
    with pytest.raises(parking.ParkRefused, match=r"CUDA graph is alive"):
        parking.park()
    del graph
    gc.collect()  # the exception's frames, which refer to it
    parking.park().restore()
    parking.park().restore()
    assert search.walks == 3


@pytest.mark.usefixtures("search")
def test_pytorch_still_swaps_the_tensors_that_a_search_has_found() -> None:
    """It swaps none that something refers to weakly, as when a model is moved to another type of number."""
    one, other = torch.ones(10_000), torch.zeros(10_000)
    for _ in range(2):
        parking.park().restore()
    torch.utils.swap_tensors(one, other)
    assert one.eq(0).all()


def test_a_search_keeps_no_tensor_and_no_optimizer_alive(search: Search) -> None:
    model, optimizer = build()
    train(model, optimizer)
    parking.survey()
    gone = weakref.ref(optimizer), weakref.ref(model[0].weight)  # type: ignore[index]
    del model, optimizer
    gc.collect()
    assert [each() for each in gone] == [None, None]
    parking.park().restore()
    assert search.walks == 1


@pytest.mark.parametrize("counted", [True, False])
def test_the_bytes_asked_for_are_those_of_all_gpus_without_what_cublas_keeps(
    monkeypatch: pytest.MonkeyPatch, counted: bool
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: calls.append("cleared"), raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def stats(device: int) -> dict[str, object]:
        calls.append(device)
        return {"requested_bytes": {"all": {"current": 7 + device}}} if counted else {}

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    assert parking._asked_bytes(torch, "cuda") == (15 if counted else 0)
    assert calls == ["cleared", 0, 1]
    assert parking._asked_bytes(torch, "cpu") is None


def on_cuda(monkeypatch: pytest.MonkeyPatch, *, pool: tuple[int, int] = (0, 0)) -> None:
    """As if CUDA were in use, with one segment of memory in this pool."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    segment = {"active_size": 512, "segment_pool_id": pool}
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [segment])


def test_graphs_that_torch_compile_has_recorded_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cuda(monkeypatch)
    container = SimpleNamespace(tree_manager=None)
    trees = SimpleNamespace(local=SimpleNamespace(tree_manager_containers={0: container}))
    monkeypatch.setitem(sys.modules, "torch._inductor.cudagraph_trees", trees)
    parking.survey()
    container.tree_manager = object()
    for refused in (parking.park, parking.survey):
        with pytest.raises(parking.ParkRefused, match=r"CUDA graph is alive"):
            refused()


def test_memory_in_a_private_pool_is_refused_with_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cuda(monkeypatch, pool=(0, 1))
    with pytest.raises(parking.ParkRefused, match=r"private pool.*without torch\.cuda\.MemPool"):
        parking.park()


@pytest.mark.full  # the import takes ten seconds, and its answer changes with the version of PyTorch only
def test_pytorch_keeps_its_recorded_graphs_where_parking_looks() -> None:
    program = """
import torch._inductor.cudagraph_trees as trees
containers = trees.local.tree_manager_containers
trees.get_container(0)
assert containers[0].tree_manager is None
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("bound", ["_free_bytes", "_allowed_bytes"])
def test_state_that_host_memory_or_a_control_group_does_not_hold_is_refused(
    monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    tensor = torch.ones(10_000)
    monkeypatch.setattr(parking, "_kept", None)
    monkeypatch.setattr(parking, bound, lambda: 10_000)
    for refused in (parking.park, lambda: parking.prepare(20_000)):
        with pytest.raises(parking.ParkRefused, match="host memory does not hold"):
            refused()
    assert tensor.eq(1).all()
    monkeypatch.undo()
    assert parking._available_bytes() > 2**20


def test_the_limits_of_the_groups_that_a_process_is_in_bound_what_it_may_park(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/jobs/one\n")
    group = tmp_path / "fs" / "jobs" / "one"
    group.mkdir(parents=True)
    allowed = functools.partial(parking._allowed_bytes, tmp_path / "cgroup", tmp_path / "fs")
    assert allowed() == sys.maxsize
    for folder, limit in ((group, "max"), (group.parent, "1000")):
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text("700\n")
        (folder / "memory.stat").write_text("anon 500\ninactive_file 60\nactive_file 40\n")
    assert allowed() == 400
    (group / "memory.max").write_text("600\n")
    assert allowed() == 0
    (tmp_path / "cgroup").write_text("1:name=systemd:/\n")  # version 1
    assert allowed() == sys.maxsize


class Runtime:
    """The CUDA runtime's registrations; the one at `refused` fails."""

    def __init__(self, refused: int = -1) -> None:
        self.refused = refused
        self.held: dict[int, int] = {}
        self.threads: set[int] = set()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.threads.add(threading.get_ident())
        if len(self.held) == self.refused:
            return 2
        self.held[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.held[address]
        return 0


@pytest.mark.parametrize("refused", [-1, 0, 2])
def test_host_memory_is_registered_whole_or_not_at_all_in_pieces_and_in_a_thread_that_ends(
    monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    runtime = Runtime(refused)
    monkeypatch.setattr(parking, "_PIECE_BYTES", 2**16)
    for name, value in (("is_initialized", True), ("current_device", 0), ("cudart", runtime)):
        monkeypatch.setattr(torch.cuda, name, functools.partial(lambda value: value, value))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    arena = parking._Arena(3 * 2**16 + 4096)
    arena.register()
    pieces = {arena.address + piece * 2**16: size for piece, size in enumerate((2**16, 2**16, 2**16, 4096))}
    assert (arena.registered, runtime.held) == ((True, pieces) if refused < 0 else (False, {}))
    assert runtime.threads == runtime.threads - {threading.get_ident()} != set()
    arena.unregister()
    assert (arena.registered, runtime.held) == (False, {})


@pytest.mark.usefixtures("no_arena")
def test_state_that_lies_across_pieces_of_the_arena_comes_back_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "_PIECE_BYTES", 5000)
    tensors = [torch.rand(size) for size in (3000, 2000, 10_000)]
    before = [tensor.clone().numpy().copy() for tensor in tensors]
    parked = parking.park()
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    parked.restore()
    assert all(np.array_equal(tensor.numpy(), held) for tensor, held in zip(tensors, before, strict=True))


@pytest.fixture
def no_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parking, "_kept", None)


@pytest.mark.usefixtures("no_arena")
def test_a_prepared_arena_is_faulted_in_and_used_as_it_is() -> None:
    tensor = torch.arange(1_000_000)
    size = parking.survey().bytes
    before = resident("RssShmem")
    parking.prepare(size)
    arena = parking._kept
    assert arena is not None
    assert parking.ready_bytes() == arena.size >= size
    assert resident("RssShmem") - before >= size
    parked = parking.park()
    assert parking._kept is arena
    assert size - 64 * len(parked._storages) <= parked.bytes <= size
    parked.restore()
    assert torch.equal(tensor, torch.arange(1_000_000))


@pytest.mark.usefixtures("no_arena")
def test_an_arena_that_state_lies_in_is_not_replaced_and_keeps_what_lies_there() -> None:
    tensor = torch.arange(1_000_000)
    parked = parking.park()
    arena = parking._kept
    assert arena is not None
    parking.prepare(4 * arena.size)
    assert parking._kept is arena
    parked.restore()
    assert torch.equal(tensor, torch.arange(1_000_000))
    parking.prepare(4 * arena.size)
    assert parking._kept is not arena
    assert parking.ready_bytes() >= 4 * arena.size


@pytest.mark.usefixtures("no_arena")
def test_an_arena_that_was_too_small_gets_a_quarter_more_than_is_needed() -> None:
    parking.prepare(1_000_000)
    tensor = torch.arange(1_000_000)
    parked = parking.park()
    assert parking.ready_bytes() >= parked.bytes
    assert parking._kept is not None
    assert parking._kept.size >= 1.25 * parked.bytes
    parked.restore()
    assert torch.equal(tensor, torch.arange(1_000_000))


@pytest.mark.usefixtures("no_arena")
@pytest.mark.parametrize("old_kernel", [False, True])
def test_faulting_in_what_is_in_use_changes_nothing(monkeypatch: pytest.MonkeyPatch, old_kernel: bool) -> None:
    if old_kernel:
        monkeypatch.setattr(parking, "_MADV_POPULATE_WRITE", 999)  # EINVAL, as before Linux 5.14
    arena = parking._Arena(100_000)
    arena._memory[:4] = arena._memory[70_000:70_004] = b"kept"
    while arena.ready < arena.size:
        arena.fault_in(8192)
    assert arena._memory[:4] == arena._memory[70_000:70_004] == b"kept"


@pytest.mark.usefixtures("no_arena")
def test_a_suspension_does_not_wait_for_an_arena_that_is_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(100_000)
    fault_in = parking._Arena.fault_in

    def slowly(arena: parking._Arena, size: int) -> None:
        time.sleep(0.01)
        fault_in(arena, min(size, 65_536))

    monkeypatch.setattr(parking._Arena, "fault_in", slowly)
    making = threading.Thread(target=parking.prepare, args=(64_000_000,))  # some ten seconds' worth
    making.start()
    while parking.ready_bytes() == 0:
        time.sleep(0.001)
    chunks = 0
    find = parking._find

    def found(torch: ModuleType) -> parking._Found:
        nonlocal chunks
        chunks = parking.ready_bytes() // 65_536 - chunks
        return find(torch)

    monkeypatch.setattr(parking, "_find", found)
    chunks = parking.ready_bytes() // 65_536
    parked = parking.park()
    parked.restore()
    alive = making.is_alive()
    monkeypatch.undo()
    making.join()
    assert alive
    assert chunks <= 20  # of a thousand
    assert torch.equal(tensor, torch.arange(100_000))


def resident(kind: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))


def test_a_resume_without_memory_leaves_all_parked_and_may_be_tried_again() -> None:
    tensors = [torch.full((10_000,), float(value)) for value in range(3)]
    parked = parking.park()
    (last, size) = parked._storages[-1]
    parked._storages[-1] = (Exhausted(last), size)
    with pytest.raises(parking.ParkRefused, match="all state is still parked"):
        parked.restore()
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0, 0, 0]
    parked._storages[-1] = (last, size)
    parked.restore()
    assert [float(tensor.mean()) for tensor in tensors] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("storages_done", [0, 3, 7])
def test_a_signal_handler_that_ends_a_suspension_half_way_finds_all_state_in_place(
    monkeypatch: pytest.MonkeyPatch, storages_done: int
) -> None:
    tensors = [torch.full((1_000_000,), float(value)) for value in range(8)]
    bytes_of, calls = parking._bytes_of, []

    def interrupted(storage: torch.UntypedStorage) -> torch.Tensor:
        calls.append(storage)
        if len(calls) == storages_done + 1:
            time.sleep(0.1)  # those copied are released meanwhile
            raise KeyboardInterrupt
        return bytes_of(storage)

    monkeypatch.setattr(parking, "_bytes_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        parking.park()
    monkeypatch.undo()
    assert [float(tensor.mean()) for tensor in tensors] == [float(value) for value in range(8)]
    assert parking._kept is not None
    assert not parking._kept.in_use
    parking.park().restore()


class Exhausted:
    """A storage on a GPU that is full."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage

    def resize_(self, size: int) -> None:
        if size:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.storage.resize_(0)


def test_a_program_without_pytorch_has_nothing_to_park() -> None:
    program = "from app_agent.training import parking; assert parking.park().bytes == 0"
    subprocess.run([sys.executable, "-c", program], check=True)
