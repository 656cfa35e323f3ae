"""What must be true of a world: safety at every instant, and what a run must have come to at its end.

Safety is judged by the truth, not by what anybody believes: by the processes that there are on the imaginary machines.

*One user.* No GPU has two unparked processes of different tasks.

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

*Work counts once.* What attempts added to their checkpoints sums to the whole work of a job that has finished, and a
checkpoint never falls back (lost nodes aside, where two attempts may have worked at once).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator, Sequence

from app_agent.core.model import Done
from arbiter.core.model import Free, Lost
from arbiter.core.turn import Decide
from protocol.core import Send
from protocol.messages import GpuId, JobId, NodePlan, Party, TaskId, TaskOrder
from simulator.machines import Worker
from simulator.world import World

#: Each core's own `validate` costs more than an event; so one of them, in turn, every so many instants.
VALIDATE_EVERY = 4
#: Serial seconds of work are sums of floats.
WORK_SLACK_S = 1e-3


class Violation(AssertionError):  # noqa: N818 - what it says of the world
    """Something that must never be is so, or something that must come has not; `objects` are the ids it is about."""

    def __init__(self, what: str, *objects: str) -> None:
        super().__init__(what)
        self.objects = objects


class Checks:
    """Judges one world; `check` of it. `orphaned` are tasks whose node had been given up for lost while they lived."""

    def __init__(self) -> None:
        self.instants = 0
        self.orphaned: set[TaskId] = set()
        self._named: set[TaskId] = set()
        self._fences: dict[str, tuple[int, int]] = {}
        self._saved_s: dict[JobId, float] = {}

    def __call__(self, world: World) -> None:
        """Judge the present instant."""
        self.instants += 1
        self._judge_nodes(world)
        self._judge_processes(world)
        if self.instants % VALIDATE_EVERY == 0:
            self._validate_one(world, self.instants // VALIDATE_EVERY)

    # --- processes --------------------------------------------------------------------------------------------------

    def _judge_processes(self, world: World) -> None:
        states = world.arbiter.core.state.gpus
        users: dict[GpuId, Worker] = {}
        attempts: dict[JobId, int] = {}
        for worker in _living(world):
            job, attempt = worker.spec.job, worker.spec.attempt
            if attempts.setdefault(job, attempt) != attempt:
                self._judge_attempts(world, job)
            if worker.phase == "parked":
                continue
            for gpu in worker.gpus:
                other = users.setdefault(gpu, worker)
                if other is not worker:
                    raise Violation(f"{gpu} is used by {other.task} and by {worker.task}", gpu, worker.task, other.task)
                known = states.get(gpu)
                if known is None or isinstance(known.state, Free) or known.state.lease.app != worker.spec.app:
                    whose = "nobody's" if known is None or isinstance(known.state, Free) else known.state.lease.app
                    raise Violation(
                        f"{worker.task} is {worker.phase} on {gpu}, which to the arbiter is {whose}", gpu, worker.task
                    )

    def _judge_attempts(self, world: World, job: JobId) -> None:
        workers = [worker for worker in _living(world) if worker.spec.job == job]
        newest = max(worker.spec.attempt for worker in workers)
        for worker in workers:
            if worker.spec.attempt < newest and worker.task not in self.orphaned:
                raise Violation(f"{job} has a process of attempt {newest} beside {worker.task}", job, worker.task)

    def _judge_nodes(self, world: World) -> None:
        for name, node in world.arbiter.core.state.nodes.items():
            if isinstance(node.state, Lost):
                machine = world.machines[name]
                self.orphaned.update(worker.task for worker in machine.workers.values() if worker.phase != "gone")
        for name, machine in world.machines.items():
            before = self._fences.get(name)
            if before is not machine.fence:
                if before is not None and machine.fence < before:
                    raise Violation(f"the fence of {name} fell from {before} to {machine.fence}", name)
                self._fences[name] = machine.fence

    def judge_effects(self, world: World, effects: Sequence[object]) -> None:
        """Judge what the arbiter is about to do."""
        for effect in effects:
            if type(effect) is Decide:
                for bid in effect.bids.values():
                    if bid.round != effect.round:
                        raise Violation(f"round {effect.round} uses a bid of {bid.app} for round {bid.round}", bid.app)
            elif type(effect) is Send and type(effect.message) is NodePlan:
                for order in effect.message.tasks:
                    if order.want == "run" and order.task not in self._named:
                        self._named.add(order.task)
                        self._judge_naming(world, order)

    def _judge_naming(self, world: World, order: TaskOrder) -> None:
        """When an attempt is first ordered, none before it has a process on a node that is heard of."""
        nodes = world.arbiter.core.state.nodes
        for worker in _living(world):
            older = worker.spec.job == order.job and worker.spec.attempt < order.attempt
            if older and not isinstance(nodes[worker.machine.node].state, Lost):
                raise Violation(f"{order.task} is ordered while {worker.task} lives", order.job, worker.task)

    # --- everybody's own idea -----------------------------------------------------------------------------------------

    def _validate_one(self, world: World, number: int) -> None:
        actors = [world.arbiter, *(living.actor for living in world.apps.values())]
        actors += [world.actor(Party("node", node)) for node in world.machines]
        actor = actors[number % len(actors)]
        if actor.up:  # what ended in the midst of an instant is nobody's state
            actor.core.validate()
        self._judge_checkpoints(world)

    def _judge_checkpoints(self, world: World) -> None:
        orphans = self._orphaned_jobs()
        for job, saved_s in world.shelf.saved_s.items():
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
        for living in world.apps.values():
            if living.app:
                living.actor.core.validate()
                if living.app not in living.actor.core.state.records:
                    raise Violation(f"{living.app} is unknown to its own host", living.app)
        for node in world.machines:
            actor = world.actor(Party("node", node))
            if actor.up:
                actor.core.validate()
        self._judge_work(world)

    def _judge_work(self, world: World) -> None:
        """What an app takes for finished is finished in truth, and all of its work was counted once."""
        orphans = self._orphaned_jobs()
        for living in world.apps.values():
            state = living.actor.core.state.apps.get(living.app)
            for job in state.jobs if state is not None else ():
                if not isinstance(job.state, Done):
                    continue
                tale = world.shelf.tales.get(job.id)
                if tale is None or tale.finish_s is None:
                    raise Violation(f"{job.id} counts as finished and is not", job.id)
                work_s = living.jobs[job.number].work_s
                if job.id not in orphans and abs(tale.placed - work_s) > WORK_SLACK_S:
                    what = f"of {job.id} {tale.placed:.3f} s of work were counted, and it has {work_s:.3f} s"
                    raise Violation(what, job.id)


def _living(world: World) -> Iterator[Worker]:
    for machine in world.machines.values():
        for worker in machine.workers.values():
            if worker.phase != "gone":
                yield worker


# --- the end --------------------------------------------------------------------------------------------------------


def unsettled(world: World, vanished: Container[Party]) -> dict[str, list[str]]:
    """Return what is still to be done for apps that are over, by app: nothing may be left in the end.

    Agents that have `vanished` hear nothing any more.
    """
    found: dict[str, list[str]] = defaultdict(list)
    over = {living.app: living for living in world.apps.values() if living.app and living.over_at is not None}
    gpus = world.arbiter.core.state.gpus
    broken = [gpu for machine in world.machines.values() for gpu in machine.sick if gpu in gpus]
    for app, living in over.items():
        state = living.actor.core.state.apps.get(app)
        deaf = living.actor.party in vanished
        # What drains on a GPU that is gone can be proven never: such an app is told again and again, which is no harm.
        sick = any(not isinstance(gpus[gpu].state, Free) and gpus[gpu].state.lease.app == app for gpu in broken)
        if state is not None and state.over is not None and not state.over.settled and not deaf and not sick:
            found[app].append("its agent has not heard that the arbiter knows its end")
    for gpu in gpus.values():
        if isinstance(gpu.state, Free) or gpu.state.lease.app not in over or gpu.id in world.machines[gpu.node].sick:
            continue
        found[gpu.state.lease.app].append(f"{gpu.id} is {type(gpu.state).__name__} for it")
    for worker in _living(world):
        if worker.spec.app in over:
            found[worker.spec.app].append(f"{worker.task} is {worker.phase} on {worker.machine.node}")
    return dict(found)
