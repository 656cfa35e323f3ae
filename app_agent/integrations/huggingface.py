"""Hugging Face `Trainer`: a callback with which it shares its GPUs and goes on elsewhere.

::

    from app_agent.integrations.huggingface import GpuArbiter

    trainer = Trainer(...)
    arbiter = GpuArbiter(trainer)                                      # registers itself, after the other callbacks
    trainer.train(resume_from_checkpoint=arbiter.latest())

Without the callback training can still be suspended in place, at its optimizer steps. Told to leave, the process ends
inside `train` with exit code 75: the lines after `train` run only once training is over.

The checkpoint is the Trainer's own, with its optimizer, schedule, random states and place in the data, written to the
job's checkpoint folder instead of `output_dir`.
"""

from __future__ import annotations

import sys
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from app_agent import session


class GpuArbiter(TrainerCallback):  # type: ignore[misc]  # transformers is not installed where types are checked
    """Ends each optimizer step for the node agent, and lets it ask for a checkpoint there."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._checkpoint: str | None = None
        self._put_off = False
        trainer.add_callback(self)

    def latest(self) -> str | None:
        """Return this job's newest checkpoint, for ``train(resume_from_checkpoint=...)``; None on a fresh start."""
        session.restore(self._take)
        return self._checkpoint

    def _take(self, folder: str) -> None:
        self._checkpoint = get_last_checkpoint(folder)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **other: Any
    ) -> None:
        """Declare the steps to come."""
        session.init(total_steps=state.max_steps)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **other: Any) -> None:
        """End the mini-batch: this comes once for each optimizer step, with accumulation too."""
        self._put_off = _is_followed_by_evaluation(args, state, control) and not self._put_off
        if session.step_end(state.global_step - 1, save=None if self._put_off else self._save):
            sys.exit(session.EXIT_REQUEUE)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **other: Any
    ) -> None:
        """Report the Trainer's logs."""
        session.report(**{name: value for name, value in logs.items() if isinstance(value, int | float)})

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **other: Any) -> None:
        """Training is over, however many steps were foreseen; the script's further work needs no checkpoint."""
        session.init(total_steps=state.global_step)

    def _save(self, folder: str) -> None:
        """Have the Trainer write its checkpoint below `folder`, as its own SIGTERM handler has it written."""
        args = self._trainer.args
        usual = args.output_dir, args.push_to_hub
        args.output_dir, args.push_to_hub = folder, False
        try:
            self._trainer._save_checkpoint(self._trainer.model, trial=None)
        finally:
            args.output_dir, args.push_to_hub = usual


def _is_followed_by_evaluation(args: TrainingArguments, state: TrainerState, control: TrainerControl) -> bool:
    """Whether an evaluation comes after this step: going on from here the Trainer would skip it."""
    ends_epoch = state.epoch is not None and state.epoch == int(state.epoch)
    return bool(control.should_evaluate or (ends_epoch and args.eval_strategy == "epoch"))
