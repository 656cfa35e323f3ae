"""The GPU memory that this process uses, and the bound on it. Standard library only; PyTorch is never loaded here.

All of it may be called from the helper thread: nothing here makes a CUDA context where there is none.
"""

from __future__ import annotations

import functools
import mmap
import os
import sys
from collections.abc import Iterable
from types import ModuleType


def anonymous_bytes() -> int:
    """Return the private memory of this process, which stands for GPU memory where there is no GPU (RssAnon)."""
    fields = os.pread(_statm(), 128, 0).split()
    return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE


@functools.cache
def _statm() -> int:
    """Open the file once: it is read four times a second, and opening it costs more than reading."""
    return os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)


def cuda() -> ModuleType | None:
    """Return `torch.cuda` if this process uses CUDA by now."""
    module = sys.modules.get("torch.cuda")
    return module if module is not None and getattr(module, "_initialized", False) else None


def allocated_bytes(devices: Iterable[int]) -> tuple[int, int]:
    """Return the bytes of tensors on these CUDA devices: now, and at their peak since `forget_peak`."""
    module = cuda()
    if module is None:
        return 0, 0
    figures = [module.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"] for device in devices]
    return sum(figure["current"] for figure in figures), sum(figure["peak"] for figure in figures)


def forget_peak(devices: Iterable[int]) -> None:
    """Let the peak begin anew: loading and the first mini-batch may need more than any later one."""
    module = cuda()
    if module is None:
        return
    for device in devices:
        module.reset_peak_memory_stats(device)


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
