"""Parking: give a GPU's memory back in the middle of training, and take it again, bit for bit.

At a mini-batch boundary the bytes of every live storage are copied into one arena in host memory and the storage is
resized to nothing; unparking resizes it back and copies the bytes in. This works on storages and not on tensors, so
parameters keep their identity, optimizers their keys, and views and tied weights their aliases.

The node's side is the slow one: writing into memory for the first time takes some ten to thirty times longer
than the copy itself. So the arena is made once, faulted in and registered with CUDA (`prepare`, while training goes
on), and kept. Without `prepare` the first `park` does it, and takes its time.

Without CUDA the storages in main memory play the GPU's part, so that the same code runs on simulated GPUs. There the
arena is a memfd: the kernel books it as shared memory (RssShmem) and the parked storages' own memory (RssAnon) falls.

Some memory stays behind: memory that other code holds by address (NumPy views, shared memory, memory-mapped files),
tensors that only C++ knows (DDP's gradient buckets, unless they are views), and the CUDA context. The node agent judges
from its own measurement whether the GPU is empty enough; the figure given here is for the explanation.

Tensors used by another thread while the training thread stands at the boundary must not be parked; a script with such
a thread (prefetching to the GPU) has to pause it itself.

The first search for tensors is a walk over all objects of the process. The later ones look at few objects, and are
believed only if the bytes that they find are, to the byte, all that PyTorch's allocator was asked for. Else they walk.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import gc
import mmap
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain, compress
from pathlib import Path
from types import ModuleType
from typing import Any

#: Main memory only: smaller storages come from malloc's small bins, which the system does not get back when they are
#: freed, so moving them costs time and gains nothing. On CUDA every storage moves, because a block of 512 bytes keeps
#: its 2 MiB segment.
SMALL_BYTES = 4096
_ALIGN_BYTES = 64
#: Faulted in at once. Meanwhile the training thread cannot map or unmap memory, so it is some milliseconds' worth.
_CHUNK_BYTES = 8 * 2**20
#: madvise(2), Linux 5.14: fault pages in for writing without changing their content.
_MADV_POPULATE_WRITE = 23
#: cudaHostRegisterPortable: pinned for the contexts of all GPUs.
_PORTABLE = 1
#: Registered with CUDA at once. CUDA refuses a copy that crosses from one registration into the next.
_PIECE_BYTES = 2**30

_GRAPH_REASON = (
    "a CUDA graph is alive and would replay on addresses that parking moves; "
    "let this job be preempted by checkpoint, or compile it without CUDA graphs"
)
_POOL_REASON = (
    "GPU memory lies in a private pool, whose addresses others than PyTorch may hold; "
    "let this job be preempted by checkpoint, or train without torch.cuda.MemPool"
)


class ParkRefused(Exception):  # noqa: N818 - an expected no
    """Parking would not be exact, or is impossible now; nothing was changed. The message is for the user."""


class Parked:
    """The state that `park` put away.

    Attributes
    ----------
    bytes
        Bytes that lie in host memory.
    residue_bytes
        Bytes that stay on the GPU.
    """

    def __init__(self, storages: list[Any], arena: _Arena | None, residue_bytes: int) -> None:
        self._storages = [(storage, storage.nbytes()) for storage in storages]
        self._arena = arena
        self._devices = _devices(storages)
        self.residue_bytes = residue_bytes
        self.bytes = sum(size for _, size in self._storages)

    def restore(self) -> None:
        """Put every byte back.

        Raises
        ------
        ParkRefused
            If the memory is not there; everything is still parked and `restore` may be tried again.
        """
        with _first_in_line():
            try:
                for storage, size in self._storages:
                    storage.resize_(size)
                if not self._devices:
                    _fault_ahead([(storage.data_ptr(), size) for storage, size in self._storages])
                for storage, _, offset in self._places():
                    for here, there in self._parts(storage, offset):
                        here.copy_(there, non_blocking=bool(self._devices))
                _synchronize(self._devices)
            except RuntimeError as error:
                self._release()
                raise ParkRefused(
                    f"there is not enough memory to resume, all state is still parked: {error}"
                ) from error
            if self._arena is not None:
                self._arena.in_use = False

    def _take(self) -> None:
        _synchronize(self._devices)  # the writes of other streams must be done
        with _releasing() as release:
            for storage, _, offset in self._places():
                for here, there in self._parts(storage, offset):
                    there.copy_(here, non_blocking=bool(self._devices))
                if not self._devices:
                    release(storage)
        _synchronize(self._devices)
        self._release()

    def _put_back(self) -> None:
        """Undo a `_take` that was cut off."""
        for storage, size, offset in self._places():
            if storage.nbytes() < size:
                storage.resize_(size)
                for here, there in self._parts(storage, offset):
                    here.copy_(there)
        if self._arena is not None:
            self._arena.in_use = False

    def _release(self) -> None:
        for storage, _ in self._storages:
            storage.resize_(0)
        if self._devices:
            torch = sys.modules["torch"]
            # cuBLAS keeps some MiB per stream, which no tensor shows; it takes them again when it needs them.
            getattr(torch._C, "_cuda_clearCublasWorkspaces", _nothing)()
            torch.cuda.empty_cache()

    def _places(self) -> Iterator[tuple[Any, int, int]]:
        """Yield each storage with its size and its offset in the arena."""
        offset = 0
        for storage, size in self._storages:
            yield storage, size, offset
            offset += _aligned(size)

    def _parts(self, storage: Any, offset: int) -> Iterator[tuple[Any, Any]]:
        """Yield the bytes of a storage, and those of the arena that hold them, piece by piece."""
        if self._arena is None:
            return
        whole, memory, done = _bytes_of(storage), self._arena.tensor(), 0
        while done < whole.numel():
            size = min(whole.numel() - done, _PIECE_BYTES - (offset + done) % _PIECE_BYTES)
            yield whole[done : done + size], memory[offset + done : offset + done + size]
            done += size


def park(before: Callable[[], None] | None = None) -> Parked:
    """Move the state of this process out of the GPU's memory. To be called by the training thread at a boundary.

    `before` is called when nothing stands against it any more and the GPU stands still.

    Raises
    ------
    ParkRefused
        If a CUDA graph is alive, or host memory does not hold the state.
    """
    torch = _torch()
    if torch is None:
        return Parked([], None, 0)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), _first_in_line():
        found = _find(torch)
        arena = _claim(_total(found.storages))
        parked = Parked(found.storages, arena, found.residue_bytes)
        if before is not None:
            _synchronize(parked._devices)
            before()
        if arena is not None:
            arena.in_use = True
        try:
            parked._take()
        except BaseException:  # the script's own signal handler, which may want to save
            parked._put_back()
            raise
        if parked._devices:
            parked.residue_bytes = sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count())))
        return parked


class State:
    """The result of `survey`: the bytes `park` would need of the arena, and the CUDA devices they lie on."""

    __slots__ = ("bytes", "devices")

    def __init__(self, size: int, devices: tuple[int, ...]) -> None:
        self.bytes, self.devices = size, devices


def survey() -> State:
    """Return the bytes and devices that `park` would move now.

    To be called by the training thread at a boundary; takes some 10 ms.

    Raises
    ------
    ParkRefused
        If it would move nothing, because a CUDA graph is alive.
    """
    torch = _torch()
    if torch is None:
        return State(0, ())
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        storages = _find(torch).storages
        return State(_total(storages), _devices(storages))


# --- the state ------------------------------------------------------------------------------------------------------


def _torch() -> ModuleType | None:
    """PyTorch, if the script has loaded it whole: it is never loaded from here."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and hasattr(torch, "cuda") and hasattr(torch, "no_grad") else None


