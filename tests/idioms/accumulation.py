"""Gradients accumulated over four parts of each mini-batch."""

import sys
import time

import torch

MINI_BATCHES = 60
PARTS = 4

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for number in range(MINI_BATCHES * PARTS):
        x = torch.randn(8, 32)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean() / PARTS
        loss.backward()
        if (number + 1) % PARTS == 0:
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(0.015)
    torch.save(model.state_dict(), sys.argv[1])
