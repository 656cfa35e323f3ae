"""Plans of the arbiter: which are obeyed, and how they change the leases and the wish for every task."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from node_agent.core import moves
from node_agent.core.events import Complaint, RememberFence, RememberIncarnation
from node_agent.core.model import Exited, Lesson, Suspended, Task, Waiting
from node_agent.core.state import NodeState
from protocol.messages import GpuId, NodePlan, TaskOrder, Want, device_of

INCARNATION_MAX = 2**52  #: incarnations count starts, or began at the seconds of a clock; more is no count
FOREIGN_MAX = 100  #: sites that are remembered as refused
MEND = "if it is to change over, start it once with: gpu-arbiter node-agent --config node.toml --adopt-site"


def take_plan(node: NodeState, plan: NodePlan) -> None:
    """Obey `plan`, unless it is of another site or a newer one was seen by this or an earlier incarnation."""
    token = (plan.epoch, plan.seq)
    if plan.node != node.facts.node or not _obeys(node, plan.site):
        node.plans_refused += 1
        return
    _count_on(node, plan.incarnation)
    if token < node.fence or _knows_too_little(node, plan):
        node.plans_refused += 1
        return
    if (token, plan.site) != (node.fence, node.site):
        node.fence, node.site, node.former = token, plan.site, None
        node.effects.append(RememberFence(*token, plan.site))
    node.leased = frozenset(lease.gpu for lease in plan.leases if not lease.leaving)
    node.sharing.configure(plan)
    node.told_beat_s = plan.beat_s
    for order in plan.tasks:
        _take_order(node, order)
    named = {order.task for order in plan.tasks}
    for task in node.in_order():
        if task.id not in named:
            _unnamed(node, task)


def _obeys(node: NodeState, site: str) -> bool:
    """Whether the plans of `site` are obeyed; the first plan decides, and other sites are refused aloud."""
    if node.former is not None and site == node.former[0]:
        node.site, node.fence = node.former
    if not node.site or site == node.site:
        return True
    if site not in node.foreign_sites and len(node.foreign_sites) < FOREIGN_MAX:
        node.foreign_sites.add(site)
        node.effects.append(Complaint(f"refused a plan of {_named(site)}, as this node is of {node.site}; {MEND}"))
    return False


def _knows_too_little(node: NodeState, plan: NodePlan) -> bool:
    """Whether an arbiter that begins a new epoch does not know a plan that was obeyed here; the first time is said."""
    epoch, seq = node.fence
    if plan.site != node.site or plan.epoch <= epoch or not 0 <= plan.after < seq:
        return False
    if node.epoch_refused < plan.epoch:
        node.epoch_refused = plan.epoch
        node.effects.append(
            Complaint(
                f"refused a plan of epoch {plan.epoch}, as its arbiter knows the plans up to {plan.after} only, and "
                f"this node has obeyed plan {seq} of epoch {epoch}; its journal has lost some, and it is told so now"
            )
        )
        node.reported = ()
    return True


def _count_on(node: NodeState, heard: int) -> None:
    """Raise the incarnation above the one that the arbiter has heard of: it takes reports of a lower one for old."""
    if not node.incarnation < heard < INCARNATION_MAX:
        return
    node.effects.append(
        Complaint(
            f"the arbiter has heard of incarnation {heard} of this node agent, which is {node.incarnation}: it "
            "counts on from there; should another node agent have the same name, end it or rename one of them"
        )
    )
    node.incarnation = heard + 1
    node.effects.append(RememberIncarnation(node.incarnation))
    node.reported = ()


def _take_order(node: NodeState, order: TaskOrder) -> None:
    task = node.tasks.get(order.task)
    if task is None:
        if not order.ended:
            _add_task(node, order)
    elif order.want != "run" or isinstance(task.state, Exited):
        # Such an order repeats the seats of an earlier report. The task leaves, or stays parked, where it is.
        parked = isinstance(task.state, Suspended)
        node.put(_with_order(moves.at_home(task) if parked else task, order))
    elif task.gpus != order.gpus and not _may_sit(node, task, order.gpus):
        wrong = "its order names other GPUs than it was started on; only a new attempt can move it"
        # Another app may have the GPUs on which a parked task is: it runs only where a plan says so.
        want = "vacate" if isinstance(task.state, Suspended) else task.want
        node.put(replace(_wishing(task, want), complaint=task.complaint or wrong, named=True))
    elif isinstance(task.state, Suspended) and task.gpus != order.gpus:
        node.tell(task.id, f"goes on on {', '.join(order.gpus)}")
        node.put(_with_order(replace(moves.seated(task, order.gpus), reseated=True), order))
    else:
        node.put(_with_order(replace(task, gpus=order.gpus), order))


def _add_task(node: NodeState, order: TaskOrder) -> None:
    facts = node.lessons.get(order.job, Lesson()).of_new_attempt()
    task = Task(order.task, order.app, order.job, order.attempt, order.gpus, Waiting(), facts=facts)
    node.put(_with_order(task, order))
    node.tell(order.task, f"ordered to {order.want} on {', '.join(order.gpus)}")


def _unnamed(node: NodeState, task: Task) -> None:
    """End a task that no lease names any more; it is forgotten once its end was reported."""
    if task.named and not isinstance(task.state, Exited):
        node.tell(task.id, "named by no plan any more")
    task = moves.at_home(task) if isinstance(task.state, Suspended) else task
    node.put(replace(task, named=False, want="stop", reason=task.reason or "its lease has ended"))


def _named(site: str) -> str:
    return f"site {site}" if site else "an arbiter that names no site"


def _with_order(task: Task, order: TaskOrder) -> Task:
    apart = task.ranks.apart or order.rendezvous is not None
    return replace(
        _wishing(task, order.want),
        ranks=task.ranks if apart == task.ranks.apart else replace(task.ranks, apart=True),
        rendezvous=order.rendezvous or task.rendezvous,
        stop_at=order.stop_at,
        stands=order.stand,
        launch=order.launch,
        grace_s=order.grace_s,
        preempt_by=order.preempt_by,
        reason=order.reason,
        named=True,
        complaint="",
        priority=order.priority,
    )


def _wishing(task: Task, want: Want | None) -> Task:
    """Return a task with a wish; one that was blamed so that it goes on is not ended for that, nor the other way."""
    state = task.state
    if isinstance(state, Suspended) and state.kept and want != task.want:
        state = replace(state, kept="")
    return replace(task, state=state, want=want)


def _may_sit(node: NodeState, task: Task, gpus: Sequence[GpuId]) -> bool:
    """Whether an order may name these seats for `task`.

    Its process is bound to its GPUs once it has begun, though not to its seats on them. While it is parked it owns no
    seat, and it goes on on the seats that its app is given: on its own GPUs, unless the driver can move it to others.
    """
    if isinstance(task.state, Waiting):
        return True
    if not isinstance(task.state, Suspended):
        return False
    return tuple(map(device_of, task.home)) == tuple(map(device_of, gpus)) or moves.can_move(node, task, gpus)