def _nothing() -> None:
    """Stand in for functions that this build of PyTorch lacks."""


def _devices(storages: Iterable[Any]) -> tuple[int, ...]:
    """The CUDA devices that `storages` lie on. Others must not be touched: that alone would make a context there."""
    return tuple(sorted({storage.device.index for storage in storages if storage.device.type == "cuda"}))


def _synchronize(devices: Iterable[int]) -> None:
    for device in devices:
        sys.modules["torch"].cuda.synchronize(device)


class _Found:
    """The distinct storages to park, and the bytes of those that have to stay."""

    def __init__(self, storages: Iterable[Any], device_type: str) -> None:
        movable: dict[int, Any] = {}
        fixed: dict[int, int] = {}
        for storage in storages:
            if storage._cdata in movable or _is_arena(storage):
                continue
            if _may_move(storage, device_type):
                movable[storage._cdata] = storage
            else:
                fixed[storage._cdata] = storage.nbytes()
        self.storages = list(movable.values())
        self.residue_bytes = sum(fixed.values())


def _find(torch: ModuleType) -> _Found:
    device_type = "cuda" if torch.cuda.is_initialized() else "cpu"
    if device_type == "cuda":
        _check_allocator(torch)
    return _find_again(torch, device_type) or _find_by_walk(torch, device_type)


