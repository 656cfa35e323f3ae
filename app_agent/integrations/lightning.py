"""PyTorch Lightning: a callback with which a `Trainer` shares its GPUs and goes on elsewhere.

::

    from app_agent.integrations.lightning import GpuArbiter

    arbiter = GpuArbiter()
    trainer = Trainer(..., callbacks=[..., arbiter])                   # last, so that it saves the work of the others
    trainer.fit(model, train_dataloaders=loader, ckpt_path=arbiter.latest())

Without the callback training can still be suspended in place, at its optimizer steps. Told to leave, the process ends
inside `fit` with exit code 75: the lines after `fit` run only once training is over.

To go on bit for bit the loader must remember its position (``state_dict`` and ``load_state_dict``, which Lightning
calls); Lightning starts any other loader at the head of an epoch again. Several processes are started by torchrun.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from app_agent import session
from app_agent.integrations import random_states
from app_agent.training.checkpoints import Save

CHECKPOINT = "lightning.ckpt"


class GpuArbiter(Callback):  # type: ignore[misc]  # Lightning is not installed where types are checked
    """Ends each optimizer step for the node agent, and lets it ask for a checkpoint there."""

    def __init__(self) -> None:
        self._folder: str | None = None
        self._steps = 0
        self._put_off = False

    def latest(self) -> str | None:
        """Return this job's newest checkpoint, for ``fit(ckpt_path=...)``; None on a fresh start."""
        session.restore(self._take)
        return None if self._folder is None else f"{self._folder}/{CHECKPOINT}"

    def _take(self, folder: str) -> None:
        self._folder = folder

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Declare the steps to come. The loader's iterator exists by now: the moment for the random states.

        Raises
        ------
        RuntimeError
            If Lightning itself started further processes, which the node agent then cannot reach.
        """
        if session.active and trainer.world_size > 1 and not torch.distributed.is_torchelastic_launched():
            raise RuntimeError("Trainer(devices=...) started processes of its own; start the script with torchrun")
        total = trainer.estimated_stepping_batches
        session.init(total_steps=int(total) if 0 < total < math.inf else None)
        self._steps = trainer.global_step
        if self._folder is not None:
            random_states.load(self._random_file(trainer, self._folder))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the mini-batch, if the optimizer made a step: with accumulation this is called more often."""
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        self._put_off = _is_followed_by_more(trainer, batch_idx) and not self._put_off
        save = None if self._put_off else self._save(trainer)
        if session.step_end(self._steps - 1, save=save, metrics=trainer.callback_metrics):
            sys.exit(session.EXIT_REQUEUE)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Training is over, however many steps were foreseen; the script's further work needs no checkpoint."""
        session.init(total_steps=trainer.global_step)

    def _save(self, trainer: Trainer) -> Save:
        def save(folder: str) -> None:
            trainer.save_checkpoint(f"{folder}/{CHECKPOINT}")
            random_states.save(self._random_file(trainer, folder))

        return save

    def _random_file(self, trainer: Trainer, folder: str) -> str:
        return f"{folder}/random-{trainer.global_rank}.pt"


def _is_followed_by_more(trainer: Trainer, batch_idx: int) -> bool:
    """Whether the epoch ends or a validation comes after this batch: going on from here Lightning would skip that."""
    validates = trainer.enable_validation and (batch_idx + 1) % (trainer.val_check_batch or math.inf) == 0
    return bool(trainer.is_last_batch or validates)
