"""Evaluation after each epoch, and the best model kept."""

import copy
import sys
import time

import torch

EPOCHS = 4
MINI_BATCHES = 80


def evaluate(model, x):
    model.eval()
    with torch.no_grad():
        time.sleep(0.2)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean().item()
    model.train()
    return loss


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    held_out = torch.randn(256, 32)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 128), torch.nn.BatchNorm1d(128), torch.nn.ReLU(), torch.nn.Linear(128, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    best, kept = float("inf"), None
    for _ in range(EPOCHS):
        for _ in range(MINI_BATCHES // EPOCHS):
            x = torch.randn(16, 32)
            optimizer.zero_grad()
            (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
            time.sleep(0.04)
        loss = evaluate(model, held_out)
        if loss < best:
            best, kept = loss, copy.deepcopy(model.state_dict())
    torch.save([best, kept, model.state_dict()], sys.argv[1])
