"""PyTorch Lightning with one callback: suspended, preempted and moved, it ends with the same weights.

python examples/lightning_digits.py                                # by hand
gpu-arbiter submit -- python examples/lightning_digits.py          # under the arbiter
"""

import time
from collections.abc import Iterator

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from app_agent.integrations.lightning import GpuArbiter
from launch.training import plain

options = plain.parse_arguments("Train on handwritten digits with PyTorch Lightning.")
digits, network, _ = plain.prepare(options)


class Batches:
    """The mini-batches of an epoch. Lightning stores its place with `state_dict`, as that of any stateful loader."""

    def __init__(self) -> None:
        self.epoch = self.place = 0

    def __len__(self) -> int:
        return len(digits.images) // options.batch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.place == len(self):
            self.epoch, self.place = self.epoch + 1, 0
        while self.place < len(self):
            self.place += 1
            yield digits.batch(self.epoch * len(self) + self.place - 1, options.batch, options.seed)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.place = state["epoch"], state["place"]


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = network

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        begun = time.perf_counter()
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self.network(images), labels)
        self.log("loss", loss)
        plain.pace(begun, options.step_ms)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.network.parameters(), lr=options.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)}


arbiter = GpuArbiter()
trainer = Trainer(
    max_steps=options.steps,
    callbacks=[arbiter],  # the last of them, if there are more
    accelerator="auto",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Classifier(), train_dataloaders=Batches(), ckpt_path=arbiter.latest())
plain.conclude(network.cpu(), digits, options.out)
