"""The Trainer of Hugging Face, without our callback."""

import sys
import tempfile
import time

import torch
from transformers import Trainer, TrainingArguments, set_seed

MINI_BATCHES = 60


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8 * MINI_BATCHES

    def __getitem__(self, index):
        x = torch.randn(32, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.sum().reshape(1)}


class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))

    def forward(self, x, labels):
        time.sleep(0.06)
        guess = self.network(x)
        return {"loss": torch.nn.functional.mse_loss(guess, labels), "logits": guess}


if __name__ == "__main__":
    set_seed(0)
    torch.set_num_threads(1)
    model = Regression()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=1,
            per_device_train_batch_size=8,
            learning_rate=0.01,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        Trainer(model=model, args=arguments, train_dataset=Rows()).train()
    torch.save(model.state_dict(), sys.argv[1])
