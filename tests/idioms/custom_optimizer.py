"""An optimizer of one's own, derived from `torch.optim.Optimizer`."""

import sys
import time

import torch

MINI_BATCHES = 80


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            fast, slow = group["betas"]
            for weight in group["params"]:
                mean = self.state[weight].setdefault("mean", torch.zeros_like(weight))
                weight.sub_(group["lr"] * torch.sign(fast * mean + (1 - fast) * weight.grad))
                mean.lerp_(weight.grad, 1 - slow)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
    optimizer = Lion(model.parameters())
    for _ in range(MINI_BATCHES):
        x = torch.randn(16, 32)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        time.sleep(0.05)
    torch.save(model.state_dict(), sys.argv[1])