def _find_by_walk(torch: ModuleType, device_type: str) -> _Found:
    """Look at every object of the process, of which there are hundreds of thousands."""
    global _known  # noqa: PLW0603 - one training thread per process
    _watch_captures(torch)
    captures = _captures
    tensors, optimizers = _look(torch, _objects())
    found = _Found(_storages(torch, tensors, device_type), device_type)
    _known = _Known(found.storages, list(map(weakref.ref, optimizers)), captures)
    return found


def _find_again(torch: ModuleType, device_type: str) -> _Found | None:
    """Find the same with a look at few objects; None unless PyTorch's own count of bytes proves that none is missing.

    These are the storages that were known before, the gradients of all optimizers, and the tensors among the objects
    that are younger than the last collections.
    """
    global _known  # noqa: PLW0603 - as above
    known = _known
    if known is None or known.captures != _captures:
        return None
    asked_bytes = _asked_bytes(torch, device_type)
    if not asked_bytes:
        return None
    young, optimizers = _look(torch, gc.get_objects(0) + gc.get_objects(1))  # a display would hold itself
    known.optimizers += map(weakref.ref, optimizers)
    tensors = chain(young, known.parameters())
    found = _Found(chain(known.storages(torch), _storages(torch, tensors, device_type)), device_type)
    if sum(storage.nbytes() for storage in found.storages) != asked_bytes:
        return None
    _known = _Known(found.storages, known.optimizers, known.captures)
    return found


class _Known:
    """What a search has found, held weakly. No tensor: PyTorch swaps none that something refers to weakly."""

    def __init__(self, storages: Iterable[Any], optimizers: list[weakref.ref[Any]], captures: int) -> None:
        reference = sys.modules["torch.multiprocessing.reductions"].StorageWeakRef
        self._storages = [reference(storage) for storage in storages]
        self.optimizers = [each for each in optimizers if each() is not None]
        self.captures = captures

    def storages(self, torch: ModuleType) -> Iterator[Any]:
        """Yield those that live and have memory."""
        for reference in self._storages:
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is not None and storage.nbytes():
                yield storage

    def parameters(self) -> Iterator[Any]:
        """Yield all parameters of the living optimizers; none of a class that keeps them in another place."""
        for reference in self.optimizers:
            for group in getattr(reference(), "__dict__", {}).get("param_groups", ()):
                yield from group["params"]


_known: _Known | None = None
_captures = 0  #: CUDA graphs whose capture has begun since the first search


def _watch_captures(torch: ModuleType) -> None:
    """Count the CUDA graphs to come: only a walk finds one, as it may live without memory of its own."""
    begin = torch.cuda.CUDAGraph.capture_begin
    if hasattr(begin, "counted"):
        return

    @functools.wraps(begin)
    def capture_begin(*arguments: Any, **named: Any) -> Any:
        global _captures  # noqa: PLW0603 - as above
        _captures += 1
        return begin(*arguments, **named)

    capture_begin.counted = True  # type: ignore[attr-defined]
    torch.cuda.CUDAGraph.capture_begin = capture_begin


