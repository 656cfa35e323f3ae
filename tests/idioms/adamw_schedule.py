"""AdamW with a learning-rate schedule and gradient clipping."""

import sys
import time

import torch

MINI_BATCHES = 80


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 128), torch.nn.Dropout(0.1), torch.nn.GELU(), torch.nn.Linear(128, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=MINI_BATCHES)
    for _ in range(MINI_BATCHES):
        x = torch.randn(16, 32)
        loss = torch.nn.functional.huber_loss(model(x), x.sum(1, keepdim=True))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        time.sleep(0.05)
    torch.save([model.state_dict(), schedule.get_last_lr()], sys.argv[1])


if __name__ == "__main__":
    main()
