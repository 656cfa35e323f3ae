"""The words of the helper thread: hello, progress, the end; and the figures in them."""

from __future__ import annotations

import contextlib
import time

from . import parking, process_memory
from .agent_link import BEAT_S, Line
from .state import TrainingState
from .values import metric_fields

PROTO = 1
HEARTBEAT_S = 5.0
#: The first mini-batch may still make state, such as an optimizer's moments.
BOUNDARIES_BEFORE_SURVEY = 2


def hello(process: TrainingState) -> Line:
    """Return the first line of a connection, which restates everything that counts."""
    with process.changed:
        gen = process.accepted[0]
        seq = process.obeyed[1] if process.obeyed[0] == gen else 0
        process.told = {}
        if process.finished:
            say_finished(process)  # after this hello, with the final metrics
        return {
            "type": "hello",
            "proto": PROTO,
            "task": process.task,
            "pid": process.pid,
            "state": "suspended" if process.stopped else "held" if _stands(process) else "running",
            "gen": gen,
            "seq": seq,
            "finished": process.finished,
            "rank": process.rank,
            "world": process.world,
            **_facts(process),
            **metric_fields(process.metrics),
        }


def _stands(process: TrainingState) -> bool:
    """Whether the process stands at a boundary by an order to hold, or will."""
    return process.held or (process.order is not None and process.order.do == "hold")


def say_finished(process: TrainingState) -> None:
    """Say that training has reached its end."""
    process.link.say({"type": "finished", "step": process.step, **metric_fields(process.metrics)})


def progress(process: TrainingState) -> Line:
    """Return how training gets on now."""
    return {"type": "progress", **_facts(process), **_figures(process), "step_s": _step_s(process)}


def beat(process: TrainingState) -> Line | None:
    """Return the changes, at most every `BEAT_S` unless they are of the script's abilities.

    When nothing has changed for long, return a heartbeat.
    """
    now = time.monotonic()
    process.metrics_wanted = True
    _watch_memory(process)
    line = {**_facts(process), **_figures(process)}
    capable = process.told.get("can_park"), process.told.get("can_checkpoint"), process.told.get("start_step")
    urgent = capable != (line["can_park"], line["can_checkpoint"], line["start_step"])
    quiet_s = HEARTBEAT_S if line == process.told else 0.9 * BEAT_S
    if not urgent and now - process.told_at < quiet_s:
        return None
    process.told, process.told_at = line, now
    return {"type": "progress", **line, "step_s": _step_s(process)}


def enforce_cap(process: TrainingState) -> None:
    """Put the cap in force once it is known which GPUs this process uses; without CUDA there is nothing to cap."""
    if process.cap is not None and process.devices:
        limit, process.cap = process.cap, None
        with contextlib.suppress(Exception):  # as below: the node agent sees whether it is kept to
            process_memory.cap(limit and max(1, limit - process.nccl_bytes), process.devices)
        if limit:  # what it keeps already is in the way of another process
            with process.changed:
                process.cache_unwanted = process.due = True


def _facts(process: TrainingState) -> Line:
    return {
        "step": process.step,
        "start_step": process.start_step,
        "total_steps": process.total_steps,
        "can_park": process.can_park,
        "can_checkpoint": process.can_checkpoint,
        "saved_step": process.saved_step,
        "state_bytes": process.state_bytes,
    }


def _figures(process: TrainingState) -> Line:
    return {
        **metric_fields(process.metrics),
        "samples": process.samples,
        "arena_bytes": parking.ready_bytes(),
        "peak_bytes": process.peak_bytes + (process.nccl_bytes if process.peak_bytes else 0),
        "trough_bytes": process.trough_bytes,
        "reserved_bytes": process.reserved_bytes + process.nccl_bytes,
    }


def _watch_memory(process: TrainingState) -> None:
    if not process.surveyed and process.boundaries >= BOUNDARIES_BEFORE_SURVEY:
        process.surveyed = True
        with process.changed:
            process.survey_wanted = process.due = True
    if process.cap is not None:
        enforce_cap(process)


def _step_s(process: TrainingState) -> float:
    """Mean seconds per mini-batch over the last beats in which there were any; 0 while unknown.

    The first mini-batch never counts: it holds the start-up.
    """
    beats, now = process.beats, (process.boundaries, process.training_s)
    with process.changed:  # the thread that makes the arena asks too
        if now[0] > (beats[-1][0] if beats else 0):
            beats.append(now)
    if len(beats) < 2:
        return 0.0
    (steps, begun_s), (steps_now, now_s) = beats[0], beats[-1]
    return max(0.0, now_s - begun_s) / (steps_now - steps)