def _asked_bytes(torch: ModuleType, device_type: str) -> int | None:
    """Return the bytes that PyTorch's allocator was asked for and has not got back; None where it does not count them.

    cuBLAS asks it for some MiB, too, which no tensor shows, and takes them again when it needs them.
    """
    if device_type != "cuda":
        return None
    getattr(torch._C, "_cuda_clearCublasWorkspaces", _nothing)()
    counts = map(torch.cuda.memory_stats_as_nested_dict, range(torch.cuda.device_count()))
    return int(sum(each.get("requested_bytes", {}).get("all", {}).get("current", 0) for each in counts))


def _look(torch: ModuleType, objects: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the tensors and the optimizers among these. One look at each object, for there may be many."""
    tensors, graphs = _kinds(torch.Tensor), _kinds(torch.cuda.CUDAGraph)
    wanted = tensors | graphs | _kinds(torch.optim.Optimizer)
    found = list(compress(objects, map(wanted.__contains__, map(type, objects))))
    if any(type(item) in graphs for item in found):
        raise ParkRefused(_GRAPH_REASON)
    return [each for each in found if type(each) in tensors], [each for each in found if type(each) not in tensors]


def _storages(torch: ModuleType, tensors: Iterable[Any], device_type: str) -> Iterator[Any]:
    """Yield the memory behind these tensors and their gradients."""
    for tensor in tensors:
        # A gradient that Python has never looked at exists in C++ only.
        gradient = tensor.grad if tensor.is_leaf and tensor.requires_grad else None
        for each in (tensor, gradient):
            storage = None if each is None else _storage_of(torch, each, device_type)
            if storage is not None:
                yield storage


def _objects() -> list[Any]:
    """Every object that the collector knows, also those of a script that called `gc.freeze()`, which stay frozen."""
    if not gc.get_freeze_count():
        return gc.get_objects()
    gc.unfreeze()
    try:
        gc.collect()  # garbage must not be frozen with the rest
        return gc.get_objects()
    finally:
        gc.freeze()


def _kinds(base: type) -> set[type]:
    """`base` and all classes made from it."""
    return {base}.union(*map(_kinds, type.__subclasses__(base)))


def _check_allocator(torch: ModuleType) -> None:
    """Refuse memory that other code than PyTorch's tensors knows by address."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")  # torch.compile(mode="reduce-overhead" and the like)
    containers = getattr(getattr(trees, "local", None), "tree_manager_containers", {})
    if any(container.tree_manager is not None for container in containers.values()):
        raise ParkRefused(_GRAPH_REASON)
    try:
        segments = torch.cuda.memory_snapshot()
    except RuntimeError:  # an allocator without snapshots (cudaMallocAsync) has no private pools either
        segments = []
    for segment in segments:
        if segment["active_size"] and tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0):
            raise ParkRefused(_POOL_REASON)


def _storage_of(torch: ModuleType, tensor: Any, device_type: str) -> Any | None:
    """Return the memory behind `tensor`, or None if it has none here (fake, sparse, wrapper and empty tensors)."""
    try:
        if tensor.device.type != device_type or tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        if storage.device.type != device_type or storage.nbytes() == 0 or storage.data_ptr() == 0:
            return None
    except (RuntimeError, NotImplementedError):  # PyTorch's way to say that there is no storage
        return None
    return storage


def _may_move(storage: Any, device_type: str) -> bool:
    if not storage.resizable():
        return False
    return device_type != "cpu" or (storage.nbytes() >= SMALL_BYTES and not storage.is_shared())


def _bytes_of(storage: Any) -> Any:
    """Return a tensor of all bytes of `storage`, of any type that its tensors have."""
    torch = sys.modules["torch"]
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN_BYTES) * _ALIGN_BYTES


