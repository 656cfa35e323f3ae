"""A plain PyTorch script that has never heard of gpu-arbiter: classify handwritten digits.

Run under a lease it is suspended and resumed all the same, at its optimizer steps. It writes no checkpoints, so it
cannot go on elsewhere. `digits.py` is this script with the few lines that change that. Run by hand::

    python launch/training/plain.py --steps 300

Everything random comes from --seed and the step's number, so two runs end with the same weights to the bit.

The images beside this script are the test set of "Optical Recognition of Handwritten Digits" by E. Alpaydin and
C. Kaynak, UCI Machine Learning Repository, CC BY 4.0, in the file that scikit-learn ships.
"""

import argparse
import gzip
import hashlib
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

IMAGES = Path(__file__).with_name("digits.csv.gz")
TEST_IMAGES = 297  #: the last of 1,797


def parse_arguments(description: str) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=300, help="mini-batches in all")
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--hidden", type=int, default=64, help="units of the hidden layer")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=int(os.environ.get("GPU_ARBITER_GPUS") or 1))
    parser.add_argument(
        "--step-ms",
        type=float,
        default=0.0,
        help="sleep so that a step takes about so long: stands for the loading of data, which these tiny images lack",
    )
    parser.add_argument("--eval-every", type=int, default=50, help="steps between two evaluations (digits.py)")
    parser.add_argument("--out", type=Path, help="file for the SHA-256 of the final weights")
    return parser.parse_args()


class Digits:
    """1,797 images of 8 x 8 grey values and their digits, in memory, split into training and test images."""

    def __init__(self) -> None:
        rows = torch.tensor(_read_rows())
        images, labels = rows[:, :-1].float() / 16.0, rows[:, -1].long()
        self.images, self.labels = images[:-TEST_IMAGES].clone(), labels[:-TEST_IMAGES].clone()
        self.test_images, self.test_labels = images[-TEST_IMAGES:].clone(), labels[-TEST_IMAGES:].clone()

    def batch(self, step: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return mini-batch `step`: its place in its epoch's own shuffle, so that a restart can begin anywhere."""
        per_epoch = len(self.images) // size
        epoch, place = divmod(step, per_epoch)
        shuffle = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        chosen = shuffle[place * size : (place + 1) * size]
        return self.images[chosen], self.labels[chosen]


def _read_rows() -> list[list[int]]:
    """Return for each image its 64 grey values, 0 to 16, and its digit."""
    with gzip.open(IMAGES, "rt", encoding="ascii") as file:
        return [[int(float(value)) for value in line.split(",")] for line in file]


def build_model(hidden: int) -> nn.Module:
    """Return the network; its dropout makes training depend on PyTorch's random state, as most real training does."""
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(0.1), nn.Linear(hidden, 10))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Make one mini-batch; return its loss."""
    images, labels = batch
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    return loss.detach()


def measure_accuracy(model: nn.Module, digits: Digits) -> float:
    """Return the share of test images classified rightly."""
    model.eval()
    with torch.no_grad():
        right = model(digits.test_images).argmax(dim=1) == digits.test_labels
    model.train()
    return float(right.float().mean())


def digest_of(model: nn.Module) -> str:
    """Return the SHA-256 of all weights, in the order of their names."""
    state = model.state_dict()
    digest = hashlib.sha256()
    for name in sorted(state):
        digest.update(state[name].detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def pace(begun: float, step_ms: float) -> None:
    """Wait for the data of a step that began at `begun`, see --step-ms."""
    time.sleep(max(0.0, begun + step_ms / 1000 - time.perf_counter()))


def conclude(model: nn.Module, digits: Digits, out: Path | None) -> float:
    """Print the accuracy on the test images and return it."""
    accuracy, digest = measure_accuracy(model, digits), digest_of(model)
    print(f"test accuracy {accuracy:.4f}")
    print(f"weights sha256 {digest}")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(digest + "\n", encoding="ascii")
    return accuracy


def prepare(options: argparse.Namespace) -> tuple[Digits, nn.Module, torch.optim.Optimizer]:
    """Return the data, and the network and its optimizer as they are before the first step."""
    torch.set_num_threads(options.threads)
    torch.set_num_interop_threads(1)
    torch.manual_seed(options.seed)
    model = build_model(options.hidden)
    return Digits(), model, torch.optim.AdamW(model.parameters(), lr=options.lr)


def main() -> None:
    """Train."""
    options = parse_arguments("Train on handwritten digits; knows nothing of gpu-arbiter.")
    digits, model, optimizer = prepare(options)
    for step in range(options.steps):
        begun = time.perf_counter()
        train_step(model, optimizer, digits.batch(step, options.batch, options.seed))
        pace(begun, options.step_ms)
    conclude(model, digits, options.out)


if __name__ == "__main__":
    main()
