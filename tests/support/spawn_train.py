"""Runs `ddp_train.py` in processes of `torch.multiprocessing.spawn`: ``spawn_train.py WORLD KIND STEPS STEP_MS``."""

from __future__ import annotations

import os
import runpy
import socket
import sys
from pathlib import Path

import torch.multiprocessing as mp


def train(rank: int, arguments: list[str]) -> None:
    os.environ["RANK"] = str(rank)
    sys.argv[1:] = arguments
    runpy.run_path(str(Path(__file__).with_name("ddp_train.py")), run_name="__main__")


if __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": sys.argv[1]}
    mp.spawn(train, (sys.argv[2:],), nprocs=int(sys.argv[1]))
