"""DistributedDataParallel on two GPUs, started by `torch.multiprocessing.spawn`."""

import os
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

MINI_BATCHES = 60
GPUS = 2


def train(rank, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=GPUS)
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
    model = torch.nn.parallel.DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    source = torch.Generator().manual_seed(rank)
    for _ in range(MINI_BATCHES):
        x = torch.randn(16, 32, generator=source)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        time.sleep(0.06)
    if rank == 0:
        torch.save(network.state_dict(), out)
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(free.getsockname()[1])
    mp.spawn(train, (sys.argv[1],), nprocs=GPUS)
