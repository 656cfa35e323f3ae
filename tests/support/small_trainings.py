"""Trainings of milliseconds with the real trainers: four epochs of six batches, dropout, noise drawn with each batch.

Each returns the final weights as numbers, and after which optimizer steps it validated.
"""

from __future__ import annotations

import contextlib
import io
import logging
import random
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

from app_agent.integrations import huggingface, lightning

ROWS = torch.rand(48, 8, generator=torch.Generator().manual_seed(0))
SUMS = ROWS.sum(1, keepdim=True)


def network() -> nn.Module:
    set_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))


def weights_of(model: nn.Module) -> list[float]:
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]


class Batches:
    """A loader that knows its place, and draws from the global random state as augmentation does."""

    def __init__(self) -> None:
        self.place = 0

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.place %= len(self)
        while self.place < len(self):
            rows = slice(8 * self.place, 8 * self.place + 8)
            self.place += 1
            yield ROWS[rows] + 0.1 * torch.rand(8, 8) + 0.1 * random.random(), SUMS[rows]

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class Summing(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()
        self.validated: list[int] = []

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        loss = (self.network(batch[0]) - batch[1]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        self.log("missed", (self.network(batch[0]) - batch[1]).square().mean())
        if not self.trainer.sanity_checking:
            self.validated.append(self.global_step)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "missed"}}


def train_with_lightning(accumulate: int) -> tuple[list[float], list[int]]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    model, arbiter = Summing(), lightning.GpuArbiter()
    trainer = LightningTrainer(
        max_epochs=4,
        accumulate_grad_batches=accumulate,
        val_check_interval=0.5,
        callbacks=[arbiter],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    held_out = DataLoader(TensorDataset(ROWS, SUMS), batch_size=48)
    trainer.fit(model, Batches(), held_out, ckpt_path=arbiter.latest())
    return weights_of(model), model.validated


class Rows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"rows": ROWS[index], "labels": SUMS[index]}


class SummingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, rows: Tensor, labels: Tensor) -> dict[str, Tensor]:
        sums = self.network(rows)
        return {"loss": (sums - labels).square().mean(), "logits": sums}


class Validations(TrainerCallback):  # type: ignore[misc]
    def __init__(self) -> None:
        self.after: list[int] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **other: Any) -> None:
        self.after.append(state.global_step)


def train_with_hugging_face(accumulate: int) -> tuple[list[float], list[int]]:
    model, validations = SummingModel(), Validations()
    with tempfile.TemporaryDirectory() as nothing, contextlib.redirect_stdout(io.StringIO()):
        arguments = TrainingArguments(
            output_dir=nothing,
            num_train_epochs=4,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=accumulate,
            eval_strategy="epoch",
            save_strategy="no",
            logging_steps=5,
            learning_rate=0.01,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            seed=1,
        )
        trainer = Trainer(
            model=model, args=arguments, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[validations]
        )
        arbiter = huggingface.GpuArbiter(trainer)
        trainer.train(resume_from_checkpoint=arbiter.latest())
    return weights_of(model), validations.after
