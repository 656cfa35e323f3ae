"""DistributedDataParallel on two GPUs, started by torchrun."""

import sys
import time

import torch
import torch.distributed as dist

MINI_BATCHES = 60
GPUS = 2

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
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
        torch.save(network.state_dict(), sys.argv[1])
    dist.destroy_process_group()
