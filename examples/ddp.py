"""Data-parallel training with DistributedDataParallel: every process saves into the same folder at the same step.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py                  # by hand
    gpu-arbiter submit --gpus 2 -- torchrun --standalone examples/ddp.py      # one process for each GPU

The processes need not agree on anything: the node agent names the step at which all of them stop.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from app_agent import session
from app_agent.integrations import random_states
from launch.training import plain

options = plain.parse_arguments("Train on handwritten digits, on several GPUs.")
dist.init_process_group()  # torchrun says who takes part
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")

session.init(total_steps=options.steps)
digits, model, _ = plain.prepare(options)  # the same weights everywhere
torch.manual_seed(options.seed + rank)  # dropout differs from process to process
model = model.to(device)
# Gradients as views of the buckets: without that the buckets, as large as the weights, stay on a suspended GPU.
parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)


def save(folder: str) -> None:
    if rank == 0:
        torch.save([model.state_dict(), optimizer.state_dict()], f"{folder}/state.pt")
    random_states.save(f"{folder}/random-{rank}.pt")


def load(folder: str) -> None:
    weights, moments = torch.load(f"{folder}/state.pt", map_location=device)
    model.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    random_states.load(f"{folder}/random-{rank}.pt")


for step in range(session.restore(load), options.steps):
    begun = time.perf_counter()
    images, labels = digits.batch(step, options.batch, options.seed)
    mine = images[rank::world].to(device), labels[rank::world].to(device)  # this process's share of the mini-batch
    loss = plain.train_step(parallel, optimizer, mine)
    plain.pace(begun, options.step_ms)
    if session.step_end(step, save=save, metrics={"loss": loss}):
        sys.exit(session.EXIT_REQUEUE)

session.done()
if rank == 0:
    plain.conclude(model.cpu(), digits, options.out)
dist.barrier()  # gloo's threads let go of the last tensors before any interpreter ends, or they abort it
dist.destroy_process_group()
