"""A training without any library that saves when it is told to leave, and goes on where it was.

``saving_steps.py FILE [STEPS]``: FILE gets the number of each mini-batch. What it restores must be all that it made.
"""

import sys
import time
from pathlib import Path

from app_agent import session

STEP_S = 0.05
STEPS = 100_000


def main() -> int:
    record = Path(sys.argv[1])
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else STEPS
    session.init(total_steps=steps)
    made: list[int] = []

    def save(folder: str) -> None:
        Path(folder, "made").write_text(" ".join(map(str, made)))

    def load(folder: str) -> None:
        made[:] = map(int, Path(folder, "made").read_text().split())

    for step in range(session.restore(load), steps):
        assert made == list(range(step)), f"step {step} was restored from {made}"
        time.sleep(STEP_S)
        made.append(step)
        with record.open("a") as told:
            print(step, file=told)
        if session.step_end(step, save=save):
            return session.EXIT_REQUEUE
    return 0


if __name__ == "__main__":
    sys.exit(main())
