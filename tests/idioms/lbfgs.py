"""LBFGS, which evaluates a closure several times in each step."""

import sys
import time

import torch

MINI_BATCHES = 60

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.Tanh(), torch.nn.Linear(48, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=5)
    for _ in range(MINI_BATCHES):
        x = torch.randn(64, 32)
        y = x.sin().sum(1, keepdim=True)

        def closure():
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()  # noqa: B023 - called within this mini-batch only
            loss.backward()
            return loss

        optimizer.step(closure)
        time.sleep(0.06)
    torch.save(model.state_dict(), sys.argv[1])
