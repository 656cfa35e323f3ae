"""`plain.py` with the lines that let it leave a GPU and go on elsewhere: `init`, `restore`, `step_end`, `done`.

    python launch/training/digits.py --steps 300                          # by hand: the lines do nothing
    gpu-arbiter submit -- python launch/training/digits.py --steps 300    # under the arbiter

A run that was suspended, stopped and restarted any number of times ends with the weights of an undisturbed one, bit
for bit, because `save` stores *all* state: weights, optimizer and PyTorch's random state. The order of the data
follows from the step's number.
"""

import sys
import time

import torch

from app_agent import session
from launch.training import plain


def main() -> int:
    """Train; return the exit code."""
    options = plain.parse_arguments("Train on handwritten digits, with checkpoints.")
    session.init(total_steps=options.steps)
    digits, model, optimizer = plain.prepare(options)

    def save(folder: str) -> None:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
        torch.save(state, f"{folder}/state.pt")

    def load(folder: str) -> None:
        state = torch.load(f"{folder}/state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])

    start = session.restore(load)
    for step in range(start, options.steps):
        begun = time.perf_counter()
        loss = plain.train_step(model, optimizer, digits.batch(step, options.batch, options.seed))
        if (step + 1) % options.eval_every == 0:
            session.report(accuracy=plain.measure_accuracy(model, digits))
        plain.pace(begun, options.step_ms)
        if session.step_end(step, save=save, metrics={"loss": loss}):
            return session.EXIT_REQUEUE
    session.done(accuracy=plain.conclude(model, digits, options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
