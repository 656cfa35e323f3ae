"""The random states of a training process on the disk: Python's, NumPy's, PyTorch's and the current GPU's.

Each process has its own, so name the file by rank::

    random_states.save(f"{folder}/random-{rank}.pt")
    random_states.load(f"{folder}/random-{rank}.pt")

Load them last, after the model is built and after ``iter(loader)``, which draws a seed itself: the next numbers drawn
are then those that the saved process would have drawn.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch


def save(path: str) -> None:
    """Write the random states of this process to `path`; raises OSError if the disk refuses."""
    numpy: Any = np.random.get_state()
    algorithm, keys, *rest = numpy
    states = {
        "python": random.getstate(),
        "numpy": (algorithm, keys.tolist(), *rest),  # plain numbers, which torch.load takes without trusting the file
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
    }
    torch.save(states, path)


def load(path: str) -> bool:
    """Take the random states in `path`; return False, with nothing changed, if this rank saved none there."""
    if not Path(path).exists():
        return False
    states = torch.load(path, weights_only=True)
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    return True
