"""Hugging Face Trainer with one callback: suspended, preempted and moved, it ends with the same weights.

python examples/hf_trainer.py                                # by hand
gpu-arbiter submit -- python examples/hf_trainer.py          # under the arbiter
"""

import tempfile
import time

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from app_agent.integrations.huggingface import GpuArbiter
from launch.training import plain

options = plain.parse_arguments("Train on handwritten digits with the Hugging Face Trainer.")
digits, network, _ = plain.prepare(options)
nothing = tempfile.TemporaryDirectory()  # checkpoints go where the callback says


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        begun = time.perf_counter()
        logits = self.network(images)
        plain.pace(begun, options.step_ms if self.training else 0.0)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Images(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return len(digits.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"images": digits.images[index], "labels": digits.labels[index]}


trainer = Trainer(
    model=Classifier(),
    args=TrainingArguments(
        output_dir=nothing.name,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch // 2,
        gradient_accumulation_steps=2,
        learning_rate=options.lr,
        save_strategy="no",
        logging_steps=50,
        report_to=[],
        disable_tqdm=True,
        seed=options.seed,
    ),
    train_dataset=Images(),
)
arbiter = GpuArbiter(trainer)
trainer.train(resume_from_checkpoint=arbiter.latest())
plain.conclude(network.cpu(), digits, options.out)
