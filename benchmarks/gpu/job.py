"""A training script that has never heard of gpu-arbiter, for the demonstration on a real GPU.

Its weights at the end depend on every bit of its state; the SHA-256 of all goes into the file `--out`.
"""

import argparse
import hashlib
import os
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor, nn

#: One core hashes some hundreds of megabytes a second.
HASHING_THREADS = 8


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return the SHA-256 over those of the tensors, in their order."""
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return hashlib.sha256(b"".join(pool.map(_digest, tensors))).hexdigest()


def _digest(tensor: Tensor) -> bytes:
    return hashlib.sha256(memoryview(tensor.detach().cpu().contiguous().numpy()).cast("B")).digest()


def distributed(model: nn.Module, device: str) -> nn.Module:
    """Return it as one that trains in several processes, of which this is the only one."""
    store = f"file://{tempfile.mkdtemp()}/store"
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, init_method=store, rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--passes", type=int, default=1, help="micro-batches of a mini-batch")
    parser.add_argument("--idle-ms", type=float, default=0.0, help="of each mini-batch: stands for loading data")
    parser.add_argument("--ddp", action="store_true", help="train by DistributedDataParallel, as its only process")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else PyTorch refuses products of matrices on CUDA
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    width = options.width
    with torch.device(options.device):
        layers = (nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1)) for _ in range(options.layers))
        model: nn.Module = nn.Sequential(*layers)
    if options.ddp:
        model = distributed(model, options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(options.steps):
        for _ in range(options.passes):
            batch = torch.randn(256, width, device=options.device)
            (model(batch) - batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if options.device == "cuda":
            torch.cuda.synchronize()
        time.sleep(options.idle_ms / 1000)
    options.out.write_text(digest_of(model.parameters()) + "\n")
    if options.ddp:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
