"""A grid of settings: each is tried by a call of its own, on a GPU of its own.

gpu-arbiter up --gpus simulated:4               # in another terminal
python examples/futures_grid.py
"""

import itertools

import torch

from app_agent.executor import GpuExecutor
from launch.training import plain


def accuracy(hidden: int, lr: float, steps: int = 60) -> float:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits, model = plain.Digits(), plain.build_model(hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        plain.train_step(model, optimizer, digits.batch(step, 64, 0))
    return plain.measure_accuracy(model, digits)


def main() -> None:
    grid = list(itertools.product((16, 64), (0.001, 0.01)))
    with GpuExecutor(gpus=1) as executor:
        found = executor.map(accuracy, *zip(*grid, strict=True), at_most=4)
        for (hidden, lr), value in zip(grid, found, strict=True):
            print(f"hidden {hidden} lr {lr} accuracy {value:.4f}")


if __name__ == "__main__":  # a node loads this script again to find `accuracy`
    main()
