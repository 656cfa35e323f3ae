"""Mixed precision: autocast with a GradScaler."""

import sys
import time

import torch

MINI_BATCHES = 80
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=20)
    for _ in range(MINI_BATCHES):
        x = torch.randn(16, 32, device=DEVICE)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        time.sleep(0.05)
    torch.save([model.state_dict(), scaler.state_dict()], sys.argv[1])
