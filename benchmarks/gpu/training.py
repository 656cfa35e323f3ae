"""What a trainee can be asked: a training loop whose result depends on every bit of its state."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn

from app_agent.training import parking
from benchmarks.gpu.job import digest_of
from benchmarks.gpu.trainee import Child
from benchmarks.gpu.trainees import Answer

#: fp32 weights and both moments of AdamW.
BYTES_PER_PARAMETER = 12


class Training:
    """A network with dropout, whose batches are random too. `mixed`: half precision, a scaler, the fused AdamW."""

    def __init__(self, device: str, gb: float, *, width: int, batch: int, mixed: bool, seed: int) -> None:
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # dear, and bugs it shows are not looked for here
        self.device, self.width, self.rows, self.mixed = device, width, batch, mixed
        layers = max(1, round(gb * 2**30 / (BYTES_PER_PARAMETER * 8 * width**2)))
        self.model = nn.Sequential(*(_layer(width) for _ in range(layers))).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=mixed or None)
        self.scaler = torch.amp.GradScaler(device, enabled=mixed)
        self.steps = 0

    def step(self, passes: int = 1) -> None:
        """Make one mini-batch of so many micro-batches."""
        for _ in range(passes):
            self.scaler.scale(self._loss()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1

    def _loss(self) -> Tensor:
        batch = torch.randn(self.rows, self.width, device=self.device)
        with self._precision():
            made: Tensor = self.model(batch)
            return (made.float() - batch).square().mean()

    def _precision(self) -> AbstractContextManager[Any]:
        if not self.mixed:
            return nullcontext()
        half = torch.float16 if self.device == "cuda" else torch.bfloat16
        return cast("AbstractContextManager[Any]", torch.autocast(self.device, half))

    def state(self) -> Iterator[Tensor]:
        """Yield all weights and moments, in an order of their own."""
        yield from self.model.parameters()
        for held in self.optimizer.state_dict()["state"].values():
            yield from (held[name] for name in sorted(held) if isinstance(held[name], Tensor))


def _layer(width: int) -> nn.Module:
    inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, width))
    return nn.Sequential(nn.LayerNorm(width), inner)


def synchronize(child: Child) -> None:
    """Wait for the GPU."""
    if child.device == "cuda":
        torch.cuda.synchronize()


# --- what can be asked ----------------------------------------------------------------------------------------------


def begin(
    child: Child, *, gb: float, width: int = 0, batch: int = 64, mixed: bool = False, seed: int = 0, warm: int = 3
) -> Answer:
    """Build a training of `gb` GiB and make `warm` mini-batches."""
    if child.device == "cpu":
        torch.set_num_threads(1)
    width = width or (2048 if child.device == "cuda" else 128)
    child.training = Training(child.device, gb, width=width, batch=batch, mixed=mixed, seed=seed)
    return run(child, steps=warm)


def run(child: Child, *, steps: int) -> Answer:
    """Make so many mini-batches."""
    begun = time.perf_counter()
    for _ in range(steps):
        child.training.step()
    synchronize(child)
    return {"seconds": time.perf_counter() - begun, "steps": child.training.steps}


def loop(child: Child, *, seconds: float, idle_s: float = 0.0) -> Answer:
    """Make mini-batches for so long, each followed by `idle_s` of loading data."""
    begun, steps = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        child.training.step()
        if idle_s:
            synchronize(child)
            time.sleep(idle_s)
        steps += 1
    synchronize(child)
    return {"seconds": time.perf_counter() - begun, "steps": steps}


def digest(child: Child) -> Answer:
    """Return the SHA-256 over those of all weights and moments."""
    return {"sha256": digest_of(child.training.state())}


def memory(child: Child) -> Answer:
    """Return the bytes of tensors, and those that PyTorch keeps of the GPU."""
    if child.device != "cuda":
        return {"allocated": 0, "reserved": 0}
    return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}


def prepare(child: Child) -> Answer:
    """Have the arena made beside the training, as a node agent orders it; say what that did to the steps."""
    alone_s = run(child, steps=5)["seconds"] / 5
    state = parking.survey()
    device = state.devices[0] if state.devices else None
    thread = threading.Thread(target=parking.prepare, args=(state.bytes, device))
    begun, steps = time.perf_counter(), 0
    thread.start()
    while thread.is_alive():
        run(child, steps=1)
        steps += 1
    thread.join()
    seconds = time.perf_counter() - begun
    return {
        "bytes": state.bytes,
        "ready_bytes": parking.ready_bytes(),
        "seconds": seconds,
        "step_s_alone": alone_s,
        "step_s_meanwhile": seconds / steps if steps else None,
    }


def park(child: Child) -> Answer:
    """Park, and say how it went, and how long each phase took (s); `refused` is why it did not."""
    phases: dict[str, float] = {}
    begun = time.perf_counter()
    try:
        with ExitStack() as watched:
            for name, (owner, function) in PHASES.items():
                watched.enter_context(_timed(owner, function, name, phases))
            child.parked = parking.park()
    except parking.ParkRefused as refusal:
        return {"refused": str(refusal)}
    seconds = time.perf_counter() - begun
    phases["copy"] = phases.pop("take") - phases["release"]
    told = {"refused": "", "bytes": child.parked.bytes, "residue_bytes": child.parked.residue_bytes}
    return told | {"seconds": seconds, "phases": phases} | memory(child)


#: What parking does, one after the other; `take` copies and then releases. `snapshot` is a part of `find`, and `free`
#: one of `release`.
PHASES: dict[str, tuple[Any, str]] = {
    "find": (parking, "_find"),
    "snapshot": (torch.cuda, "memory_snapshot"),
    "claim": (parking, "_claim"),
    "take": (parking.Parked, "_take"),
    "release": (parking.Parked, "_release"),
    "free": (torch.cuda, "empty_cache"),
}


@contextmanager
def _timed(owner: Any, function: str, name: str, into: dict[str, float]) -> Iterator[None]:
    """Add to `into` the seconds that each call of a function takes."""
    real = getattr(owner, function)

    def timed(*arguments: Any) -> Any:
        begun = time.perf_counter()
        try:
            return real(*arguments)
        finally:
            into[name] = into.get(name, 0.0) + time.perf_counter() - begun

    setattr(owner, function, timed)
    try:
        yield
    finally:
        setattr(owner, function, real)


def restore(child: Child) -> Answer:
    """Undo `park`."""
    begun = time.perf_counter()
    child.parked.restore()
    child.parked = None
    return {"seconds": time.perf_counter() - begun}
