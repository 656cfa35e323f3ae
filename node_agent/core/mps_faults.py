"""Fatal faults of MPS: one of a client ends all clients of its GPU, and the driver does not say whose it was.

A client that fails by such a fault, and was not alone, is preempted and not failed: its job is started again, and its
GPU is not blamed. Its job is denied MPS from then on (`health`), so a job that faults again does so alone, and fails on
its own account.

There are two kinds of evidence. The server says that it met a fault, or its log does: CUDA is dead in all clients then,
and new ones are refused until all have ended, so the others are ended here. An Xid is only a hint: it ends no job, and
clients that fail soon after it are preempted.

The next node agent is told of an end again. The verdict is noted, so that no client is blamed that came after it.
"""

from __future__ import annotations

from msgspec.structs import replace

from node_agent.core import ladder
from node_agent.core.events import NoteWorker, WorkerGone, WorkerNote
from node_agent.core.health import FAULT_S
from node_agent.core.model import Exited, MpsFault, Starting, Stopping, Suspended, Task, Waiting
from node_agent.core.state import NodeState
from node_agent.core.verdict import Verdict, lost_work
from protocol.messages import GpuId, TaskId


def faulted(node: NodeState, gpu: GpuId, evidence: str, *, gone: TaskId | None = None) -> None:
    """Take in that the MPS server of a device met a fatal fault: end its clients but for the one that is `gone`."""
    for task in _mark(node, gpu, evidence):
        why = node.mps_faults[task.id].reason
        if task.id == gone or isinstance(task.state, Stopping):
            continue
        if isinstance(task.state, Suspended):
            ladder.kill(node, task, "preempted", f"{why}; {lost_work(task.facts)}", parked=True)
        else:
            ladder.terminate(node, task, why, ladder.TERMINATE_S)


def judged(node: NodeState, task: Task, gone: WorkerGone, verdict: Verdict) -> Verdict:
    """Return the verdict on a task whose process has ended, given the faults of the MPS server that it used."""
    if not task.facts.mps or verdict.outcome != "failed" or gone.reason:
        return verdict
    if task.facts.verdict == "failed":  # by an earlier node agent; this one is told of that end again
        return verdict
    if task.facts.verdict == "preempted":
        node.mps_failed_at |= dict.fromkeys(task.devices, node.now)  # clients of that time may still be about to end
        told = (
            f"a fatal fault of the MPS server ended it, as was found before this node agent began; it {verdict.reason}"
        )
        return replace(verdict, outcome="preempted", reason=told)
    verdict = _judged_first(node, task, gone, verdict)
    known = replace(
        node.notes.get(task.id, WorkerNote()), verdict="preempted" if verdict.outcome != "failed" else "failed"
    )
    node.notes[task.id] = known
    node.effects.append(NoteWorker(task.id, known))
    return verdict


def _judged_first(node: NodeState, task: Task, gone: WorkerGone, verdict: Verdict) -> Verdict:
    (gpu,) = task.devices
    hint = node.health.fault(task.gpus, node.now)
    if gone.mps_fault:
        faulted(node, gpu, gone.mps_fault, gone=task.id)
    elif hint:
        _mark(node, gpu, hint)
    node.mps_failed_at[gpu] = node.now
    if not _is_marked(node, task):
        return verdict
    told = f"{node.mps_faults[task.id].reason}; {lost_work(task.facts)}; it {verdict.reason}"
    return replace(verdict, outcome="preempted", reason=told)


def _mark(node: NodeState, gpu: GpuId, evidence: str) -> list[Task]:
    """Note the clients that a fault concerns, unless there was one alone; return those that are new to it."""
    clients = [task for task in node.in_order() if task.facts.mps and gpu in task.devices and _lives(task)]
    fresh = [task for task in clients if not _is_marked(node, task)]
    another_failed = node.now - node.mps_failed_at.get(gpu, -FAULT_S) < FAULT_S
    if len(clients) < 2 and not another_failed:
        return []
    for task in fresh:
        others = [str(other.id) for other in clients if other is not task] or ["a job that has just ended there"]
        reason = (
            f"the MPS server of {gpu} met a fatal fault ({evidence}), which ends all jobs on that GPU; the driver does "
            f"not say whether it was this job's or that of {' or '.join(others)}"
        )
        node.mps_faults[task.id] = MpsFault(node.now, reason)
    if fresh:
        node.health.deny_mps({task.job for task in fresh}, node.now)
    return fresh


def _is_marked(node: NodeState, task: Task) -> bool:
    fault = node.mps_faults.get(task.id)
    return fault is not None and node.now - fault.at < FAULT_S


def _lives(task: Task) -> bool:
    return not isinstance(task.state, Waiting | Starting | Exited)
