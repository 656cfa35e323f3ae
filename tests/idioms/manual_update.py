"""Weights that the loop changes itself, without an optimizer."""

import sys
import time

import torch

MINI_BATCHES = 140  # longer than a lease

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    first = torch.randn(32, 64, requires_grad=True)
    second = torch.randn(64, 1, requires_grad=True)
    for _ in range(MINI_BATCHES):
        x = torch.randn(16, 32)
        loss = ((x @ first).tanh() @ second - x.sum(1, keepdim=True)).square().mean()
        for weight, slope in zip((first, second), torch.autograd.grad(loss, (first, second)), strict=True):
            weight.data -= 0.001 * slope
        time.sleep(0.05)
    torch.save([first, second], sys.argv[1])
