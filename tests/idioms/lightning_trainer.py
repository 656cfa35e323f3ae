"""Lightning's Trainer, without our callback."""

import sys
import time

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset

MINI_BATCHES = 60


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))

    def training_step(self, batch, _):
        time.sleep(0.06)
        x, y = batch
        return torch.nn.functional.mse_loss(self.network(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    seed_everything(0)
    torch.set_num_threads(1)
    x = torch.randn(480, 32)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    model = Regression()
    trainer = Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(model, data)
    torch.save(model.state_dict(), sys.argv[1])
