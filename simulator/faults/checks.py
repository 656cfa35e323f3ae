"""What must be true of a world: safety at every instant, and what a run must have come to at its end.

Safety is judged by the truth, not by what anybody believes: by the processes that there are on the imaginary nodes.

*One user.* No GPU has two unparked processes of different tasks, but for two that its node agent lets run together, and
no GPU's memory is exceeded, contexts of parked processes included; neither is the host memory for parked ones.

*One seat.* No app has two seats of one GPU, or one and the promise of another; one that it is leaving is none.

*Everybody's turn.* A task that shares its GPUs with others, all of whom can be suspended and none of whom has a higher
priority, trains again within so many turns as there are others, twice that to be generous.

*No process without a lease.* An unparked process of app a on GPU g means that the arbiter has g leased to a, or
draining from a. That is stricter than "no work under an expired lease" and all the protocol promises: a GPU leaves an
app only by the proof of its node agent, a report on a plan without the lease that found the GPU empty; and a node agent
starts nothing but by the newest plan it has seen. A lease that has *ended* still covers the process while it is on its
way out, and while its node is not heard of, for as long: nobody else can have the GPU. It holds while the arbiter is
down, too, for what it had written down.

*One attempt.* Of one job two attempts have processes only if the older one's node had been given up for lost while its
process lived. Nobody can end that one; whatever it still saves is outranked by its successor's checkpoints. And the
younger one is ordered for the first time only while no older one has a process on a node that is heard of.

*Nothing of another time.* Node agents' fences never fall, the arbiter acts in the epoch in which it leads, and a
decision rests on bids of its own round.

*GPU time adds up.* What tenants have had, parked, lost and were leaving is the sum over their apps, and what an app had
and was leaving is the sum over its leases; in the records for the ledger and in what the arbiter tells, to the second.

*Work counts once.* What attempts added to their checkpoints sums to the whole work of a job that has finished, and a
checkpoint never falls back (lost nodes aside, where two attempts may have worked at once).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence

from app_agent.core.model import Done
from arbiter.core.effects import AppRecord, Decide, LeaseRecord
from arbiter.core.state.gpu_time import Standing
from arbiter.core.state.model import Draining, Free, Leased, Lost
from node_agent.core.model import Suspended, Task, Waiting
from node_agent.core.slicing import QUANTUM_S_MAX
from protocol.core import Send
from protocol.messages import AppId, GpuId, JobId, LeaseId, NodePlan, Party, TaskId, TaskOrder, TenantId, device_of
from simulator.driver import DRIVER_TIMES
from simulator.nodes import SimNode
from simulator.workers import Worker
from simulator.world import Actor, World

#: Each core's own `validate` costs more than an event; so one of them, in turn, every so many instants.
VALIDATE_EVERY = 4
#: Turns that a task waits for at most, for each of those who share its GPUs; and what is not counted in turns.
TURNS_MAX, MOMENTS_S = 2.0, 20.0
#: The part of a turn that suspending and resuming may take at most; turns are the longer for that.
OVERHEAD = 0.02
#: Serial seconds of work are sums of floats.
WORK_SLACK_S = 1e-3
#: So are GPU-seconds; a record is of the moment at which it was made.
GPU_TIME_SLACK_S = 1e-3


class Violation(AssertionError):  # noqa: N818 - what it says of the world
    """Something that must never be is so, or something that must come has not; `objects` are the ids it is about."""

    def __init__(self, what: str, *objects: str) -> None:
        super().__init__(what)
        self.objects = objects


class Checks:
    """Judges one world; `check` of it.

    `orphaned` are tasks whose node had been given up for lost while they lived, or were to live.
    """

    def __init__(self) -> None:
        self.instants = 0
        self.orphaned: set[TaskId] = set()
        self._named: set[TaskId] = set()
        self._ordered: dict[str, set[TaskId]] = defaultdict(set)  #: by node, what was ever to run there
        self._fences: dict[str, tuple[int, int]] = {}
        self._saved_s: dict[JobId, float] = {}
        self._together: set[frozenset[TaskId]] = set()  #: pairs that ran on one GPU at the last instant
        self._records: dict[LeaseId, LeaseRecord] = {}
        self._accounts: dict[AppId, AppRecord] = {}
        self._hungry: dict[TaskId, tuple[float, int]] = {}  #: since when a task waits for its turn, behind how many

    def __call__(self, world: World) -> None:
        """Judge the present instant."""
        self.instants += 1
        self._judge_nodes(world)
        self._judge_processes(world)
        self._judge_devices(world)
        if world.talks:
            self._judge_seats(world)
            self._judge_turns(world)
        if self.instants % VALIDATE_EVERY == 0:
            self._validate_one(world, self.instants // VALIDATE_EVERY)

    # --- processes --------------------------------------------------------------------------------------------------

    def _judge_processes(self, world: World) -> None:
        states = world.arbiter.core.state.gpus
        attempts: dict[JobId, int] = {}
        for worker in _live_workers(world):
            job, attempt = worker.spec.job, worker.spec.attempt
            if attempts.setdefault(job, attempt) != attempt:
                self._judge_attempts(world, job)
            if worker.phase == "parked":
                continue
            for gpu in worker.gpus:
                known = states.get(gpu)
                if known is None or isinstance(known.state, Free) or known.state.lease.app != worker.spec.app:
                    whose = "nobody's" if known is None or isinstance(known.state, Free) else known.state.lease.app
                    raise Violation(
                        f"{worker.task} is {worker.phase} on {gpu}, which to the arbiter is {whose}", gpu, worker.task
                    )

    # --- devices ----------------------------------------------------------------------------------------------------

    def _judge_devices(self, world: World) -> None:
        together: set[frozenset[TaskId]] = set()
        for node in world.nodes.values():
            host_bytes = sum(_parked_bytes(each, world.now) for each in node.workers.values())
            if 0 < node.traits.host_bytes < host_bytes:
                allowed = node.traits.host_bytes
                raise Violation(f"{node.id} has {allowed} bytes for parked workers, and {host_bytes} are used")
            for gpu, here in node.on.items():
                if not here:
                    continue
                taken = sum(worker.memory_bytes for worker in here)
                if taken > node.spec.memory_bytes and gpu not in node.sick:
                    raise Violation(
                        f"{gpu} has {node.spec.memory_bytes} bytes, and {taken} are used", gpu, *_tasks(here)
                    )
                using = [worker for worker in here if worker.phase != "parked"]
                if len(using) > 1:
                    together.add(self._judge_together(world, gpu, using))
        self._together = together

    def _judge_together(self, world: World, gpu: GpuId, using: Sequence[Worker]) -> frozenset[TaskId]:
        """Two may be on one GPU if the node agent lets them run together; or did, and now tells them apart."""
        names = frozenset(worker.task for worker in using)
        if len(using) == 2 and (names in self._together or self._are_packed(world, using)):
            return names
        raise Violation(f"{gpu} is used by {' and by '.join(sorted(names))}", gpu, *sorted(names))

    def _are_packed(self, world: World, using: Sequence[Worker]) -> bool:
        core = world.actor(Party("node", using[0].node.id)).core
        return bool(core._are_packed([worker.task for worker in using]))

    def _judge_seats(self, world: World) -> None:
        seats: dict[tuple[GpuId, AppId], GpuId] = {}
        for gpu in world.arbiter.core.state.gpus.values():
            app = gpu.state.lease.app if isinstance(gpu.state, Leased) else None
            if isinstance(gpu.state, Draining):
                app = gpu.state.promised_to
            if app is not None:
                other = seats.setdefault((device_of(gpu.id), app), gpu.id)
                if other != gpu.id:
                    raise Violation(f"{app} has two seats of one GPU: {other} and {gpu.id}", app, gpu.id, other)

    def _judge_turns(self, world: World) -> None:
        hungry: dict[TaskId, tuple[float, int]] = {}
        for name, node in world.nodes.items():
            actor = world.actor(Party("node", name))
            if not actor.up or actor.held is not None:
                continue
            waiting = [task for task in actor.core.tasks() if _waits(task)]
            for task in waiting:
                since, others = self._hungry.get(task.id, (world.now, 0))
                others = max(others, len(_group(task, actor.core.tasks())))
                if world.now - since > MOMENTS_S and self._has_to_wait(world, actor, node, task):
                    since, others = world.now, 0
                elif world.now - since > MOMENTS_S:
                    self._judge_wait(world, task, world.now - since, others)
                hungry[task.id] = since, others
        self._hungry = hungry

    def _has_to_wait(self, world: World, actor: Actor, node: SimNode, task: Task) -> bool:
        """Whether somebody may be in the way of a task for as long as he wants."""
        leased = {gpu for gpu, known in world.arbiter.core.state.gpus.items() if not isinstance(known.state, Free)}
        broken = any(device in node.sick for device in task.devices) or not set(task.gpus) <= leased
        return broken or any(
            other.priority > task.priority or other.want != "run" or _stays(node, other)
            for other in _group(task, actor.core.tasks())
        )

    def _judge_wait(self, world: World, task: Task, waited_s: float, others: int) -> None:
        cost_s = world.costs.suspend_s + world.costs.resume_s
        turn_s = max(world.quantum_s, min(QUANTUM_S_MAX, DRIVER_TIMES * cost_s / OVERHEAD))
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
                self.orphaned |= self._ordered[name]  # it may still obey a plan that is on its way
        for name, node in world.nodes.items():
            before = self._fences.get(name)
            if before is not node.fence:
                if before is not None and node.fence < before:
                    raise Violation(f"the fence of {name} fell from {before} to {node.fence}", name)
                self._fences[name] = node.fence

    def judge_effects(self, world: World, effects: Sequence[object]) -> None:
        """Judge what the arbiter is about to do."""
        for effect in effects:
            if type(effect) is Decide:
                for bid in effect.bids.values():
                    if bid.round != effect.round:
                        raise Violation(f"round {effect.round} uses a bid of {bid.app} for round {bid.round}", bid.app)
            elif type(effect) is Send and type(effect.message) is NodePlan:
                for order in effect.message.tasks:
                    self._ordered[effect.to.id].add(order.task)
                    if order.want == "run" and order.task not in self._named:
                        self._named.add(order.task)
                        self._judge_naming(world, order)
            elif type(effect) is LeaseRecord:
                self._records[effect.lease] = effect
            elif type(effect) is AppRecord:
                self._accounts[effect.app] = effect

    def _judge_naming(self, world: World, order: TaskOrder) -> None:
        """When an attempt is first ordered, none before it has a process on a node that is heard of."""
        nodes = world.arbiter.core.state.nodes
        for worker in _live_workers(world):
            older = worker.spec.job == order.job and worker.spec.attempt < order.attempt
            if older and not isinstance(nodes[worker.node.id].state, Lost):
                raise Violation(f"{order.task} is ordered while {worker.task} lives", order.job, worker.task)

    # --- everybody's own idea -----------------------------------------------------------------------------------------

    def _validate_one(self, world: World, number: int) -> None:
        actors = [world.arbiter, *(sim_app.actor for sim_app in world.apps.values())]
        actors += [world.actor(Party("node", node)) for node in world.nodes]
        actor = actors[number % len(actors)]
        if actor.up:  # what ended in the midst of an instant is nobody's state
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
        """Judge everything, at a crash or at the end."""
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
        for book in history.leases.values():
            _add(leases[book.app], {"had": book.had.at(now), "draining": book.draining.at(now)})
        tenants: dict[TenantId, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for app in history.apps.keys() | self._accounts.keys():
            account = history.apps.get(app)
            told = self._accounts[app] if account is None else history.of_app(app, now)
            had = _gpu_time(told)
            _add(tenants[self._accounts[app].tenant if account is None else account.tenant], had)
            _agree(f"{app} and its leases", {key: had[key] for key in ("had", "draining")}, leases[app], app)
            # What a lost node had of it counts again when the node is back, until that is proven and recorded anew.
            if app in self._accounts and account is not None and not account.allocated.rate:
                _agree(f"{app} and its record", had, _gpu_time(self._accounts[app]), app)
        for tenant in history.tenants:
            _agree(f"{tenant} and its apps", _gpu_time(history.of_tenant(tenant, now)), tenants[tenant], tenant)

    def _judge_work(self, world: World) -> None:
        """What an app takes for finished is finished in truth, and all of its work was counted once."""
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
                    what = f"of {job.id} {account.placed:.3f} s of work were counted, and it has {work_s:.3f} s"
                    raise Violation(what, job.id)


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


def _stays(node: SimNode, task: Task) -> bool:
    """Whether a task will not or cannot give its GPUs up."""
    worker = node.workers.get(task.id)
    facts = worker.training.facts if worker is not None else None
    fixed = facts is not None and (facts.balks or not facts.can_park or bool(node.traits.host_bytes))
    hung = worker is not None and worker.hangs
    return hung or fixed or bool(task.facts.refused)


def _group(task: Task, tasks: Sequence[Task]) -> list[Task]:
    """Return the other tasks that take turns with `task`, directly or through others."""
    devices, found = set(task.devices), [task]
    for _ in tasks:
        more = [each for each in tasks if each not in found and each.devices & devices and each.phase != "exited"]
        found += more
        devices |= {device for each in more for device in each.devices}
    return found[1:]


def _parked_bytes(worker: Worker, now: float) -> int:
    """Return what a parked worker has in host memory; one that has made no mini-batch had nothing to put there."""
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
    """Return what is still to be done for apps that are over, by app: nothing may be left in the end.

    Agents that have `vanished` hear nothing any more.
    """
    found: dict[str, list[str]] = defaultdict(list)
    over = {sim_app.id: sim_app for sim_app in world.apps.values() if sim_app.id and sim_app.over_at is not None}
    gpus = world.arbiter.core.state.gpus
    broken = [gpu.id for gpu in gpus.values() if device_of(gpu.id) in world.nodes[gpu.node].sick]
    for app, sim_app in over.items():
        state = sim_app.actor.core.state.apps.get(app)
        deaf = sim_app.actor.party in vanished
        # What drains on a GPU that is gone can be proven never: such an app is told again and again, which is no harm.
        sick = any(not isinstance(gpus[gpu].state, Free) and gpus[gpu].state.lease.app == app for gpu in broken)
        if state is not None and state.over is not None and not state.over.settled and not deaf and not sick:
            found[app].append("its agent has not heard that the arbiter knows its end")
    for gpu in gpus.values():
        if isinstance(gpu.state, Free) or gpu.state.lease.app not in over or gpu.id in broken:
            continue
        found[gpu.state.lease.app].append(f"{gpu.id} is {type(gpu.state).__name__} for it")
    for worker in _live_workers(world):
        if worker.spec.app in over:
            found[worker.spec.app].append(f"{worker.task} is {worker.phase} on {worker.node.id}")
    return dict(found)
