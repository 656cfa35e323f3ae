"""Trains on a virtual GPU that, like a real one, works for one process at a time: a lock file is its engine.

``--compute-ms`` of each step it computes with the engine, ``--wait-ms`` it waits for data without. Two that compute all
the time can only take turns, whatever else this machine does; two that wait leave each other gaps. Under torchrun each
rank has a GPU, and all wait for each other at the end of a step.
"""

import argparse
import fcntl
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser()
parser.add_argument("--compute-ms", type=float, required=True)
parser.add_argument("--wait-ms", type=float, required=True)
parser.add_argument("--engines", type=Path, required=True, help="folder of the lock files")
options = parser.parse_args()

torch.set_num_threads(1)
model = torch.nn.Linear(1024, 256)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
batch = torch.rand(64, 1024)
gpu = os.environ["CUDA_VISIBLE_DEVICES"].split(",")[int(os.environ.get("LOCAL_RANK", "0"))]
engine = os.open(options.engines / gpu, os.O_RDWR | os.O_CREAT)
gang = "WORLD_SIZE" in os.environ
if gang:
    dist.init_process_group("gloo")

while True:
    fcntl.flock(engine, fcntl.LOCK_EX)
    done_at = time.thread_time() + options.compute_ms / 1000
    while time.thread_time() < done_at:
        model(batch).square().mean().backward()
    fcntl.flock(engine, fcntl.LOCK_UN)
    if gang:
        dist.barrier()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    time.sleep(options.wait_ms / 1000)
