"""NumPy only: no PyTorch at all."""

import sys
import time

import numpy as np

MINI_BATCHES = 140  # longer than a lease

if __name__ == "__main__":
    source = np.random.default_rng(0)
    weights, mean = source.standard_normal((32, 1)), np.zeros((32, 1))
    for _ in range(MINI_BATCHES):
        x = source.standard_normal((16, 32))
        slope = 2 * x.T @ (x @ weights - x.sum(1, keepdims=True)) / len(x)
        mean = 0.9 * mean + slope
        weights -= 0.01 * mean
        time.sleep(0.05)
    with open(sys.argv[1], "wb") as file:  # noqa: PTH123 - as it is written everywhere
        np.save(file, weights)
