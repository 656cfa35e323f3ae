"""Trains on random data in several processes: ``torchrun ddp_train.py KIND STEPS STEP_MS``, KIND ddp, views or fsdp.

Each rank writes the digest of all its state to ``digest-<rank>`` in the working directory at the end.
"""

from __future__ import annotations

import hashlib
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from app_agent import session

kind, steps, step_ms = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
warnings.filterwarnings("ignore")
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 8))
model: torch.nn.Module
if kind == "fsdp":
    model = fully_shard(network, mesh=dist.init_device_mesh("cpu", (dist.get_world_size(),)))
else:
    model = DistributedDataParallel(network, gradient_as_bucket_view=kind == "views")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", enabled=kind != "fsdp", init_scale=1024.0)
average = [parameter.detach().clone() for parameter in model.parameters()]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


def state() -> dict[str, object]:
    moments = [value for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
    tensors = [*model.parameters(), *average, *moments]
    return {
        "tensors": [local(tensor).clone() for tensor in tensors],
        "random": torch.get_rng_state(),
        "scaler": scaler.state_dict(),
    }


def save(folder: str) -> None:
    torch.save(state(), f"{folder}/rank{rank}.pt")


def load(folder: str) -> None:
    saved = torch.load(f"{folder}/rank{rank}.pt")
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the moments that are filled below
    moments = [value for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
    for tensor, value in zip([*model.parameters(), *average, *moments], saved["tensors"], strict=True):
        local(tensor).copy_(value)
    optimizer.zero_grad()
    torch.set_rng_state(saved["random"])
    scaler.load_state_dict(saved["scaler"])


def train() -> None:
    session.init(total_steps=steps)
    for step in range(session.restore(load), steps):
        begun = time.perf_counter()
        batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
        scaler.scale(model(batch).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        for mean, parameter in zip(average, model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)
        time.sleep(max(0.0, step_ms / 1000 - (time.perf_counter() - begun)))
        if session.step_end(step, save=save, samples=32):
            sys.exit(session.EXIT_REQUEUE)
    digest = hashlib.sha256()
    for tensor in state()["tensors"]:  # type: ignore[attr-defined]
        digest.update(tensor.numpy().tobytes())
    Path(f"digest-{rank}").write_text(f"{digest.hexdigest()} {session.samples()}", encoding="ascii")
    session.done()


train()
dist.destroy_process_group()
