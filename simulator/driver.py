"""The imaginary driver: it suspends and resumes processes at any moment, may refuse, and may lose one."""

from __future__ import annotations

from node_agent.core.events import CheckpointProcess, ProcessCheckpointed, WorkerGone
from simulator.workers import Worker

#: The driver's time relative to parking: 5 GB/s beside 50. Source: findings on GPU mechanisms, 1.1 cost model.
DRIVER_TIMES = 10.0


def checkpoint(worker: Worker, effect: CheckpointProcess) -> None:
    """Have the driver suspend or resume a process, and tell the node agent the outcome."""
    node = worker.node
    suspends = effect.do == "suspend"
    if worker.phase != ("running" if suspends else "parked") or worker.by_driver == suspends:
        node.post(impossible(effect))
        return
    seconds = DRIVER_TIMES * (node.costs.suspend_s if suspends else node.costs.resume_s)
    odds = node.dice.random()
    refuses = node.traits.move_refuses if effect.moves else node.traits.driver_refuses
    refused = odds < refuses or seconds * node.traits.slow > effect.timeout_s
    lost = not refused and odds < refuses + node.traits.driver_loses
    asker = node.incarnation
    if suspends and not refused:
        worker.by_driver = True
        worker.phase = "parking"
        worker.training.stand()
    elif not refused:
        worker.phase = "resuming"
        worker.since = node.now()
        worker.move(effect.moves)

    def done() -> None:
        if worker.phase == "gone" or node.incarnation != asker:
            return  # a new node agent knows it already, see `find`
        if lost:
            worker.hangs = worker.lost = True
            worker.training.halt()
        elif not refused:
            find(worker, done=True)
        bytes_ = worker.training.facts.peak_bytes if suspends else 0
        ok, reason = not (refused or lost), "the imaginary driver would not" if refused or lost else ""
        node.post(ProcessCheckpointed(effect.task, effect.do, ok, reason, lost, seconds, bytes_))

    node.call_later(seconds, done)


def impossible(effect: CheckpointProcess) -> ProcessCheckpointed:
    """Return the answer for a process that does not exist or is in another state."""
    return ProcessCheckpointed(effect.task, effect.do, ok=False, reason="it is not in a state for that")


def find(worker: Worker, *, done: bool = False) -> None:
    """Bring the driver's work on a process to its end: it is `done`, or its node agent has ended in the midst of it.

    In the latter case a process that was only half suspended goes on.

    Source: `node_agent.workers.driver`, promise of `find`.
    """
    if not worker.by_driver or worker.phase not in ("parking", "resuming"):
        return
    if worker.lost:
        worker.end(WorkerGone(worker.task, signal=9, reason="the driver had lost it"))
        return
    if done and worker.phase == "parking":
        worker.rest()
        return
    worker.by_driver = False
    worker.phase = "running"
    worker.training.go_on()
