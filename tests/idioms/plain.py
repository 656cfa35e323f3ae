"""Plain PyTorch: SGD with momentum."""

import sys
import time

import torch

MINI_BATCHES = 80

torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

if __name__ == "__main__":
    for _ in range(MINI_BATCHES):
        x = torch.randn(16, 32)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.05)
    torch.save(model.state_dict(), sys.argv[1])
