"""Plain PyTorch that has never heard of gpu-arbiter: suspended and resumed all the same, at its optimizer steps.

python examples/plain.py                                # by hand
gpu-arbiter submit -- python examples/plain.py          # under the arbiter
"""

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
optimizer = torch.optim.Adam(model.parameters())
for _ in range(500):
    x = torch.rand(128, 64)
    loss = (model(x) - x.norm(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")
