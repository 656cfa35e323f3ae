"""A DataLoader with two worker processes."""

import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

EPOCHS = 2
MINI_BATCHES = 60


class Squares(Dataset):
    def __len__(self):
        return 16 * MINI_BATCHES // EPOCHS

    def __getitem__(self, index):
        x = torch.randn(32, generator=torch.Generator().manual_seed(index))
        return x, x.square().sum().reshape(1)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.001)
    loader = DataLoader(
        Squares(), batch_size=16, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(1)
    )
    for _ in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            time.sleep(0.06)
    torch.save(model.state_dict(), sys.argv[1])
