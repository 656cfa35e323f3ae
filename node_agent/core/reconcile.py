"""Reconciling: each task is led from its state towards the wish for it.

`settle` runs at the end of every event and walks all tasks. It begins, rests, resumes, vacates and ends them, has notes
written, and asks for a measurement where a departure is still to be proven.
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from node_agent.core import adoption, ladder
from node_agent.core.events import OrderWorker, StartWorker, TakeSample
from node_agent.core.model import (
    Exited,
    Loading,
    Resuming,
    Running,
    Starting,
    Stopping,
    Suspended,
    Suspending,
    Task,
    Vacating,
    Waiting,
)
from node_agent.core.sharing import Instruction
from node_agent.core.state import NodeState
from node_agent.core.verdict import lost_work
from protocol.worker import Order


def settle(node: NodeState) -> None:
    """Lead every task towards its wish; have the GPUs measured if a departure needs a proof."""
    for instruction in node.sharing.take_turns(node.tasks, node.now):
        _pass_on(node, instruction)
    for task in node.in_order():
        _reconcile(node, task)
    for task in node.in_order():
        adoption.write_note(node, task)
    node.effects += node.health.news()
    if node.gpus.mark > node.sample_asked or node.gpus.is_due(node.now):
        node.sample_asked = node.gpus.mark
        node.effects.append(TakeSample(node.sample_asked))


def _reconcile(node: NodeState, task: Task) -> None:
    match task.state:
        case Waiting():
            _begin(node, task)
        case Starting():
            pass  # its outcome comes as an event
        case Loading() | Running():
            _guide(node, task)
        case Suspended():
            _hold(node, task)
        case Suspending() | Resuming() | Vacating() if task.want == "stop":
            ladder.stop(node, task, "stopped", task.reason)
        case Suspending() | Resuming() | Vacating() | Stopping():
            ladder.climb(node, task)
        case Exited():
            ladder.kill_lingering(node, task)
        case _:
            assert_never(task.state)


def _begin(node: NodeState, task: Task) -> None:
    """Start a waiting task if its GPUs are leased and proven free; end it if it is not to run."""
    if task.want == "run":
        quarantine = next(filter(None, map(node.health.quarantine, task.gpus)), "")
        obstacle = node.unrecorded or _obstacle(node, task) or quarantine
        if obstacle:
            node.put(replace(task, state=Waiting(obstacle)))
            return
        assert task.launch is not None
        node.enter_state(task, Starting(), "its GPUs are free")
        mps = node.health.may_use_mps(task.job, node.now)
        start = StartWorker(task.id, task.app, task.job, task.attempt, task.gpus, task.launch, task.rendezvous, mps)
        node.effects.append(start)
    elif task.want == "stop":
        node.enter_state(task, Exited("stopped", task.reason or "it was not running here"), "nothing to stop")
    else:
        node.enter_state(task, Exited("preempted", "it was not running here"), "nothing to vacate")


def _guide(node: NodeState, task: Task) -> None:
    """Have a living worker obey the wish; one that may still say hello is asked to leave only after that."""
    ranks = task.ranks
    silent = not task.facts.hello or (bool(ranks.hellos) and not ranks.complete)
    greeting = isinstance(task.state, Loading) and silent and node.now < task.state.hello_by
    leaves = task.want == "vacate" and not task.stands
    if task.want == "stop":
        ladder.stop(node, task, "stopped", task.reason)
    elif isinstance(task.state, Running) and ranks.halted and not ranks.apart and task.facts.finished:
        ladder.let_exit(node, task)
    elif isinstance(task.state, Running) and ranks.halted and not ranks.apart:
        # By an order to an earlier node agent, as a rule. It hears no other before it trains.
        ladder.go_on(node, task, "told to go on, as a process of it stands or is suspended")
    elif leaves and not greeting:
        ladder.vacate(node, task)
    elif isinstance(task.state, Loading) and node.now >= task.state.hello_by:
        node.enter_running(task, "said no hello in time; treated as a program without the library")
    elif isinstance(task.state, Running) and task.want == "run" and not node.sharing.has_turn(task):
        ladder.rest(node, task)
    elif isinstance(task.state, Running) and task.want is not None and ranks.apart:
        ladder.stand(node, task)


def _hold(node: NodeState, task: Task) -> None:
    """Resume a parked worker when it may run, and end it when it may not stay."""
    assert isinstance(task.state, Suspended)
    if task.want == "stop":
        # No SIGTERM: a script that catches it would be unparked, on GPUs that another task may use by now.
        ladder.kill(node, task, "stopped", task.reason, parked=True)
    elif task.want == "run":
        state = _proven(node, task)
        task = node.tasks[task.id]
        obstacle = _obstacle(node, task)
        if obstacle:
            retry_at = state.retry_at if node.now < state.retry_at else 0.0
            node.put(replace(task, state=replace(state, obstacle=obstacle, retry_at=retry_at)))
        elif node.now >= state.retry_at:
            ladder.resume(node, task)
    elif task.want == "vacate":
        _vacate_parked(node, task)


def _vacate_parked(node: NodeState, task: Task) -> None:
    """Have a parked worker save and leave if it shares its GPUs or has kept their memory; else it stays parked."""
    state = _proven(node, task)
    task = node.tasks[task.id]
    if node.sharing.returns(task, node.tasks):
        if node.sharing.obstacle(task, node.tasks):
            pass
        elif task.ranks.world > 1 and not task.ranks.apart:  # suspended ones refuse to stand at one step, to save there
            ladder.go_on(node, task, "uses its GPUs once more; told to go on first, then to save and leave")
        else:
            ladder.leave(node, task, "uses its GPUs once more, to save and leave")
    elif state.kept and (task.given_up or node.sharing.obstacle(task, node.tasks)):
        # SIGTERM would have it unparked, on GPUs that another task may use.
        why = f"was suspended but {state.kept}; {lost_work(task.facts)}"
        ladder.kill(node, task, "preempted", why, parked=True)
    elif state.kept:
        ladder.terminate(node, task, f"was suspended but {state.kept}", ladder.TERMINATE_S)


def _proven(node: NodeState, task: Task) -> Suspended:
    """Look how much memory a parked worker has kept, once that is due; too much rules this method out for it.

    One that is about to be moved has kept nothing on its new GPUs, which it has never used.
    """
    state = task.state
    assert isinstance(state, Suspended)
    if node.now < state.proof_by:
        return state
    if state.kept and not node.gpus.gave_back(task, node.tasks):
        return state
    if state.kept:
        node.forget_kept(task.job)
    kept = "" if task.image_of or state.kept else node.gpus.kept_by(task, node.tasks)
    if kept:
        node.note_kept(task, "driver" if state.by_driver else "suspend", kept)
        node.tell(task.id, f"{kept}, and is not suspended that way again")
        node.gpus.wait_for(task.gpus)
    if (kept, True) != (state.kept, state.looked):
        state = replace(state, kept=kept, looked=True)
        node.put(replace(node.tasks[task.id], state=state))
    return state


def _obstacle(node: NodeState, task: Task) -> str:
    """Say why `task` may not use its GPUs now, or return an empty string."""
    unleased = [gpu for gpu in task.gpus if gpu not in node.leased]
    if unleased or not task.gpus:
        return f"no lease for {', '.join(unleased) or 'any GPU'}"
    return node.sharing.obstacle(task, node.tasks)


def _pass_on(node: NodeState, instruction: Instruction) -> None:
    """Pass on what `sharing` has to tell a task's story and to order its worker."""
    if instruction.text:
        node.tell(instruction.task, instruction.text)
    if instruction.do:
        order = Order(instruction.do, node.facts.incarnation, node.next_order_seq(), bytes=instruction.bytes)
        node.effects.append(OrderWorker(instruction.task, order))
