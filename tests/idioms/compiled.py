"""A model under `torch.compile`."""

import sys
import time

import torch

MINI_BATCHES = 60

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.SiLU(), torch.nn.Linear(128, 1))
    fast = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(MINI_BATCHES):
        x = torch.randn(16, 32)
        loss = (fast(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.06)
    torch.save(model.state_dict(), sys.argv[1])
