"""Sharded training with FSDP2: every process holds, and saves, its part of the weights and of the optimizer's state.

    torchrun --standalone --nproc-per-node 2 examples/fsdp.py                 # by hand
    gpu-arbiter submit --gpus 2 -- torchrun --standalone examples/fsdp.py     # one process for each GPU

PyTorch's distributed checkpoint takes the parts apart again for any number of processes.
"""

import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from app_agent import session
from app_agent.integrations import random_states
from launch.training import plain

options = plain.parse_arguments("Train on handwritten digits, with the weights in parts.")
dist.init_process_group()  # torchrun says who takes part
rank, world = dist.get_rank(), dist.get_world_size()
kind = "cuda" if torch.cuda.is_available() else "cpu"
device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)

session.init(total_steps=options.steps)
digits, model, _ = plain.prepare(options)
torch.manual_seed(options.seed + rank)  # dropout differs from process to process
fully_shard(model.to(device), mesh=init_device_mesh(kind, (world,)))
optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)


def save(folder: str) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    random_states.save(f"{folder}/random-{rank}.pt")


def load(folder: str) -> None:
    weights, moments = get_state_dict(model, optimizer)  # says which parts this process needs
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    random_states.load(f"{folder}/random-{rank}.pt")


for step in range(session.restore(load), options.steps):
    begun = time.perf_counter()
    images, labels = digits.batch(step, options.batch, options.seed)
    mine = images[rank::world].to(device), labels[rank::world].to(device)  # this process's share of the mini-batch
    loss = plain.train_step(model, optimizer, mine)
    plain.pace(begun, options.step_ms)
    if session.step_end(step, save=save, metrics={"loss": loss}):
        sys.exit(session.EXIT_REQUEUE)

session.done()
whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if rank == 0:
    complete = plain.build_model(options.hidden)
    complete.load_state_dict(whole)
    plain.conclude(complete, digits, options.out)
dist.barrier()  # gloo's threads let go of the last tensors before any interpreter ends, or they abort it
dist.destroy_process_group()
