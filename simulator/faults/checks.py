"""The promises that a world must keep: safety at every instant, and the state of a run at its end.

Safety is judged by the true processes on the imaginary nodes, not by the belief of any participant.

*One user.* No GPU has two unparked processes of different tasks, except two that its node agent lets run together. No
GPU's memory is exceeded, contexts of parked processes included, and neither is the host memory for parked processes.

*One seat.* No app has two seats of one GPU, or one seat and the promise of another; a seat that it is leaving does not
count.

*A turn for every task.* A task shares its GPUs with others; all of these can be suspended and none has a higher
priority. Then it trains again within as many turns as there are others, doubled to be generous; one that keeps memory
when it is parked, after the time in which that is found out.

*No idle GPU that is wanted.* On a GPU that tasks share, one that can run there does so within the time that a parked
task is given to return its memory, and a turn; even if some of them keep memory when they are parked.

*No process without a lease.* An unparked process of app a on GPU g means that the arbiter has g leased to a, or
draining from a. That is stricter than "no work under an expired lease" and all that the protocol promises. A GPU leaves
an app only by the proof of its node agent: a report on a plan without the lease that found the GPU empty. And a node
agent starts processes only by the newest plan it has seen. A lease that has *ended* still covers the process while it
is leaving, and as long as its node is silent: no other app can have the GPU. The promise holds while the arbiter is
down, too, for the state in its journal. A journal that has lost its end knows nothing of some leases: a task that was
ordered before on GPUs that were not its app's then is judged again from when they are. After a bound none is left out.

*One attempt.* Two attempts of one job have processes only if the older one's node had been given up for lost while its
process lived, or was not known to a journal that has lost its end. No participant can end that process; its later
checkpoints are outranked by those of its successor. And the younger attempt is ordered for the first time only while no
older one has a process on a node that reports.

*One leader.* No arbiter performs anything once another one leads, but what it had committed before, and the journal
takes nothing from it. No two cores perform in one epoch.

*No news from the past.* Node agents' fences never fall, the arbiter acts in the epoch in which it leads, and a
decision rests on bids of its own round.

*Nothing before the commit.* If the journal has lost no event but those whose commit had not ended, no node knows more.

*No order by an arbiter that has forgotten some.* A node obeys no arbiter that does not know which plan of an earlier
epoch the node obeyed last. Once an arbiter whose journal is older has listened, each task that was found where its app
wishes it has its GPUs, if no other task is on these.

*Nothing is sold twice.* Only the answer to the newest sale changes a booking or the state of an app. In a time slot to
come, apps have booked no more GPUs of a node than it has ever had.

*Nothing begins on a drained node.* While a node is being drained no lease begins on it, but of an app that has a task
parked there: it has to go on to save.

*Nothing for an app that is held.* An app that is held has no GPU leased, is promised none, and nothing is due to it.

*No GPU of another kind.* No app that asks for a kind of GPUs has any other leased, or is promised one.

*Clients of MPS.* The driver suspends none. None lives for long after a fatal fault of its server while its node agent
is up, and a job that a fault struck among others is a client on that node no more.

*Whole GPUs for jobs on several nodes.* Where GPUs are shared, no other app has a seat, or is promised one, of a GPU
that an app has whose jobs may lie on several nodes.

*No job further apart than its user accepts.* The GPUs on which one attempt of a job has processes lie within its level.

*No more jobs of an array than its bound.* At no time do more of its jobs have an unparked process.

*GPU time adds up.* The GPU time that a tenant had, parked, lost and was leaving is the sum over its apps. The GPU time
that an app had and was leaving is the sum over its leases. Both hold in the records for the ledger and in the arbiter's
answers, to the second.

*Work counts once.* The work that attempts added to their checkpoints sums to the whole work of a finished job, and a
checkpoint never falls back (except after lost nodes, where two attempts may have worked at once).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from math import inf

from app_agent.core.model import Done
from arbiter.core.effects import AppRecord, Decide, EpochTaken, LeaseRecord, LossRecord, Sell, Sold, StretchRecord
from arbiter.core.seam import Booking
from arbiter.core.state import model
from arbiter.core.state.gpu_time import Standing
from arbiter.core.state.model import AppState, Draining, Free, Gpu, Leased, Lost, Settled, State, is_first, usable
from node_agent.core.events import PARK_PROOF_S, RememberFence
from node_agent.core.model import Resuming, Suspended, Task, Vacating, Waiting
from node_agent.core.slicing import QUANTUM_S_MAX
from protocol.core import Received, Send
from protocol.gpu_kinds import in_words, suits, wishes_kind
from protocol.messages import (
    LEVELS,
    AppId,
    GpuId,
    JobId,
    LeaseId,
    NodeId,
    NodePlan,
    Party,
    TaskId,
    TaskOrder,
    TenantId,
    device_of,
    locality,
)
from simulator.driver import DRIVER_TIMES
from simulator.nodes import SimNode
from simulator.workers import Worker
from simulator.world import Actor, World

#: Each core's own `validate` costs more than an event; so one of them, in turn, every so many instants.
VALIDATE_EVERY = 4
#: The most turns that a task waits for each of the others on its GPUs; and seconds on top of the turns.
TURNS_MAX, MOMENTS_S = 2.0, 20.0
#: So long a GPU may wait for a parked process that was told to train, or to leave, and hears nothing: then it is ended.
DEAF_S = 60.0
#: The part of a turn that suspending and resuming may take at most; turns are the longer for that.
OVERHEAD = 0.02
#: Serial seconds of work are sums of floats, with rounding.
WORK_SLACK_S = 1e-3
#: So are GPU-seconds; a record holds those of the moment at which it was made.
GPU_TIME_SLACK_S = 1e-3


class Violation(AssertionError):  # noqa: N818 - the name is a state of the world
    """A promise is broken: of safety, or of liveness. `objects` are the ids that it is about."""

    def __init__(self, sentence: str, *objects: str) -> None:
        super().__init__(sentence)
        self.objects = objects


class Checks:
    """Judges one world; it is the world's `check`.

    `orphaned` are tasks whose node had been given up for lost while their process lived, or could still be started.
    `forgotten` are those that the arbiter may not know, as its journal has lost its end; from `known_by` on, in
    seconds, it has to know all.
    """

    def __init__(self) -> None:
        self.instants = 0
        self.orphaned: set[TaskId] = set()
        self.forgotten: set[TaskId] = set()
        self.known_by = inf
        self._lost = 0  #: events that the arbiter's journal has lost after their effects were performed
        self._overtakes_left = 0  #: for each loss: one for each node that knows of an epoch, and one for an app
        self._leaders: dict[int, object] = {}  #: by epoch, the core that has performed in it
        self._named: set[TaskId] = set()
        self._ordered: dict[str, dict[TaskId, TaskOrder]] = defaultdict(dict)  #: by node, all that was ever ordered
        self._fences: dict[str, tuple[int, int]] = {}
        self._saved_s: dict[JobId, float] = {}
        self._together: set[frozenset[TaskId]] = set()  #: pairs that ran on one GPU at the last instant
        self._records: dict[LeaseId, LeaseRecord] = {}
        self._accounts: dict[AppId, AppRecord] = {}
        self._stretches: dict[AppId, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._drained: dict[NodeId, set[LeaseId]] = {}  #: by node that is drained, the leases after the last event
        self._newest_sale = (0, 0)  #: its epoch and number
        self._bookings: dict[AppId, tuple[AppState, Booking | None]] = {}  #: after the last event
        self._listens = False  #: the arbiter listens, as its journal is older than what nodes have seen
        self._dead_clients: dict[TaskId, float] = {}  #: since when a client of MPS lives on after a fault
        self._hungry: dict[TaskId, tuple[float, int]] = {}  #: since when a task waits for its turn, behind how many
        self._idle_since: dict[GpuId, float] = {}  #: devices without a process, that a task could use
        self._deaf: set[GpuId] = (
            set()
        )  #: of these, those that have waited for a process that was told to train, or leave

    def __call__(self, world: World) -> None:
        """Judge the present instant."""
        self.instants += 1
        self._judge_nodes(world)
        self._judge_processes(world)
        self._judge_devices(world)
        if world.talks:
            self._judge_clients(world)
            self._judge_seats(world)
            self._judge_turns(world)
            self._judge_idle(world)
        if self.instants % VALIDATE_EVERY == 0:
            self._validate_one(world, self.instants // VALIDATE_EVERY)

    # --- arbiters -------------------------------------------------------------------------------------------------

    def judge_commit(self, world: World, arbiter: Actor) -> None:
        """Judge of whom the journal has taken events: of the leader."""
        if arbiter is not world.arbiter:
            raise Violation("events of a former leader stand in the journal", "arbiter")

    def judge_leader(self, world: World, arbiter: Actor) -> None:
        """Judge an arbiter that is about to perform effects: it leads, as the only one of its epoch."""
        if arbiter is not world.arbiter:
            raise Violation("a former leader performs what it has decided beside the next one", "arbiter")
        epoch, core = arbiter.core.state.epoch, arbiter.core
        if self._leaders.setdefault(epoch, core) is not core:
            raise Violation(f"two arbiters have led in epoch {epoch}", "arbiter")

    # --- processes --------------------------------------------------------------------------------------------------

    def _judge_processes(self, world: World) -> None:
        states = world.arbiter.core.state.gpus
        if world.now >= self.known_by:
            self.forgotten.clear()
        attempts: dict[JobId, int] = {}
        running: defaultdict[AppId, set[JobId]] = defaultdict(set)
        used: defaultdict[tuple[AppId, JobId, int], list[Gpu]] = defaultdict(list)
        for worker in _live_workers(world):
            job, attempt = worker.spec.job, worker.spec.attempt
            if attempts.setdefault(job, attempt) != attempt:
                self._judge_attempts(world, job)
            if worker.phase == "parked":
                continue
            if worker.task not in self.orphaned:
                running[worker.spec.app].add(job)
            if worker.task in self.forgotten:
                if not all(_is_held_for(states.get(gpu), worker.spec.app) for gpu in worker.gpus):
                    continue
                self.forgotten.discard(worker.task)
            for gpu in worker.gpus:
                known = states.get(gpu)
                if known is None or isinstance(known.state, Free) or known.state.lease.app != worker.spec.app:
                    free = known is None or isinstance(known.state, Free)
                    holder = "free" if free or known is None else f"held by {known.state.lease.app}"
                    raise Violation(
                        f"{worker.task} is {worker.phase} on {gpu}, which to the arbiter is {holder}", gpu, worker.task
                    )
                used[worker.spec.app, job, attempt].append(known)
        self._judge_arrays(world, running)
        self._judge_levels(world, used)

    def _judge_arrays(self, world: World, running: Mapping[AppId, set[JobId]]) -> None:
        for app, jobs in running.items():
            if len(jobs) == 1:
                continue
            most = world.apps[app.rpartition("-")[0]].spec.at_once
            if len(jobs) > most:
                raise Violation(f"{app} runs {sorted(jobs)} at once, and may run {most}", app, *jobs)

    def _judge_levels(self, world: World, used: Mapping[tuple[AppId, JobId, int], Sequence[Gpu]]) -> None:
        for (app, job, _), gpus in used.items():
            level = world.arbiter.core.state.apps[app].level_max
            if LEVELS.index(locality(gpus)) > LEVELS.index(level):
                names = sorted(gpu.id for gpu in gpus)
                raise Violation(f"{job} is on {names}, and its user accepts no more than one {level}", app, job, *names)

    # --- devices ----------------------------------------------------------------------------------------------------

    def _judge_devices(self, world: World) -> None:
        together: set[frozenset[TaskId]] = set()
        for node in world.nodes.values():
            if allowed := node.traits.host_bytes:
                host_bytes = sum(_parked_bytes(each, world.now) for each in node.workers.values())
                if host_bytes > allowed:
                    raise Violation(f"{node.id} has {allowed} bytes for parked workers, and {host_bytes} are used")
            for gpu, here in node.by_device.items():
                if not here:
                    continue
                taken = sum(worker.memory_bytes for worker in here) + node.server_bytes
                if taken > node.spec.memory_bytes and gpu not in node.sick:
                    raise Violation(
                        f"{gpu} has {node.spec.memory_bytes} bytes, and {taken} are used", gpu, *_tasks(here)
                    )
                using = [worker for worker in here if worker.phase != "parked"]
                if len(using) > 1:
                    together.add(self._judge_together(world, gpu, using))
        self._together = together

    def _judge_together(self, world: World, gpu: GpuId, using: Sequence[Worker]) -> frozenset[TaskId]:
        """Judge two on one GPU: the node agent must let them run together, or have done so an instant ago."""
        names = frozenset(worker.task for worker in using)
        if len(using) == 2 and (names in self._together or self._are_packed(world, using)):
            return names
        raise Violation(f"{gpu} is used by {' and by '.join(sorted(names))}", gpu, *sorted(names))

    def _are_packed(self, world: World, using: Sequence[Worker]) -> bool:
        core = world.actor(Party("node", using[0].node.id)).core
        return bool(core.may_overlap([worker.task for worker in using]))

    def _judge_clients(self, world: World) -> None:
        """Judge the clients of MPS: the driver suspends none, none lives on after a fault, or meets a second one."""
        dead: dict[TaskId, float] = {}
        for worker in _live_workers(world):
            if not worker.mps:
                continue
            if worker.by_driver:
                raise Violation(f"{worker.task} is a client of MPS, and the driver suspends it", worker.task)
            node = world.nodes[worker.node.id]
            if worker.spec.job in node.denied and not worker.mps_fault:
                raise Violation(f"{worker.task} is a client of MPS again after a fault of several", worker.task)
            actor = world.actor(Party("node", node.id))
            if worker.mps_fault and actor.up and actor.held is None and not node.sick:
                since = dead[worker.task] = self._dead_clients.get(worker.task, world.now)
                if world.now - since > MOMENTS_S:
                    raise Violation(f"{worker.task} lives {world.now - since:.0f} s after a fault of MPS", worker.task)
        self._dead_clients = dead

    def _judge_seats(self, world: World) -> None:
        state = world.arbiter.core.state
        seats: dict[tuple[GpuId, AppId], GpuId] = {}
        whole: dict[GpuId, AppId] = {}
        for gpu in state.gpus.values():
            app = gpu.state.lease.app if isinstance(gpu.state, Leased) else None
            if isinstance(gpu.state, Draining):
                app = gpu.state.promised_to
            if app is not None:
                other = seats.setdefault((device_of(gpu.id), app), gpu.id)
                if other != gpu.id:
                    raise Violation(f"{app} has two seats of one GPU: {other} and {gpu.id}", app, gpu.id, other)
                if app in state.apps and state.apps[app].whole_gpus:
                    whole[device_of(gpu.id)] = app
        for device, app in seats if whole else ():
            if whole.get(device, app) != app:
                raise Violation(f"{whole[device]} has {device} to itself, and {app} a seat of it", app, device)

    def _judge_turns(self, world: World) -> None:
        hungry: dict[TaskId, tuple[float, int]] = {}
        for name, node in world.nodes.items():
            actor = world.actor(Party("node", name))
            if not actor.up or actor.held is not None:
                continue
            waiting = [task for task in actor.core.tasks() if _waits(task)]
            there = _on_devices(actor.core.tasks()) if waiting else []
            for task in waiting:
                since, others = self._hungry.get(task.id, (world.now, 0))
                others = max(others, len(_group(task, there)))
                if world.now - since > MOMENTS_S and self._has_to_wait(world, actor, node, task):
                    since, others = world.now, 0
                elif world.now - since > MOMENTS_S:
                    self._judge_wait(world, node, task, world.now - since, others)
                hungry[task.id] = since, others
        self._hungry = hungry

    def _judge_idle(self, world: World) -> None:
        idle: dict[GpuId, float] = {}
        told: set[GpuId] = set()
        for name, node in world.nodes.items():
            actor = world.actor(Party("node", name))
            if not actor.up or actor.held is not None:
                continue
            in_use = node.in_use()
            for task in actor.core.tasks():
                if isinstance(task.state, Resuming | Vacating):
                    told.update(task.devices)
                if _waits(task) and not any(device in in_use or device in node.sick for device in task.devices):
                    leased = all(_leased_to(world, gpu, task.app) for gpu in task.gpus)
                    idle |= {device: self._idle_since.get(device, world.now) for device in task.devices if leased}
        self._idle_since = idle
        # Also once the deaf process is gone: the wait for it is a part of the time without a process.
        self._deaf = {device for device in self._deaf | told if device in idle}
        cost_s = DRIVER_TIMES * (world.costs.suspend_s + world.costs.resume_s)
        bound_s = PARK_PROOF_S + max(world.quantum_s, min(QUANTUM_S_MAX, cost_s / OVERHEAD)) + MOMENTS_S
        for device, since in idle.items():
            if world.now - since > bound_s + (DEAF_S if device in self._deaf else 0.0):
                raise Violation(f"{device} has had no process for {world.now - since:.0f} s, and is wanted", device)

    def _has_to_wait(self, world: World, actor: Actor, node: SimNode, task: Task) -> bool:
        """Whether a task may have to wait for something else than the turns of others."""
        leased = {gpu for gpu, known in world.arbiter.core.state.gpus.items() if not isinstance(known.state, Free)}
        broken = any(device in node.sick for device in task.devices) or not set(task.gpus) <= leased
        broken = broken or _was_refused(task)
        return broken or any(
            other.priority > task.priority or other.want != "run" or _stays(node, other) or _was_refused(other)
            for other in _group(task, _on_devices(actor.core.tasks()))
        )

    def _judge_wait(self, world: World, node: SimNode, task: Task, waited_s: float, others: int) -> None:
        cost_s = world.costs.suspend_s + world.costs.resume_s
        turn_s = max(world.quantum_s, min(QUANTUM_S_MAX, DRIVER_TIMES * cost_s / OVERHEAD))
        worker = node.workers.get(task.id)
        if worker is not None and worker.training.facts.keeps_bytes:
            waited_s -= PARK_PROOF_S  # it keeps the GPU from all others, and from itself, until that is found out
        if others and waited_s > TURNS_MAX * turn_s * others + MOMENTS_S:
            raise Violation(f"{task.id} has waited {waited_s:.0f} s for its turn among {others} others", task.id)

    # --- attempts ---------------------------------------------------------------------------------------------------

    def _judge_attempts(self, world: World, job: JobId) -> None:
        workers = [worker for worker in _live_workers(world) if worker.spec.job == job]
        newest = max(worker.spec.attempt for worker in workers)
        for worker in workers:
            if worker.spec.attempt < newest and worker.task not in self.orphaned:
                raise Violation(f"{job} has a process of attempt {newest} beside {worker.task}", job, worker.task)

    def _judge_nodes(self, world: World) -> None:
        for name, known in world.arbiter.core.state.nodes.items():
            if isinstance(known.state, Lost):
                workers = world.nodes[name].workers
                self.orphaned.update(worker.task for worker in workers.values() if worker.phase != "gone")
                self.orphaned |= self._ordered[name].keys()  # its agent may still obey a plan that is on its way
        for name, node in world.nodes.items():
            if node.complaints and not self._lost:
                raise Violation(f"{name} {node.complaints[0]}, and it has lost nothing that was committed", name)
            before = self._fences.get(name)
            if before is not node.fence:
                if before is not None and node.fence < before:
                    raise Violation(f"the fence of {name} fell from {before} to {node.fence}", name)
                self._fences[name] = node.fence

    def judge_drains(self, state: State) -> None:
        """Judge the leases that an event has begun on nodes that are drained, also those that it has ended again."""
        drained: dict[NodeId, set[LeaseId]] = {}
        for node, drain in state.drains.items():
            leased = {
                gpu.state.lease.id: gpu.state.lease
                for gpu in state.gpus.values()
                if gpu.node == node and isinstance(gpu.state, Leased | Draining)
            }
            drained[node] = set(leased)
            for lease in leased.keys() - self._drained.get(node, leased.keys()):
                held = leased[lease]
                if not any(
                    task.app == held.app and task.phase == "suspended" and held.gpu in task.gpus
                    for task in state.tasks.values()
                    if task.node == node
                ):
                    raise Violation(f"{lease} begins on {node}, drained since {drain.since}", held.app, held.gpu)
        self._drained = drained

    def judge_holds(self, state: State) -> None:
        """Judge what apps that are held have after an event."""
        held = {app.id for app in state.apps.values() if app.held_by and app.active}
        for gpu in state.gpus.values() if held else ():
            match gpu.state:
                case Leased(lease) if lease.app in held:
                    raise Violation(f"{lease.app} is held, and has {gpu.id} leased", lease.app, gpu.id)
                case Draining(promised_to=winner) if winner in held:
                    raise Violation(f"{winner} is held, and {gpu.id} is promised to it", winner, gpu.id)
                case _:
                    pass
        for app in held & state.history.apps.keys():
            if state.history.apps[app].demand:
                raise Violation(f"{app} is held, and GPU time is due to it", app)

    def judge_kinds(self, world: World) -> None:
        """Judge after an event of which kind the GPUs are that apps have."""
        state = world.arbiter.core.state
        wishes = {app.id: app.requirements for app in state.apps.values() if wishes_kind(app.requirements)}
        for gpu in state.gpus.values() if wishes else ():
            owner = gpu.state.lease.app if isinstance(gpu.state, Leased) else None
            if isinstance(gpu.state, Draining):
                owner = gpu.state.promised_to
            node = world.nodes[gpu.node].spec
            if owner is not None and owner in wishes and not suits(wishes[owner], node.gpu_type, node.memory_bytes):
                raise Violation(f"{owner} asks for {in_words(wishes[owner])}, and has {gpu.id}", owner, gpu.id)

    def judge_obedience(self, node: SimNode, event: object, effects: Sequence[object]) -> None:
        """Judge a plan that a node obeys, before it does: the arbiter must know the last one of the epoch before."""
        obeys = any(type(effect) is RememberFence for effect in effects)
        if not (obeys and type(event) is Received and type(event.message) is NodePlan):
            return
        plan, (epoch, seq) = event.message, node.fence
        if plan.site and plan.epoch > epoch and plan.after < seq:
            known = f"knows its plans up to {plan.after}, and it has obeyed plan {seq}"
            raise Violation(f"{node.id} obeys an arbiter of epoch {plan.epoch} that {known}", node.id)

    def judge_adoption(self, state: State) -> None:
        """Judge what an arbiter has leased that has just listened: each task that was found, and is wished there."""
        listened, self._listens = self._listens, state.behind and state.listens_until is not None
        for task in state.tasks.values() if listened and not self._listens else ():
            for gpu in task.gpus if _is_to_go_on(state, task) else ():
                found = state.gpus[gpu].state
                if not isinstance(found, Leased) or found.lease.app != task.app:
                    raise Violation(f"{task.id} was found on {gpu}, which is not leased to {task.app}", task.id, gpu)

    def judge_sales(self, state: State, event: object, effects: Sequence[object]) -> None:
        """Judge what an event has changed of bookings."""
        sales = [effect for effect in effects if type(effect) is Sell]
        if not sales and not self._newest_sale[0]:  # nothing has ever been for sale
            return
        bookings = {app.id: (app.state, app.booking) for app in state.apps.values()}
        if type(event) is Sold:
            if (event.epoch, event.number) != self._newest_sale and bookings != self._bookings:
                raise Violation(f"the answer to sale {event.number} was used, and {self._newest_sale[1]} is the newest")
            self._judge_bookings(state)
        self._bookings = bookings
        for sale in sales:
            self._newest_sale = sale.epoch, sale.number

    def _judge_bookings(self, state: State) -> None:
        booked: Counter[tuple[int, str]] = Counter()
        for app in state.apps.values():
            if app.active and app.booking is not None:
                for slot, gpus in app.booking.time_slots:
                    booked.update({(slot, node): count for node, count in gpus if slot >= state.time_slot[0]})
        there = Counter(gpu.node for gpu in state.gpus.values() if is_first(gpu.id))
        for (slot, node), count in booked.items():
            if count > there[NodeId(node)]:
                raise Violation(
                    f"{count} GPUs of {node} are booked in time slot {slot}, and it has {there[NodeId(node)]}"
                )

    def forget(self, left: State, told: Iterable[Sequence[object]], lost: int) -> None:
        """Take note that the arbiter's journal has lost its end, with so many events that had been committed.

        `left` is the state that it tells of now. The ledger was `told` only the effects of that. Orders that are on
        their way may be obeyed yet.
        """
        self._lost += lost
        self._overtakes_left += len(self._fences) + 1 if lost else 0
        # One that still listened has lost its end before, also if all that it lost now is what it learnt as it ended.
        unaware = lost > 0 or (left.behind and left.listens_until is not None)
        for order in (order for orders in self._ordered.values() for order in orders.values() if unaware):
            if not all(_is_held_for(left.gpus.get(gpu), order.app) for gpu in order.gpus):
                self.forgotten.add(order.task)
        self._drained.clear()
        self._leaders.clear()  # the store may have forgotten epochs, too
        self._listens = False
        for part in (self._records, self._accounts, self._stretches):
            part.clear()
        for effects in told:
            for effect in effects:
                self._enter(effect)

    def judge_effects(self, world: World, effects: Sequence[object]) -> None:
        """Judge effects of the arbiter before they are performed."""
        for effect in effects:
            if type(effect) is Decide:
                for bid in effect.bids.values():
                    if bid.round != effect.round:
                        raise Violation(f"round {effect.round} uses a bid of {bid.app} for round {bid.round}", bid.app)
            elif type(effect) is Send and type(effect.message) is NodePlan:
                for order in effect.message.tasks:
                    self._ordered[effect.to.id][order.task] = order
                    if order.want == "run" and order.task not in self._named:
                        self._named.add(order.task)
                        self._judge_naming(world, order)
            elif type(effect) is EpochTaken:
                self._overtakes_left -= 1
                if self._overtakes_left < 0:
                    raise Violation("nodes know more than the journal, of more than what it has lost after its commit")
            else:
                self._enter(effect)

    def _enter(self, effect: object) -> None:
        """Enter a record of GPU time, as the ledger does."""
        if type(effect) is LeaseRecord:
            self._records[effect.lease] = effect
        elif type(effect) is StretchRecord:
            had = effect.gpu_s(effect.start, effect.end)
            _add(self._stretches[effect.app], {"had": had, "draining": had if effect.draining else 0.0})
        elif type(effect) is LossRecord:
            _add(self._stretches[effect.app], {"lost": effect.lost_gpu_s})
        elif type(effect) is AppRecord:
            self._accounts[effect.app] = effect

    def _judge_naming(self, world: World, order: TaskOrder) -> None:
        """Judge the first order of an attempt: no older one may have a process on a node that reports.

        Those on a node that enrolled in the part of the journal that was lost, and is silent since, no arbiter can end.
        """
        nodes = world.arbiter.core.state.nodes
        unheard = (ordered for name, ordered in self._ordered.items() if name not in nodes)
        for earlier in (each for ordered in unheard for each in ordered.values()):
            if earlier.task in self.forgotten and earlier.job == order.job and earlier.attempt < order.attempt:
                self.orphaned.add(earlier.task)
        for worker in _live_workers(world):
            older = worker.spec.job == order.job and worker.spec.attempt < order.attempt
            node = nodes.get(worker.node.id)
            given_up = worker.task in self.orphaned if node is None else isinstance(node.state, Lost)
            if older and not given_up:
                raise Violation(f"{order.task} is ordered while {worker.task} lives", order.job, worker.task)

    # --- the participants' own state ----------------------------------------------------------------------------------

    def _validate_one(self, world: World, number: int) -> None:
        actors = [world.arbiter, *(sim_app.actor for sim_app in world.apps.values())]
        actors += [world.actor(Party("node", node)) for node in world.nodes]
        actor = actors[number % len(actors)]
        if actor.up:  # a process that ended in the midst of an instant has no state
            actor.core.validate()
        self._judge_checkpoints(world)

    def _judge_checkpoints(self, world: World) -> None:
        orphans = self._orphaned_jobs()
        for job, saved_s in world.storage.saved_s.items():
            if saved_s < self._saved_s.get(job, 0.0) and job not in orphans:
                raise Violation(f"the checkpoint of {job} fell back to {saved_s} s of work", job)
            self._saved_s[job] = saved_s

    def _orphaned_jobs(self) -> set[str]:
        return {task.rpartition("-a")[0] for task in self.orphaned}

    def judge_whole(self, world: World) -> None:
        """Judge the whole world, at a crash or at the end."""
        self(world)
        world.arbiter.core.validate()
        if world.arbiter.core.state.epoch != world.epoch:
            raise Violation(f"the arbiter acts in epoch {world.arbiter.core.state.epoch} and leads in {world.epoch}")
        for sim_app in world.apps.values():
            if sim_app.id:
                sim_app.actor.core.validate()
                if sim_app.id not in sim_app.actor.core.state.records:
                    raise Violation(f"{sim_app.id} is unknown to its own host", sim_app.id)
        for node in world.nodes:
            actor = world.actor(Party("node", node))
            if actor.up:
                actor.core.validate()
        self._judge_gpu_time(world)
        self._judge_work(world)

    # --- GPU time ---------------------------------------------------------------------------------------------------

    def _judge_gpu_time(self, world: World) -> None:
        history, now = world.arbiter.core.state.history, world.arbiter.core.state.now
        leases: dict[AppId, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for record in self._records.values():
            _add(leases[record.app], {"had": record.had_gpu_s, "draining": record.draining_gpu_s})
        stretches = defaultdict(lambda: defaultdict(float), {app: told.copy() for app, told in self._stretches.items()})
        for book in history.leases.values():
            _add(leases[book.app], {"had": book.had.at(now), "draining": book.draining.at(now)})
            lasted_s = now - book.had.since
            _add(stretches[book.app], {"had": book.had.rate * lasted_s, "draining": book.draining.rate * lasted_s})
        tenants: dict[TenantId, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for app in history.apps.keys() | self._accounts.keys():
            account = history.apps.get(app)
            told = self._accounts[app] if account is None else history.of_app(app, now)
            had = _gpu_time(told)
            if (
                isinstance(told, Standing)
                and told.draining_gpu_s + told.untrained_gpu_s > had["had"] + GPU_TIME_SLACK_S
            ):
                raise Violation(f"{app} left, started or lost for longer than it had GPUs: {told}", app)
            _add(tenants[self._accounts[app].tenant if account is None else account.tenant], had)
            _agree(f"{app} and its leases", {key: had[key] for key in ("had", "draining")}, leases[app], app)
            _agree(
                f"{app} and its stretches", {key: had[key] for key in ("had", "draining", "lost")}, stretches[app], app
            )
            # Leases on a lost node count again when the node is back, until their end is proven and recorded anew.
            if app in self._accounts and account is not None and not account.allocated.rate:
                _agree(f"{app} and its record", had, _gpu_time(self._accounts[app]), app)
        for tenant in history.tenants:
            _agree(f"{tenant} and its apps", _gpu_time(history.of_tenant(tenant, now)), tenants[tenant], tenant)

    def _judge_work(self, world: World) -> None:
        """Judge finished jobs: they have finished in truth, and all of their work was counted once."""
        orphans = self._orphaned_jobs()
        for sim_app in world.apps.values():
            state = sim_app.actor.core.state.apps.get(sim_app.id)
            for job in state.jobs if state is not None else ():
                if not isinstance(job.state, Done):
                    continue
                account = world.storage.accounts.get(job.id)
                if account is None or account.finish_s is None:
                    raise Violation(f"{job.id} counts as finished and is not", job.id)
                work_s = sim_app.jobs[job.number].work_s
                if job.id not in orphans and abs(account.placed - work_s) > WORK_SLACK_S:
                    counted = f"of {job.id} {account.placed:.3f} s of work were counted, and it has {work_s:.3f} s"
                    raise Violation(counted, job.id)


def _gpu_time(told: Standing | AppRecord) -> dict[str, float]:
    return {
        "had": told.allocated_gpu_s,
        "draining": told.draining_gpu_s,
        "parked": told.parked_gpu_s,
        "lost": told.lost_gpu_s,
    }


def _add(total: dict[str, float], more: Mapping[str, float]) -> None:
    for key, seconds in more.items():
        total[key] += seconds


def _agree(whose: str, one: Mapping[str, float], other: Mapping[str, float], *objects: str) -> None:
    for key, seconds in one.items():
        if abs(seconds - other[key]) > GPU_TIME_SLACK_S:
            raise Violation(f"{whose} differ in GPU time {key}: {seconds:.3f} s and {other[key]:.3f} s", *objects)


def _waits(task: Task) -> bool:
    return task.want == "run" and isinstance(task.state, Suspended | Waiting)


def _was_refused(task: Task) -> bool:
    """Whether a task could not be resumed in its turn: it is asked again some seconds later, or ended."""
    return isinstance(task.state, Vacating) or (isinstance(task.state, Suspended) and task.state.retry_at > 0.0)


def _is_held_for(gpu: Gpu | None, app: AppId) -> bool:
    return gpu is not None and not isinstance(gpu.state, Free) and gpu.state.lease.app == app


def _is_to_go_on(state: State, task: model.Task) -> bool:
    """Whether a task that was found runs where its app wishes it, and no other task or seat is in its way."""
    app = state.apps.get(task.app)
    if app is None or not app.active or app.held_by or not _runs(task):
        return False
    gpus = [state.gpus[gpu] for gpu in task.gpus if gpu in state.gpus]
    devices = set(map(device_of, task.gpus))
    others = (each for each in state.tasks.values() if each.id != task.id and _runs(each))
    own = {gpu.id for gpu in state.gpus.values() if device_of(gpu.id) in devices and _is_held_for(gpu, task.app)}
    return (
        any((job.id, job.attempt) == (task.job, task.attempt) and {*task.gpus} <= {*job.gpus} for job in app.jobs)
        and len(gpus) == len(task.gpus)
        and all(gpu.present and usable(state, gpu) for gpu in gpus)
        and own <= set(task.gpus)
        and not any(devices & set(map(device_of, each.gpus)) for each in others)
    )


def _runs(task: model.Task) -> bool:
    return task.alive and task.phase != "suspended"


def _leased_to(world: World, gpu: GpuId, app: AppId) -> bool:
    known = world.arbiter.core.state.gpus.get(gpu)
    return known is not None and isinstance(known.state, Leased) and known.state.lease.app == app


def _stays(node: SimNode, task: Task) -> bool:
    """Whether a task will not or cannot give its GPUs up."""
    worker = node.workers.get(task.id)
    facts = worker.training.facts if worker is not None else None
    fixed = facts is not None and (
        facts.balks or not facts.can_park or bool(facts.keeps_bytes) or bool(node.traits.host_bytes)
    )
    hung = worker is not None and worker.hangs
    return hung or fixed or bool(task.facts.refused)


def _on_devices(tasks: Sequence[Task]) -> list[tuple[Task, frozenset[GpuId]]]:
    """Return the tasks that have not exited, each with its devices."""
    return [(each, each.devices) for each in tasks if each.phase != "exited"]


def _group(task: Task, there: Sequence[tuple[Task, frozenset[GpuId]]]) -> list[Task]:
    """Return the other tasks that take turns with `task`, directly or through others."""
    far = [pair for pair in there if pair[0].id != task.id]
    devices, found = set(task.devices), []
    while near := [pair for pair in far if pair[1] & devices]:
        far = [pair for pair in far if not pair[1] & devices]
        found += [each for each, _ in near]
        devices.update(*(its for _, its in near))
    return found


def _parked_bytes(worker: Worker, now: float) -> int:
    """Return the bytes of a parked worker in host memory: none before its first mini-batch."""
    training = worker.training
    fresh = training.steps(now) <= training.start_step + 1
    return 0 if worker.phase != "parked" or worker.by_driver or fresh else training.facts.state_bytes


def _tasks(workers: Sequence[Worker]) -> list[TaskId]:
    return sorted(worker.task for worker in workers)


def _live_workers(world: World) -> Iterator[Worker]:
    for node in world.nodes.values():
        for worker in node.workers.values():
            if worker.phase != "gone":
                yield worker


# --- the end --------------------------------------------------------------------------------------------------------


def unsettled(world: World, vanished: Container[Party]) -> dict[str, list[str]]:
    """Return the unfinished business of apps that are over, by app: none may be left in the end.

    Agents that have `vanished` hear nothing any more. An end that no other party had heard of by then is no
    end: its task stays parked for the next agent of that owner.
    """
    found: dict[str, list[str]] = defaultdict(list)
    over = {sim_app.id: sim_app for sim_app in world.apps.values() if sim_app.id and sim_app.over_at is not None}
    for app in world.arbiter.core.state.apps.values():
        if not isinstance(app.state, Settled) and app.id in over and over[app.id].actor.party in vanished:
            del over[app.id]
    gpus = world.arbiter.core.state.gpus
    broken = [gpu.id for gpu in gpus.values() if device_of(gpu.id) in world.nodes[gpu.node].sick]
    for app_id, sim_app in over.items():
        state = sim_app.actor.core.state.apps.get(app_id)
        deaf = sim_app.actor.party in vanished
        # A lease that drains on a lost GPU can never be proven empty: its app is told again and again, without harm.
        sick = any(not isinstance(gpus[gpu].state, Free) and gpus[gpu].state.lease.app == app_id for gpu in broken)
        if state is not None and state.over is not None and not state.over.settled and not deaf and not sick:
            found[app_id].append("its agent has not heard that the arbiter knows its end")
    for gpu in gpus.values():
        if isinstance(gpu.state, Free) or gpu.state.lease.app not in over or gpu.id in broken:
            continue
        found[gpu.state.lease.app].append(f"{gpu.id} is {type(gpu.state).__name__} for it")
    for worker in _live_workers(world):
        if worker.spec.app in over:
            found[worker.spec.app].append(f"{worker.task} is {worker.phase} on {worker.node.id}")
    return dict(found)