def _total(storages: Iterable[Any]) -> int:
    return sum(_aligned(storage.nbytes()) for storage in storages)


# --- the arena ------------------------------------------------------------------------------------------------------


class _Arena:
    """Host memory of a fixed size, a memfd, of which the first `ready` bytes are faulted in.

    Raises
    ------
    OSError
        If the node has less.
    """

    def __init__(self, size: int) -> None:
        self.size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if self.size > _available_bytes():  # a memfd has no limit of its own, and faulting it in ends in an OOM kill
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        descriptor = os.memfd_create("gpu-arbiter-parked", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, self.size)
            self._memory = mmap.mmap(descriptor, self.size)
        finally:
            os.close(descriptor)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.ready = 0
        self.registered = self.in_use = False
        self._tensor: Any = None

    def tensor(self) -> Any:
        """Return it as a tensor of bytes."""
        if self._tensor is None:
            torch = sys.modules["torch"]
            self._tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        return self._tensor

    def fault_in(self, size: int) -> None:
        """Fault in up to `size` bytes more; their content stays as it is."""
        size = min(size, self.size - self.ready)
        failed = _libc.madvise(self.address + self.ready, size, _MADV_POPULATE_WRITE)
        if failed and ctypes.get_errno() != errno.EINVAL:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        if failed:  # a kernel before 5.14
            for offset in range(self.ready, self.ready + size, mmap.PAGESIZE):
                self._memory[offset] = self._memory[offset]
        self.ready += size

    def register(self) -> None:
        """Pin it for CUDA, which makes the copies several times faster; refused, they are slow and still right.

        CUDA keeps an error of a thread for that thread's next call, so this is done in one of its own.
        """
        torch = _torch()
        if torch is None or not torch.cuda.is_initialized() or self.registered:
            return
        thread = threading.Thread(
            target=self._register, args=(torch, torch.cuda.current_device()), name="gpu-arbiter-pins"
        )
        thread.start()
        thread.join()

    def _register(self, torch: ModuleType, device: int) -> None:
        torch.cuda.set_device(device)
        runtime = torch.cuda.cudart()
        done: list[int] = []
        for address, size in self._pieces():
            if int(runtime.cudaHostRegister(address, size, _PORTABLE)):
                for registered in done:
                    runtime.cudaHostUnregister(registered)
                return
            done.append(address)
        self.registered = True

    def _pieces(self) -> Iterator[tuple[int, int]]:
        for offset in range(0, self.size, _PIECE_BYTES):
            yield self.address + offset, min(_PIECE_BYTES, self.size - offset)

    def unregister(self) -> None:
        """Undo `register`, before the memory goes."""
        if self.registered:
            for address, _ in self._pieces():
                sys.modules["torch"].cuda.cudart().cudaHostUnregister(address)
            self.registered = False


_libc = ctypes.CDLL(None, use_errno=True)  # its calls let other threads run
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@contextmanager
def _releasing() -> Iterator[Callable[[Any], None]]:
    """Give storages in main memory back on another core, which takes the kernel half as long as their copy took."""
    copied: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def run() -> None:
        for storage in iter(copied.get, None):
            storage.resize_(0)

    thread = threading.Thread(target=run, name="gpu-arbiter-frees", daemon=True)
    thread.start()
    try:
        yield copied.put
    finally:
        copied.put(None)
        thread.join()


def _fault_ahead(ranges: list[tuple[int, int]]) -> None:
    """Fault in main memory that is about to be copied to, on another core: the kernel takes as long as the copy.

    Only pages that lie wholly within a range are touched, and their content stays as it is.
    """

    def run() -> None:
        for address, size in ranges:
            begin, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, address + size
            for chunk in range(begin, end - mmap.PAGESIZE + 1, _CHUNK_BYTES):
                length = min(_CHUNK_BYTES, end - chunk) // mmap.PAGESIZE * mmap.PAGESIZE
                _libc.madvise(chunk, length, _MADV_POPULATE_WRITE)

    threading.Thread(target=run, name="gpu-arbiter-faults", daemon=True).start()


