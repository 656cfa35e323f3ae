"""A class that only looks like an optimizer: `step` and `zero_grad`, derived from nothing."""

import sys
import time

import torch

MINI_BATCHES = 140  # longer than a lease


class Momentum:
    def __init__(self, params, lr):
        self.params, self.lr = list(params), lr
        self.means = [torch.zeros_like(weight) for weight in self.params]

    def zero_grad(self):
        for weight in self.params:
            weight.grad = None

    @torch.no_grad()
    def step(self):
        for weight, mean in zip(self.params, self.means, strict=True):
            mean.mul_(0.9).add_(weight.grad)
            weight.sub_(self.lr * mean)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
    optimizer = Momentum(model.parameters(), lr=0.005)
    for _ in range(MINI_BATCHES):
        x = torch.randn(16, 32)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        time.sleep(0.05)
    torch.save(model.state_dict(), sys.argv[1])
