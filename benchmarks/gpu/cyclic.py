"""A training script without `torch.optim` that has never heard of gpu-arbiter: its weights are moved by hand.

In each mini-batch its memory climbs through the forward pass and falls through the backward pass. Where it reads the
loss, it waits for the GPU: after the forward pass at the peak of its memory, after the update at the trough.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--read", choices=("forward", "update"), required=True, help="after what it reads the loss")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", type=Path, required=True, help="its process number, and then a line per mini-batch")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.device(options.device):
        layers = (nn.Sequential(nn.Linear(options.width, options.width), nn.GELU()) for _ in range(options.layers))
        model = nn.Sequential(*layers)
        batch = torch.randn(options.rows, options.width)
    weights = list(model.parameters())
    until_s = time.monotonic() + options.seconds
    with options.out.open("w", buffering=1) as out:
        print(os.getpid(), file=out)
        while time.monotonic() < until_s:
            begun_s = time.monotonic()
            loss = (model(batch) - batch).square().mean()
            if options.read == "forward":
                loss.item()
            loss.backward()
            with torch.no_grad():
                for weight in weights:
                    assert weight.grad is not None
                    weight.sub_(weight.grad, alpha=1e-4)
                    weight.grad = None
            if options.read == "update":
                loss.item()
            print(time.monotonic() - begun_s, file=out)


if __name__ == "__main__":
    main()
