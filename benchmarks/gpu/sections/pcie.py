"""How fast the bus is: what parking and the driver's checkpoint are measured by."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.gpu.record import Section, Setting
from benchmarks.gpu.trainees import Answer, trainee


def run(setting: Setting, section: Section) -> None:
    """Copy by all three kinds of host memory."""
    size = setting.pick(2 * 2**30, 32 * 2**20)
    with trainee(setting.device) as one:
        rates = one.ask(measure, size=size)
    section.note(**rates)
    if rates["pinned_out_gb_s"] is None:
        return
    registered = min(
        rates["arena_out_gb_s"] / rates["pinned_out_gb_s"], rates["arena_in_gb_s"] / rates["pinned_in_gb_s"]
    )
    section.check(
        "the arena of parking is as fast as pinned memory", registered >= 0.9, gpu_only=True, ratio=registered
    )


# --- in the trainee -------------------------------------------------------------------------------------------------


def measure(child: Any, *, size: int) -> Answer:
    """Return GB/s of copies of `size` bytes out of the GPU's memory and into it, and what preparing the arena costs."""
    import torch

    on_gpu = torch.zeros(size, dtype=torch.uint8, device=child.device)
    cuda = child.device == "cuda"
    pinned, pin_s = _timed(lambda: torch.empty(size, dtype=torch.uint8, pin_memory=True)) if cuda else (None, None)
    pageable = torch.ones(size, dtype=torch.uint8)
    arena, fault_s, register_s = _arena(size)
    held = arena.tensor()[:size]
    gib = size / 2**30
    found = {
        "size": size,
        "pinned_out_gb_s": None if pinned is None else rate(pinned, on_gpu),
        "pinned_in_gb_s": None if pinned is None else rate(on_gpu, pinned),
        "pageable_out_gb_s": rate(pageable, on_gpu, times=2),
        "pageable_in_gb_s": rate(on_gpu, pageable, times=2),
        "arena_out_gb_s": rate(held, on_gpu),
        "arena_in_gb_s": rate(on_gpu, held),
        "pin_s_per_gib": None if pin_s is None else pin_s / gib,
        "arena_fault_s_per_gib": fault_s / gib,
        "arena_register_s_per_gib": register_s / gib if cuda else None,
    }
    arena.unregister()
    return found


def refused_registration(child: Any) -> Answer:
    """Have the arena registered twice, which CUDA refuses, and say whether PyTorch goes on as if nothing had been."""
    import torch

    from app_agent.training import parking

    arena = parking._Arena(2**20)
    arena.fault_in(arena.size)
    arena.register()
    first, arena.registered = arena.registered, False
    arena.register()
    try:
        error = ""
        held = float(torch.ones(4, device=child.device).sum())
    except RuntimeError as raised:
        held, error = 0.0, str(raised).partition("\n")[0]
    arena.registered = first
    arena.unregister()
    return {"goes_on": held == 4.0, "error": error}


def rate(target: Any, source: Any, *, times: int = 4) -> float:
    """Return GB/s of copying `source` to `target`, after one that does not count."""
    import torch

    def copy(count: int) -> None:
        for _ in range(count):
            target.copy_(source, non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()

    copy(1)
    _, seconds = _timed(lambda: copy(times))
    return float(times * source.numel() / seconds / 1e9)


def _arena(size: int) -> tuple[Any, float, float]:
    """Return an arena as parking makes it, and the seconds that faulting it in and registering it took."""
    from app_agent.training import parking

    arena = parking._Arena(size)
    _, fault_s = _timed(lambda: arena.fault_in(arena.size))
    _, register_s = _timed(arena.register)
    return arena, fault_s, register_s


def _timed(work: Any) -> tuple[Any, float]:
    begun = time.perf_counter()
    made = work()
    return made, time.perf_counter() - begun
