"""Parking: give a GPU's memory back in the middle of training, and take it again, bit for bit.

At a mini-batch boundary the bytes of every live storage are copied into one arena in host memory and the storage is
resized to nothing; unparking resizes it back and copies the bytes in. This works on storages and not on tensors, so
parameters keep their identity, optimizers their keys, and views and tied weights their aliases.

Without CUDA the storages in main memory play the GPU's part, so that the same code runs on simulated GPUs. There the
arena is a memfd: the kernel books it as shared memory (RssShmem) and the parked storages' own memory (RssAnon) falls.

What stays behind: memory that others hold by address (NumPy views, shared memory, memory-mapped files), tensors that
only C++ knows (DDP's gradient buckets, unless they are views), and the CUDA context. The node agent judges from its
own measurement whether the GPU is empty enough; the figure given here is for the explanation.

Tensors used by another thread while the training thread stands at the boundary must not be parked; a script with such
a thread (prefetching to the GPU) has to pause it itself.
"""

from __future__ import annotations

import gc
import mmap
import os
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

#: Main memory only: smaller storages come from malloc's small bins, which the system does not get back when they are
#: freed, so moving them costs time and gains nothing. On CUDA every storage moves, because a block of 512 bytes keeps
#: its 2 MiB segment.
SMALL_BYTES = 4096
_ALIGN_BYTES = 64

_OTHER, _TENSOR, _GRAPH = 0, 1, 2


class ParkRefused(Exception):  # noqa: N818 - an expected no
    """Parking would not be exact, or is impossible now; nothing was changed. The message is for the user."""


class Parked:
    """What `park` put away.

    Attributes
    ----------
    bytes
        How much lies in host memory.
    residue_bytes
        How much stays where it was.
    """

    def __init__(self, storages: list[Any], arena: Any, residue_bytes: int) -> None:
        self._storages = [(storage, storage.nbytes()) for storage in storages]
        self._arena = arena
        self.residue_bytes = residue_bytes
        self.bytes = sum(size for _, size in self._storages)

    def restore(self) -> None:
        """Put every byte back.

        Raises
        ------
        ParkRefused
            If the memory is not there; everything is still parked and `restore` may be tried again.
        """
        try:
            for storage, size, saved in self._slices():
                storage.resize_(size)
                _bytes_of(storage).copy_(saved)
        except RuntimeError as error:
            self._release()
            raise ParkRefused(f"there is not enough memory to resume, all state is still parked: {error}") from error
        _synchronize()

    def _take(self) -> None:
        for storage, _, saved in self._slices():
            saved.copy_(_bytes_of(storage))
        _synchronize()
        self._release()

    def _release(self) -> None:
        for storage, _ in self._storages:
            storage.resize_(0)
        torch = _torch()
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _slices(self) -> Iterable[tuple[Any, int, Any]]:
        offset = 0
        for storage, size in self._storages:
            yield storage, size, self._arena[offset : offset + size]
            offset += _aligned(size)


def park() -> Parked:
    """Move the state of this process out of the GPU's memory. To be called by the training thread at a boundary.

    Raises
    ------
    ParkRefused
        If a CUDA graph is alive, or host memory does not hold the state.
    """
    torch = _torch()
    if torch is None:
        return Parked([], None, 0)
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        device_type = "cuda" if torch.cuda.is_initialized() else "cpu"
        storages, residue_bytes = _find(torch, device_type)
        parked = Parked(storages, _arena(torch, sum(_aligned(item.nbytes()) for item in storages)), residue_bytes)
        parked._take()
        if device_type == "cuda":
            parked.residue_bytes = sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count())))
        return parked


def _torch() -> ModuleType | None:
    """PyTorch, if the script has loaded it: it is never loaded from here."""
    return sys.modules.get("torch")


def _synchronize() -> None:
    torch = _torch()
    if torch is not None and torch.cuda.is_initialized():
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)


def _find(torch: ModuleType, device_type: str) -> tuple[list[Any], int]:
    """Return the distinct storages to park, and the bytes of those that have to stay."""
    movable: dict[int, Any] = {}
    fixed: dict[int, int] = {}
    arena = None if _kept is None else _kept.untyped_storage()._cdata
    for tensor in _tensors(torch):
        storage = _storage_of(torch, tensor, device_type)
        if storage is None or storage._cdata in movable or storage._cdata == arena:
            continue
        if _may_move(storage, device_type):
            movable[storage._cdata] = storage
        else:
            fixed[storage._cdata] = storage.nbytes()
    return list(movable.values()), sum(fixed.values())


def _tensors(torch: ModuleType) -> Iterable[Any]:
    """Every live tensor, gradients included. Classifying types and not objects keeps the walk short."""
    kinds: dict[type, int] = {}
    for item in gc.get_objects():
        kind = kinds.get(type(item))
        if kind is None:
            kind = kinds[type(item)] = _kind(torch, type(item))
        if kind == _TENSOR:
            yield item
            # A gradient that Python has never looked at exists in C++ only.
            if item.is_leaf and item.requires_grad and item.grad is not None:
                yield item.grad
        elif kind == _GRAPH:
            raise ParkRefused(
                "a CUDA graph is alive and would replay on addresses that parking moves; "
                "let this job be preempted by checkpoint, or compile it without CUDA graphs"
            )


def _kind(torch: ModuleType, of: type) -> int:
    if issubclass(of, torch.Tensor):
        return _TENSOR
    return _GRAPH if issubclass(of, torch.cuda.CUDAGraph) else _OTHER


def _storage_of(torch: ModuleType, tensor: Any, device_type: str) -> Any | None:
    """Return the memory behind `tensor`, or None for what has none here (fake, sparse, wrapper and empty tensors)."""
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
    """Return a tensor of all bytes of `storage`, whatever it means to its owners."""
    torch = sys.modules["torch"]
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN_BYTES) * _ALIGN_BYTES


#: The arena as a tensor of bytes. Kept for the next time: writing into warm pages is some twenty times faster.
_kept: Any | None = None


def _arena(torch: ModuleType, size: int) -> Any:
    """Return `size` bytes of host memory.

    Raises
    ------
    ParkRefused
        If the host has not so much.
    """
    global _kept  # noqa: PLW0603 - one arena per process
    if size == 0:
        return None
    if _kept is None or _kept.numel() < size:
        if _kept is not None and torch.cuda.is_initialized():
            torch.cuda.cudart().cudaHostUnregister(_kept.data_ptr())
        _kept = None  # before its successor, so that both never exist together
        try:
            memory = _allocate(size)
        except OSError as error:
            raise ParkRefused(f"host memory does not hold the {size} bytes to park: {error}") from error
        _kept = torch.frombuffer(memory, dtype=torch.uint8)
        if torch.cuda.is_initialized():
            # Pinned pages make the copies several times faster; where that is refused they are slow and still right.
            torch.cuda.cudart().cudaHostRegister(_kept.data_ptr(), size, 0)
    return _kept


def _allocate(size: int) -> mmap.mmap:
    descriptor = os.memfd_create("gpu-arbiter-parked", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)  # fails here, cleanly, and not later as a bus error
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