#: Held while the arena is copied into or out of, faulted in or replaced.
_guard = threading.Lock()
_awaited = False  #: the training thread waits for `_guard`, which `prepare` may take again before it wakes
_kept: _Arena | None = None


@contextmanager
def _first_in_line() -> Iterator[None]:
    global _awaited  # noqa: PLW0603 - one training thread per process
    _awaited = True
    with _guard:
        _awaited = False
        yield


def ready_bytes() -> int:
    """Return how much of the arena is faulted in."""
    arena = _kept
    return 0 if arena is None else arena.ready


def prepare(size: int, device: int | None = None) -> None:
    """Have an arena of at least `size` bytes faulted in and registered, in a thread beside the training thread.

    Parameters
    ----------
    size
        Bytes. A living arena that is smaller gives way to a new one, unless state lies in it.
    device
        The CUDA device this process trains on, so that no context is made on another.

    Raises
    ------
    ParkRefused
        If the node has less memory.
    """
    torch = _torch()
    if device is not None and torch is not None:
        torch.cuda.set_device(device)  # of this thread
    with _guard:
        arena = _kept if _kept is not None and _kept.in_use else _fitting(size)
    while arena is not None and arena.ready < arena.size:
        while _awaited:  # a suspension need not wait for the rest
            time.sleep(0.001)
        with _guard:
            if arena is not _kept:
                return
            _faulted(arena, _CHUNK_BYTES)
    with _guard:
        if arena is not None and arena is _kept:
            arena.register()


def _claim(size: int) -> _Arena | None:
    """Return an arena of at least `size` bytes to copy to, now."""
    arena = _fitting(size)
    while arena is not None and arena.ready < size:
        _faulted(arena, size)
    if arena is not None:
        arena.register()
    return arena


def _fitting(size: int) -> _Arena | None:
    """Return the arena, or a new one if it is too small: somewhat larger, and more so if it has been too small once."""
    global _kept  # noqa: PLW0603 - one arena per process
    if size == 0 or (_kept is not None and _kept.size >= size):
        return _kept
    slack = size // 16
    if _kept is not None:
        slack = size // 4
        _kept.unregister()
        _kept = None  # before its successor, so that both never exist together
    try:
        _kept = _Arena(size + slack)
    except OSError as error:
        raise _no_memory(size, error) from error
    return _kept


def _faulted(arena: _Arena, size: int) -> None:
    global _kept  # noqa: PLW0603 - as above
    try:
        arena.fault_in(size)
    except OSError as error:
        _kept = None if not arena.in_use else arena
        raise _no_memory(arena.size, error) from error


def _no_memory(size: int, error: OSError) -> ParkRefused:
    return ParkRefused(f"host memory does not hold the {size} bytes to park: {error}")


def _is_arena(storage: Any) -> bool:
    return _kept is not None and storage.data_ptr() == _kept.address


def _available_bytes() -> int:
    """Return the bytes that the kernel could give this process without swapping, and without ending it."""
    return min(_free_bytes(), _allowed_bytes())


def _free_bytes() -> int:
    """Return the bytes the kernel could give without swapping; see proc(5), MemAvailable."""
    with Path("/proc/meminfo").open(encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return sys.maxsize


def _allowed_bytes(processes: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that the limits of this process's cgroups (version 2) leave; beyond, the kernel ends it."""
    try:
        path = next(line[3:].strip() for line in processes.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return sys.maxsize
    group, left = root / path.lstrip("/"), sys.maxsize
    while group != root.parent:
        with contextlib.suppress(OSError, ValueError):  # no such file in the root group, and "max" is no number
            limit, used = int((group / "memory.max").read_text()), int((group / "memory.current").read_text())
            left = min(left, max(0, limit - used + _reclaimable_bytes(group)))
        group = group.parent
    return left


def _reclaimable_bytes(group: Path) -> int:
    """Return the bytes of a group that the kernel takes back before it ends a process: pages of files."""
    fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
