"""Notes on workers, which one incarnation of the node agent writes down and the next one takes up."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from node_agent.core import ladder, moves
from node_agent.core.events import AdoptedWorker, NoteWorker, WorkerNote
from node_agent.core.model import Exited, Facts, Loading, Starting, State, Stopping, Suspended, Task, Vacating, Waiting
from node_agent.core.rank_sync import Ranks
from node_agent.core.state import NodeState


def adopt(node: NodeState, workers: Sequence[AdoptedWorker]) -> None:
    """Take up the workers that an earlier incarnation had started, as its notes describe them."""
    node.adopted = True
    for worker in workers:
        note = worker.note
        state: State = Loading(node.now + node.facts.hello_s)
        if note.suspended:
            state = Suspended(proof_by=node.now + node.facts.park_proof_s, by_driver=note.by_driver)
        task = Task(worker.task, worker.app, worker.job, worker.attempt, note.gpus or worker.gpus, state)
        task = replace(task, image_of=note.image_of)
        # A move that was not made is begun anew by the next plan that names it.
        task = moves.at_home(task) if note.suspended else task
        # The last incarnation may have reported the seats of a parked worker as empty.
        lived_s = (note.cost.since_s or 0.0) if worker.lived_s is None else worker.lived_s
        facts, began_at = replace(_facts_of(note), mps=worker.mps), node.now - lived_s
        task = replace(task, facts=facts, ranks=Ranks(apart=note.apart))
        node.put(replace(task, given_up=note.suspended, reseated=bool(note.gpus), began_at=began_at))
        node.count_time(task.id)
        node.notes[worker.task] = note
        node.tell(worker.task, f"found by a new node agent, {task.phase}")
        _go_on_ending(node, worker)
    node.sharing.found(node.tasks)
    node.gpus.touch(gpu for worker in workers for gpu in node.tasks[worker.task].gpus)


def _go_on_ending(node: NodeState, worker: AdoptedWorker) -> None:
    """Go on ending a worker that an earlier incarnation was ending, from SIGTERM on."""
    task, note = node.tasks[worker.task], worker.note
    if note.ending and note.suspended:
        ladder.kill(node, task, "stopped", note.reason, parked=True)
    elif note.ending:
        ladder.stop(node, task, "stopped", note.reason)
    elif note.signalled:
        ladder.terminate(node, task, note.reason, ladder.TERMINATE_S)


def write_note(node: NodeState, task: Task) -> None:
    """Have a worker's note for the next incarnation written down if it has changed."""
    if node.noted.get(task.id) is task or isinstance(task.state, Waiting | Starting | Exited):
        return
    node.noted[task.id] = task
    note = _note_of(task)
    before = node.notes.get(task.id, WorkerNote())
    # Steps change all the time and are repeated in hello: they are written down with the other changes.
    if replace(note, step=before.step) != before:
        node.notes[task.id] = note
        node.effects.append(NoteWorker(task.id, note))


def _facts_of(note: WorkerNote) -> Facts:
    return Facts(
        hello=note.hello,
        can_park=note.can_park,
        can_checkpoint=note.can_checkpoint,
        told_to_leave=note.leaving,
        signalled=note.signalled,
        suspensions=note.suspensions,
        step=note.step,
        start_step=note.start_step,
        saved_step=note.saved_step,
        total_steps=note.total_steps,
        state_bytes=note.state_bytes,
        arena_asked=note.arena_bytes,
        parked_bytes=note.parked_bytes,
        cost=note.cost,
        first_missed=note.hello and not note.cost.first_s,
        verdict=note.verdict,
    )


def _note_of(task: Task) -> WorkerNote:
    facts, state = task.facts, task.state
    reason = state.reason if isinstance(state, Vacating | Stopping) else ""
    return WorkerNote(
        hello=facts.hello,
        can_park=facts.can_park,
        can_checkpoint=facts.can_checkpoint,
        suspended=isinstance(state, Suspended) or (isinstance(state, Stopping) and state.parked),
        by_driver=isinstance(state, Suspended) and state.by_driver,
        leaving=facts.told_to_leave,
        ending=isinstance(state, Stopping),
        signalled=facts.signalled,
        suspensions=facts.suspensions,
        step=facts.step,
        start_step=facts.start_step,
        saved_step=facts.saved_step,
        total_steps=facts.total_steps,
        reason=reason,
        state_bytes=facts.state_bytes,
        arena_bytes=facts.arena_asked,
        parked_bytes=facts.parked_bytes,
        cost=facts.cost,
        gpus=task.gpus if task.reseated else (),
        image_of=task.image_of,
        apart=task.ranks.apart,
        verdict=facts.verdict,
    )
