"""The GPU memory that this process uses, and the bound on it. Standard library only; PyTorch is never loaded here.

All of it may be called from the helper thread: nothing here makes a CUDA context where there is none.
"""

from __future__ import annotations

import functools
import mmap
import os
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

#: The ids of virtual GPUs begin so.
VIRTUAL = "GPU-sim-"


def anonymous_bytes() -> int:
    """Return the private memory of this process, which stands for GPU memory where there is no GPU (RssAnon)."""
    fields = os.pread(_file("statm"), 128, 0).split()
    return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE


def _private_bytes() -> tuple[int, int]:
    """Return the same and its most since `_forget_peak_bytes`; where that cannot be forgotten, the same twice.

    The kernel counts the peak of all resident memory (VmHWM). Of that the shared part is taken to be as it is now.
    """
    text = os.pread(_file("status"), 4096, 0)
    private = _field(text, b"RssAnon:")
    if not _peak_can_be_forgotten():
        return private, private
    shared = _field(text, b"RssFile:") + _field(text, b"RssShmem:")
    return private, max(private, _field(text, b"VmHWM:") - shared)


def _field(text: bytes, name: bytes) -> int:
    begin = text.index(name) + len(name)
    return int(text[begin : text.index(b"kB", begin)]) * 1024


def _forget_peak_bytes() -> None:
    if _peak_can_be_forgotten():
        os.pwrite(_file("clear_refs", os.O_WRONLY), b"5", 0)  # proc(5)


@functools.cache
def _peak_can_be_forgotten() -> bool:
    try:
        _file("clear_refs", os.O_WRONLY)
    except OSError:  # a kernel without it
        return False
    return True


def _file(name: str, how: int = os.O_RDONLY) -> int:
    """Open a file of this process once: opening costs more than reading."""
    return _opened(name, how, os.getpid())


@functools.cache
def _opened(name: str, how: int, pid: int) -> int:
    """Return the descriptor for the process `pid`: one that a fork has inherited would tell of its parent."""
    return os.open(f"/proc/{pid}/{name}", how | os.O_CLOEXEC)


def cuda() -> ModuleType | None:
    """Return `torch.cuda` if this process uses CUDA by now."""
    module = sys.modules.get("torch.cuda")
    return module if module is not None and getattr(module, "_initialized", False) else None


class Reading:
    """Bytes of GPU memory: of living tensors, now and at their peak since `forget_peak`, and held by the allocator."""

    __slots__ = ("allocated", "peak", "reserved")

    def __init__(self, allocated: int, peak: int, reserved: int) -> None:
        self.allocated, self.peak, self.reserved = allocated, peak, reserved


def reading(devices: Sequence[int] = ()) -> Reading | None:
    """Return the memory of this process on these CUDA devices, without any on all it sees; None while it is unknown.

    With CUDA these are the counters of PyTorch's allocator. Without it the private memory stands for them, unless the
    process was given real GPUs: then its host memory says nothing of their memory.
    """
    stats = _stats(devices)
    if stats is not None:
        allocated, reserved = ([each[name]["all"] for each in stats] for name in ("allocated_bytes", "reserved_bytes"))
        now, peak = (sum(figure[key] for figure in allocated) for key in ("current", "peak"))
        return Reading(now, peak, sum(figure["current"] for figure in reserved))
    if has_real_gpus():
        return None
    private, peak = _private_bytes()
    return Reading(private, peak, private)


def allocated_bytes(devices: Sequence[int] = ()) -> int | None:
    """Return `reading(devices).allocated`, for those who read nothing else and often."""
    counted = allocations(devices)
    return None if counted is None else counted[0]


def allocations(devices: Sequence[int] = ()) -> tuple[int, int] | None:
    """Return the bytes of living tensors, and those of all tensors made so far, which only PyTorch's allocator knows.

    The second is 0 where it is not known.
    """
    stats = _stats(devices)
    if stats is not None:
        figures = [each["allocated_bytes"]["all"] for each in stats]
        return sum(each["current"] for each in figures), sum(each["allocated"] for each in figures)
    return None if has_real_gpus() else (anonymous_bytes(), 0)


def _stats(devices: Sequence[int]) -> list[Any] | None:
    """Return the allocator's counters, nested as they are: `torch.cuda.memory_allocated` sorts all of them anew."""
    module = cuda()
    if module is None:
        return None
    return [module.memory_stats_as_nested_dict(device) for device in _all_of(module, devices)]


def _all_of(module: ModuleType, devices: Sequence[int]) -> Sequence[int]:
    """Return these devices, without any all that the process sees; counters of one that is not used are zeros."""
    return devices or range(module.device_count())


def has_real_gpus() -> bool:
    """Whether this process was given GPUs that are no virtual ones."""
    return _is_real(os.environ.get("CUDA_VISIBLE_DEVICES", ""))


@functools.cache
def _is_real(gpus: str) -> bool:
    return gpus.startswith(("GPU-", "MIG-")) and not gpus.startswith(VIRTUAL)


def forget_peak(devices: Sequence[int]) -> None:
    """Let the peak begin anew: loading and the first mini-batch may need more than any later one.

    The script's own `torch.cuda.max_memory_allocated` begins anew, too, so this is done once and not at each boundary.
    """
    module = cuda()
    if module is None:
        _forget_peak_bytes()
        return
    for device in _all_of(module, devices):
        module.reset_peak_memory_stats(device)


def give_back_unused() -> None:
    """Give back the GPU memory that PyTorch's allocator keeps for later: no tensor lies in it."""
    module = cuda()
    if module is not None:
        module.empty_cache()


def cap(limit_bytes: int, devices: Iterable[int]) -> None:
    """Let PyTorch take at most `limit_bytes` of each of these CUDA devices, 0 for no limit.

    Growth beyond it fails in this process, as an out-of-memory error, and not in another that shares the GPU.
    """
    module = cuda()
    if module is None:
        return
    for device in devices:
        total_bytes = module.get_device_properties(device).total_memory
        fraction = min(1.0, limit_bytes / total_bytes) if limit_bytes else 1.0
        with module.device(device):
            module.set_per_process_memory_fraction(fraction, device)
