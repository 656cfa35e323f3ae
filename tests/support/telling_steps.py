"""A training without any library that writes down every mini-batch, every signal, and its own last word.

``telling_steps.py FILE --steps N --step-ms T``: FILE gets a line ``PID STEP`` for each mini-batch, and FILE.words a
line ``PID WORD`` for each signal that could be caught, and for a process that left or was done by itself. A process
without a last word was killed. It starts in a tenth of the time that PyTorch takes, so that a site may have many.
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from app_agent import session

CAUGHT = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
LEFT, DONE = "left", "done"
APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--step-ms", type=float)
    given, _others = parser.parse_known_args()
    steps, words = (os.open(name, APPEND, 0o600) for name in (given.file, f"{given.file}.words"))

    def say(word: str) -> None:
        os.write(words, f"{os.getpid()} {word}\n".encode())

    for number in CAUGHT:
        signal.signal(number, lambda caught, _frame: say(signal.Signals(caught).name))

    made = 0

    def save(folder: str) -> None:
        (Path(folder) / "made").write_text(str(made))

    def load(folder: str) -> None:
        nonlocal made
        made = int((Path(folder) / "made").read_text())

    session.init(total_steps=given.steps)
    session.restore(load)
    while made < given.steps:
        os.write(steps, f"{os.getpid()} {made}\n".encode())
        sum(range(100_000))  # a few milliseconds, by which those who look see that it works
        time.sleep(given.step_ms / 1000.0)
        made += 1
        if session.step_end(made - 1, save=save):
            say(LEFT)
            return session.EXIT_REQUEUE
    session.done()
    say(DONE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
