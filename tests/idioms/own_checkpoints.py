"""A script with checkpoints of its own, in a file of its own."""

import os
import sys
import time
from pathlib import Path

import torch

MINI_BATCHES = 80
EVERY = 10

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.Dropout(0.1), torch.nn.Linear(128, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    last, begin = Path(sys.argv[1] + ".last"), 0
    if last.exists():
        state = torch.load(last)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        begin = state["made"]
    for number in range(begin, MINI_BATCHES):
        x = torch.randn(16, 32)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        time.sleep(0.05)
        if (number + 1) % EVERY == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
            torch.save({**state, "made": number + 1}, f"{last}.new")
            os.replace(f"{last}.new", last)  # noqa: PTH105 - as it is written everywhere
    torch.save(model.state_dict(), sys.argv[1])
