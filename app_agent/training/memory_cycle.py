"""The cycle of a script's allocated bytes, sampled when the node agent asks for it.

Allocated bytes climb through the forward pass and fall through the backward pass, so their period is the time of one
pass: the mini-batch time of a script that tells nothing of its steps. Of one that tells them it shows in how many
passes gradients are accumulated. The node agent finds it (`node_agent.introspection`). Here they are only read, by a
thread of its own, at gaps that are drawn at random. It runs for one window, and ends as soon as a first step is seen,
which tells more.

A script on a GPU orders its work far ahead of the GPU, and then stands and waits for a result. So the bytes stay the
same for most of a mini-batch, at its peak or at its trough, and the rest is over in milliseconds: between two samples.
The bytes of all tensors made so far are therefore read, too, which grow once in each mini-batch, and at a trough the
interpreter is held, so that the script does not begin the next mini-batch before the driver has locked the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

from . import process_memory
from .state import Order, TrainingState

GAP_S = (0.005, 0.015)
#: How long, and how closely, a trough is waited for: bytes within this share of the way from trough to peak.
TROUGH_S, TROUGH_GAP_S, TROUGH_SHARE = 5.0, 0.001, 0.1
#: There are troughs only where the memory falls by at least this share of its peak.
SWING_MIN = 0.05
#: Until the word on a trough is written; and how long the script stands there (`boundary.STAND_S`).
SAID_S, STAND_S = 0.05, 1.0
WINDOW_S = 20.0
#: Samples of one line to the node agent, about a second's.
LINE_SAMPLES = 100

#: Returns the bytes that are allocated now, None while that is unknown; and besides those of all tensors so far.
Counter = Callable[[], int | None]
Counters = Callable[[], tuple[int, int] | None]
Samples = list[tuple[float, int, int]]


def sample(process: TrainingState, order: Order) -> None:
    """Sample one window, unless that is being done."""
    if not process.sampled:
        process.sampled = True
        threading.Thread(target=_run, args=(process, order.seq), name="gpu-arbiter-cycle", daemon=True).start()


def trough(process: TrainingState, answer: Callable[[], None]) -> None:
    """Give unused memory back at the next trough, or once it has been waited for in vain, and `answer`.

    A script that tells of its steps does it at the end of a mini-batch, and stands there for a moment.
    """
    if _tells_steps(process):
        with process.changed:
            process.trough, process.due = (answer, time.monotonic() + TROUGH_S), True
        return
    threading.Thread(target=_come_to_trough, args=(process, answer), name="gpu-arbiter-trough", daemon=True).start()


def _come_to_trough(process: TrainingState, answer: Callable[[], None]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    with contextlib.suppress(Exception):  # an allocator without counters, or a graph that is being captured
        low, high = process.cycle_bytes
        if high - low > SWING_MIN * high:
            floor = low + TROUGH_SHARE * (high - low)
            until_trough(process_memory.allocated_bytes, floor, TROUGH_S)
        process_memory.give_back_unused()
    answer()
    if process_memory.cuda() is not None and process.link.flush(SAID_S):
        hold_interpreter(STAND_S)


def hold_interpreter(seconds: float) -> None:
    """Let no other thread of this process run Python for so long."""
    ctypes.PyDLL(None).usleep(ctypes.c_uint(round(seconds * 1e6)))  # a PyDLL keeps the lock of the interpreter


def until_trough(counter: Counter, floor: float, seconds: float) -> bool:
    """Wait until `counter` falls to `floor` from above it, for so long at most; return whether it did.

    A count that lies below from the beginning is of a trough that may be about to end.
    """
    until_s, above = time.monotonic() + seconds, False
    while time.monotonic() < until_s:
        held = counter()
        if held is None or (above and held <= floor):
            return held is not None
        above = above or held > floor
        time.sleep(TROUGH_GAP_S)
    return False


def _tells_steps(process: TrainingState) -> bool:
    return process.boundaries > 0 or process.explicit


def _run(process: TrainingState, seq: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    told = _tells_steps(process)

    def is_done() -> bool:
        return _tells_steps(process) != told or process.parked or not process.link.connected

    try:
        if not process.peak_bytes and not told:
            process_memory.forget_peak(())
        window: list[int] = []
        for samples, last in read(process_memory.allocations, WINDOW_S, is_done):
            process.link.say(
                {
                    "type": "counted",
                    "seq": seq,
                    "at_s": [round(at_s, 4) for at_s, _, _ in samples],
                    "bytes": [held for _, held, _ in samples],
                    "made": [made for _, _, made in samples],
                    "last": last,
                }
            )
            window += [held for _, held, _ in samples]
            if window and not _tells_steps(process):  # else each boundary is a trough that is known exactly
                process.cycle_bytes = min(window), max(window)
                _note(process)
    except Exception:  # noqa: BLE001, S110 - an allocator without counters: its period stays unknown
        pass
    finally:
        process.sampled = False


def _note(process: TrainingState) -> None:
    """Keep the trough of this window's samples, and the peak as it was counted."""
    reading = process_memory.reading()
    if reading is not None:
        reading.allocated = process.cycle_bytes[0]
        process.note_memory(reading)


def read(counter: Counters, seconds: float, ended: Callable[[], bool]) -> Iterator[tuple[Samples, bool]]:
    """Yield samples of `counter`, each with its time (s, monotonic), for so long or until `ended`.

    They come in lists of up to `LINE_SAMPLES`, each with whether it is the last.
    """
    dice, until_s = random.Random(), time.monotonic() + seconds  # noqa: S311 - against aliases, not against attackers
    samples: Samples = []
    now_s = time.monotonic()
    while now_s < until_s and not ended():
        time.sleep(dice.uniform(*GAP_S))
        counted, now_s = counter(), time.monotonic()
        if counted is not None:
            samples.append((now_s, *counted))
        if len(samples) >= LINE_SAMPLES:
            yield samples, False
            samples = []
    yield samples, True
