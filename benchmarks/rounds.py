"""The arbiter's own work on a large site: ``python benchmarks/rounds.py [--quick] [--json] [--only CASE]``.

There is no bus. The arbiter's core is the product's own. Nodes and apps are played here, by the least that agents say:
a node obeys each plan at once, an app gives the GPUs that it is told of to its one job. Only the arbiter's `handle` and
`deadline` are timed, in calibrated seconds (`benchmarks.calibration`). Policies decide outside of the core, so their
time is told apart (``decide_s``).

Cases: nodes that enrol, and one that is lost and returns; a beat, in which all is restated; a round in which nothing
moves, with apps that wait, and one of auctions, in which no app is asked, as all have stated their valuation; a crowd
of apps that wait for 64 GPUs, all of them considered, the auction included; apps that name the kind of their GPUs, the
auction included, beside equal apps that name none; a round that renews the lease of every GPU;
one that gives every GPU to another app, until the last of these runs; guests on shared GPUs, until all of them run; and
thousands of apps that are submitted and wait. One case is of decisions alone, every app being told why: `maxmin-ftf`
beside `las`, 1,024 GPUs in play and 1,000 apps, of which none moves. Renewing stands beside a bare table, the least
that a lease can be: a new frozen value per GPU in a dictionary.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)  # not this folder, in which `simulator` would be a benchmark

from arbiter.core.arbiter import Arbiter, Configured, Event  # noqa: E402
from arbiter.core.effects import Decide, Decided  # noqa: E402
from arbiter.core.rounds import views  # noqa: E402
from arbiter.core.rounds.decision import decide  # noqa: E402
from arbiter.core.seam import Allocation  # noqa: E402
from arbiter.core.state.model import ArbiterSettings, Leased  # noqa: E402
from benchmarks.calibration import Calibration  # noqa: E402
from protocol.core import Connected, Received, Send, Tick  # noqa: E402
from protocol.garbage import seldom_collected  # noqa: E402
from protocol.messages import (  # noqa: E402
    AppId,
    AppReport,
    GpuId,
    GpuStatus,
    Holdings,
    JobId,
    JobWish,
    LaunchSpec,
    LevelTerms,
    NodeId,
    NodePlan,
    NodeReport,
    Offer,
    Party,
    Probe,
    Requirements,
    StandingValuation,
    TaskOrder,
    TaskStatus,
    TenantId,
    seat,
)

Case = dict[str, Any]
#: No beat and no silence, so that what is timed is the case alone.
QUIET = ArbiterSettings(
    beat_s=1e9, node_timeout_s=1e10, app_timeout_s=1e10, admission_wait_s=0.0, lease_s=600.0, round_pause_s=1.0
)
GPUS, MODEL = 8, "H200"
GIB = 2**30
LAUNCH = LaunchSpec(command=("python", "train.py"), cwd="/tmp", checkpoint_dir="/tmp/checkpoints")
APPS_PER_OWNER = 100
#: Between two submissions, in the arbiter's time: a round comes after every hundredth.
SUBMIT_S = 0.01
WHOLE = {"nodes": 1024, "waiting": 1000, "guests": 300, "apps": 20_000, "crowd": 10_000, "few": 128}
QUICK = {"nodes": 64, "waiting": 100, "guests": 40, "apps": 1000, "crowd": 500, "few": 16}
#: Nodes of 8 GPUs that the crowd waits for.
CROWDED_NODES = 8
#: Calibrated seconds at full size; per GPU where the case says so.
GOALS = {
    "enrolled": 1.0,
    "lost": 0.05,
    "still": 0.05,
    "auction": 0.05,
    "crowd": 0.05,
    "kinds": 1.5,
    "renewed": 0.05e-3,
    "moved": 0.05e-3,
    "guests": 0.1,
    "submitted": 40.0,
    "ahead": 2.0,
}
#: Cases that are told per GPU.
EACH = ("renewed", "moved")
#: Cases that are told over another figure of theirs.
OVER = {"ahead": "las_s", "kinds": "plain_s"}
#: Cases in which every app is told why it got what it got, as on a site of that size.
TOLD = ("ahead",)
WORDS = {
    "enrolled": "calibrated seconds for {nodes} nodes of 8 GPUs to enrol",
    "lost": "calibrated seconds for one of {nodes} nodes that is lost and returns",
    "still": "calibrated seconds of a round in which nothing moves, {nodes} nodes, {waiting} apps waiting",
    "auction": "calibrated seconds of a round of auctions, all leases in play, {nodes} nodes, {waiting} apps waiting",
    "crowd": "calibrated seconds of a round of auctions, policy included, with {crowd} apps that wait for 64 GPUs",
    "kinds": "a round of auctions, policy included, of apps that name the kind of their GPUs, over one of apps that "
    "name none, {nodes} nodes, {waiting} apps waiting",
    "renewed": "calibrated seconds per GPU that is renewed",
    "moved": "calibrated seconds per GPU of a round that gives it to another app",
    "guests": "calibrated seconds of the slowest round with {guests} guests",
    "ahead": "a decision of maxmin-ftf over one of las, {few} nodes in play, {waiting} apps, of which none moves",
    "submitted": "calibrated seconds for {apps} apps to be submitted and wait",
}


# --- the site ---------------------------------------------------------------------------------------------------------


class Site:
    """The arbiter's core, timed, and nodes and apps that obey at once; `holds` are the GPUs that each app was told."""

    def __init__(self, settings: ArbiterSettings, calibration: Calibration) -> None:
        self.core = Arbiter()
        self.now = 1000.0
        self.spent_s = 0.0  #: by the core
        self.decide_s = 0.0  #: by policies, and the layers around them
        self.decisions: Callable[[Decide], Decided] = decide
        self.plans: dict[NodeId, NodePlan] = {}
        self.rack: dict[NodeId, int] = {}
        self.gangs: dict[AppId, int] = {}
        self.requirements = Requirements()  #: the wishes of all apps
        self.holds: dict[AppId, tuple[GpuId, ...]] = {}
        self.messages = 0
        self.asked = 0  #: probes and offers among them
        self._seqs: dict[str, int] = defaultdict(int)
        self._calibration = calibration
        self._due: deque[tuple[Party, NodeReport | AppReport] | Decide] = deque()
        self.perform(self.handle(Configured(settings)))
        self.perform(self.handle(Connected(1)))

    def handle(self, event: Event) -> Sequence[Any]:
        """Hand an event to the core, and time that."""
        self._calibration.between()
        began = time.process_time()
        effects = self.core.handle(event, self.now)
        self.core.deadline()
        self.spent_s += time.process_time() - began
        return effects

    def perform(self, effects: Iterable[Any]) -> None:
        """Carry messages to the agents, and questions to the policy."""
        for effect in effects:
            if isinstance(effect, Decide):
                self._due.append(effect)
            elif isinstance(effect, Send):
                self.messages += 1
                self.asked += isinstance(effect.message, Probe | Offer)
                if isinstance(effect.message, NodePlan):
                    self._obey(effect.message)
                elif isinstance(effect.message, Holdings):
                    self._follow(effect.message)

    def settle(self) -> None:
        """Let all agents answer, and tick where it is due, until no agent has an answer at this moment."""
        while True:
            while self._due:
                due = self._due.popleft()
                if isinstance(due, Decide):
                    began = time.process_time()
                    answer = self.decisions(due)
                    self.decide_s += time.process_time() - began
                    self.perform(self.handle(answer))
                else:
                    self.perform(self.handle(Received(*due)))
            deadline = self.core.deadline()
            if deadline is None or deadline > self.now:
                return
            self.perform(self.handle(Tick()))

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds
        self.settle()

    def hear(self, sender: Party, message: NodeReport | AppReport) -> None:
        """Hand a message to the core, without what follows."""
        self.perform(self.handle(Received(sender, message)))

    # --- nodes --------------------------------------------------------------------------------------------------------

    def node_report(self, name: str, tasks: Sequence[TaskStatus] = ()) -> tuple[Party, NodeReport]:
        """Return a node's report on its newest plan."""
        node = NodeId(name)
        plan = self.plans.get(node)
        used = {gpu for task in tasks for gpu in task.gpus}
        gpus = [
            GpuStatus(gpu, MODEL, 140 * GIB, f"slot-{index // 4}", healthy=True, empty=gpu not in used)
            for index in range(GPUS)
            for number in range(plan.seats if plan is not None else 1)
            for gpu in (seat(GpuId(f"GPU-{name}-{index}"), number),)
        ]
        self._seqs[name] += 1
        return Party("node", name), NodeReport(
            node=node,
            rack=f"rack-{self.rack.setdefault(node, len(self.rack) // 16)}",
            boot_id="boot",
            incarnation=1,
            seq=self._seqs[name],
            epoch=plan.epoch if plan is not None else 0,
            plan_seq=plan.seq if plan is not None else 0,
            gpus=tuple(gpus),
            tasks=tuple(tasks),
        )

    def _obey(self, plan: NodePlan) -> None:
        self.plans[plan.node] = plan
        tasks = [_running(order) for order in plan.tasks if order.want == "run"]
        self._due.append(self.node_report(plan.node, tasks))

    # --- apps ---------------------------------------------------------------------------------------------------------

    def submit(self, number: int, gang: int) -> None:
        """Submit an app of one job."""
        owner = f"o{number // APPS_PER_OWNER}"
        app = AppId(f"{owner}-{number}")
        self.gangs[app] = gang
        self.hear(*self._app_report(app, ()))

    def finish(self, app: AppId) -> None:
        """Let an app end: its node says so, and then its agent."""
        held = self.holds.pop(app)
        (node,) = {gpu.rpartition("-")[0].removeprefix("GPU-") for gpu in held}
        sender, report = self._app_report(app, ())
        self.hear(sender, replace(report, state="finished", jobs=(), demand_max=0, standing=None))
        self.hear(*self.node_report(node))

    def _follow(self, holdings: Holdings) -> None:
        """Give an app's job the GPUs that it was told of, once they are a gang."""
        app = holdings.app
        gpus = tuple(lease.gpu for lease in holdings.leases if not lease.leaving)
        gpus = gpus if len(gpus) == self.gangs[app] else ()
        if gpus != self.holds.get(app, ()):
            self.holds[app] = gpus
            self._due.append(self._app_report(app, gpus))

    def _app_report(self, app: AppId, gpus: tuple[GpuId, ...]) -> tuple[Party, AppReport]:
        owner, gang = app.rpartition("-")[0], self.gangs[app]
        self._seqs[app] += 1
        attempt = self._seqs[f"attempt {app}"] = self._seqs[f"attempt {app}"] + bool(gpus)
        return Party("app", owner), AppReport(
            app=app,
            tenant=TenantId(f"team-{owner}"),
            name="train",
            seq=self._seqs[app],
            state="active",
            gang=gang,
            demand_max=gang,
            jobs=(JobWish(JobId(f"{app}.0"), max(1, attempt), gpus, LAUNCH),),
            requirements=self.requirements,
            left_s=3600.0,
            left_gpu_s=3600.0 * gang,
            standing=_standing(gang),
        )

    # --- what is ------------------------------------------------------------------------------------------------------

    def holders(self) -> dict[GpuId, AppId]:
        """Return the app of each leased GPU."""
        gpus = self.core.state.gpus.values()
        return {gpu.id: gpu.state.lease.app for gpu in gpus if isinstance(gpu.state, Leased)}

    def running(self) -> int:
        """Return how many tasks run."""
        return sum(task.phase == "running" for task in self.core.state.tasks.values())


def _standing(gang: int) -> StandingValuation:
    """Return the valuation of an app of one job, which has an hour left."""
    left_s = 3600.0 * gang
    return StandingValuation(((left_s,),), (LevelTerms("machine", 1.0, gang),), left_s, gang)


def _running(order: TaskOrder) -> TaskStatus:
    return TaskStatus(
        order.task,
        order.app,
        order.job,
        order.attempt,
        order.gpus,
        "running",
        step=1,
        cooperative=True,
        can_checkpoint=True,
    )


def enrolled(site: Site, nodes: int) -> None:
    for number in range(nodes):
        site.hear(*site.node_report(f"n{number:04}"))
    site.settle()


def full(
    size: Mapping[str, int],
    policy: str,
    calibration: Calibration,
    requirements: Requirements | None = None,
    **more: Any,
) -> Site:
    """Return a site on each of whose nodes one app of 8 GPUs runs."""
    site = Site(replace(QUIET, policy=policy, **more), calibration)
    site.requirements = requirements or site.requirements
    enrolled(site, size["nodes"])
    for number in range(size["nodes"]):
        site.submit(number, GPUS)
    for _ in range(3):
        site.wait(1.0)
    assert site.running() == size["nodes"], f"{site.running()} of {size['nodes']} apps run"
    return site


# --- the cases --------------------------------------------------------------------------------------------------------


def enrolling(size: Mapping[str, int], calibration: Calibration) -> Case:
    site = Site(replace(QUIET, policy="fifo"), calibration)
    site.spent_s = 0.0
    enrolled(site, size["nodes"])
    assert site.core.standing() == (0, 0)
    return {"spent_s": site.spent_s, "parts": size["nodes"]}


def losing(size: Mapping[str, int], calibration: Calibration) -> Case:
    """Lose one node of a full site, which all others outlive, and hear of it again."""
    site = full(size, "fifo", calibration, node_timeout_s=60.0)
    nodes = sorted(site.plans)
    site.now += 50.0
    for node in nodes[1:]:
        site.hear(*site.node_report(node, [_running(order) for order in site.plans[node].tasks]))
    site.settle()
    site.spent_s = 0.0
    site.wait(11.0)
    site.hear(*site.node_report(nodes[0]))
    site.settle()
    return {"spent_s": site.spent_s, "parts": 1}


def beating(size: Mapping[str, int], calibration: Calibration) -> Case:
    """Restate all plans and holdings; agents have nothing to say to that."""
    site = full(size, "fifo", calibration)
    site.now += 2e9
    site.core.state.beat_at = site.now - 1e9
    site.core.state.now = site.now
    site.spent_s = 0.0
    site.handle(Tick())
    return {"spent_s": site.spent_s, "parts": 1}


def resting(size: Mapping[str, int], calibration: Calibration) -> Case:
    """Let rounds come while apps wait and every GPU may be given away; the policy moves none."""
    site = full(size, "las", calibration)
    first = size["nodes"]
    for number in range(first, first + size["waiting"]):
        site.submit(number, GPUS)
    site.decisions = _stay
    site.wait(1.0)
    site.spent_s = site.decide_s = 0.0
    rounds, repeats = site.core.state.round, 5
    for number in range(repeats):
        site.submit(first + size["waiting"] + number, GPUS)
        site.wait(1.0)
    assert site.core.state.round - rounds == repeats, "a round did not come"
    return {"spent_s": site.spent_s / repeats, "parts": 1}


def auctioning(size: Mapping[str, int], calibration: Calibration) -> Case:
    """Let rounds of auctions come while apps wait and every lease may end; the policy moves no GPU."""
    site = full(size, "themis", calibration, ask_max=0)
    first = size["nodes"]
    site.decisions = _stay
    for number in range(first, first + size["waiting"]):
        site.submit(number, GPUS)
    site.wait(1.0)
    site.now += 570.0
    site.spent_s, site.asked, rounds, repeats = 0.0, 0, site.core.state.round, 5
    for _ in range(repeats):
        site.wait(2.0)
    assert site.core.state.round - rounds == repeats, "a round did not come"
    assert site.asked == 0, f"{site.asked} questions were sent to apps that have stated their valuation"
    return {"spent_s": site.spent_s / repeats, "parts": 1}


def crowding(size: Mapping[str, int], calibration: Calibration) -> Case:
    """Let thousands of apps wait for 64 GPUs; each round has one free node, and all apps are considered."""
    site = full({**size, "nodes": CROWDED_NODES}, "themis", calibration, ask_max=0)
    for number in range(CROWDED_NODES, CROWDED_NODES + size["crowd"]):
        site.submit(number, 1 + number % 4)
    site.wait(1.0)
    costs = []
    for held in sorted(site.holds)[:5]:
        site.spent_s, site.decide_s, site.asked = 0.0, 0.0, 0
        site.finish(held)
        site.wait(2.0)
        costs.append(site.spent_s + site.decide_s)
        assert len(site.holders()) > GPUS * (CROWDED_NODES - 1), "no app got the free GPUs"
        assert site.asked == 0, f"{site.asked} questions were sent to apps that have stated their valuation"
    return {"spent_s": sorted(costs)[len(costs) // 2], "parts": 1, "decide_s": site.decide_s}


def naming(size: Mapping[str, int], calibration: Calibration) -> Case:
    """Let apps that name the kind of their GPUs wait for those of a few nodes, and equal apps that name none."""
    named_s = _shared_out_s(size, calibration, Requirements(gpu_types=(MODEL,)))
    return {"spent_s": named_s, "parts": 1, "plain_s": _shared_out_s(size, calibration, Requirements())}


def _shared_out_s(size: Mapping[str, int], calibration: Calibration, requirements: Requirements) -> float:
    """Return what a round takes in which a sixteenth of all nodes is free at once."""
    site = full(size, "themis", calibration, requirements, ask_max=0)
    for number in range(size["nodes"], size["nodes"] + size["waiting"]):
        site.submit(number, 1 + number % 4)
    site.wait(1.0)
    costs = []
    for _ in range(3):
        site.spent_s, site.decide_s, held = 0.0, 0.0, sorted(site.holds)[: size["nodes"] // 16]
        for app in held:
            site.finish(app)
        site.wait(2.0)
        costs.append(site.spent_s + site.decide_s)
    assert len(set(site.holders().values())) > size["nodes"], "no app that waited got GPUs"
    return sorted(costs)[len(costs) // 2]


def _stay(effect: Decide) -> Decided:
    return Decided(effect.round, effect.epoch, Allocation({}, (), unnamed="holder"))


def renewing(size: Mapping[str, int], calibration: Calibration) -> Case:
    """Renew every lease in one round, while apps wait."""
    site = full(size, "drf", calibration)
    first = size["nodes"]
    for number in range(first, first + size["waiting"]):
        site.submit(number, GPUS)
    holders = site.holders()
    site.decisions = lambda effect: Decided(effect.round, effect.epoch, Allocation(holders, ()))
    site.wait(1.0)
    before = {app.id: app.tally.renewals for app in site.core.state.apps.values()}
    site.spent_s = site.decide_s = 0.0
    site.wait(575.0)
    renewals = sum(app.tally.renewals - before[app.id] for app in site.core.state.apps.values())
    assert renewals == len(holders) == GPUS * size["nodes"], f"{renewals} leases were renewed"
    return {"spent_s": site.spent_s, "parts": renewals, "bare_s": _bare(list(holders))}


class _BareLease(Struct, frozen=True):
    gpu: GpuId
    end: float


def _bare(gpus: Sequence[GpuId]) -> float:
    """Return the time for a new lease of each GPU in a bare table."""
    table = {gpu: _BareLease(gpu, 0.0) for gpu in gpus}
    repeats = 20
    began = time.process_time()
    for turn in range(repeats):
        for gpu in gpus:
            table[gpu] = replace(table[gpu], end=float(turn))
    return (time.process_time() - began) / repeats


def moving(size: Mapping[str, int], calibration: Calibration) -> Case:
    """Give every GPU to an app that waits; timed is the round, and all until the last of them runs."""
    site = full(size, "drf", calibration)
    first = size["nodes"]
    for number in range(first, 2 * first):
        site.submit(number, GPUS)
    newcomers = [app for app in site.gangs if app not in site.holds]
    gpus = sorted(site.holders())
    assign = {gpu: newcomers[place // GPUS] for place, gpu in enumerate(gpus)}
    site.decisions = _stay
    site.wait(1.0)
    site.spent_s = site.decide_s = 0.0
    site.now += 575.0
    (asked,) = [effect for effect in site.handle(Tick()) if isinstance(effect, Decide)]
    effects = site.handle(Decided(asked.round, asked.epoch, Allocation(assign, ())))
    round_s = site.spent_s
    site.perform(effects)
    site.settle()
    for _ in range(3):
        site.wait(1.0)
    moved = sum(site.holders().get(gpu) == app for gpu, app in assign.items())
    assert moved == len(gpus), f"{moved} of {len(gpus)} GPUs were moved"
    return {"spent_s": round_s, "parts": moved, "until_run_s": site.spent_s}


def guesting(size: Mapping[str, int], calibration: Calibration) -> Case:
    """Let guests come to GPUs that others have, and then rounds in which no app gets a GPU."""
    site = full(size, "las", calibration, sharing="timeslice", seats=4)
    for number in range(size["nodes"], size["nodes"] + size["guests"]):
        site.submit(number, 1)
    site.spent_s = site.decide_s = 0.0
    slowest_s = 0.0
    for number in range(12):
        gc.collect()  # a walk through the whole heap takes longer than a round, and comes once in many
        before_s = site.spent_s
        if number > 6:
            site.submit(10_000 + number, 1)
        site.wait(1.0)
        slowest_s = max(slowest_s, site.spent_s - before_s)
    guests = len(site.core._index.guests)
    assert guests >= size["guests"], f"{guests} guests came"
    return {"spent_s": slowest_s, "parts": 1, "all_s": site.spent_s, "decide_s": site.decide_s}


def submitting(size: Mapping[str, int], calibration: Calibration) -> Case:
    """Submit apps to a full site, rounds going on meanwhile."""
    site = full(size, "las", calibration)
    site.spent_s = site.decide_s = 0.0
    costs = []
    for number in range(size["nodes"], size["nodes"] + size["apps"]):
        before_s = site.spent_s
        site.submit(number, 1 + number % 4)
        site.wait(SUBMIT_S)
        costs.append(site.spent_s - before_s)
    assert len(site.core._index.active) == size["apps"] + size["nodes"]
    last = costs[-len(costs) // 10 :]
    return {"spent_s": site.spent_s, "parts": 1, "last_s": sum(last) / len(last), "decide_s": site.decide_s}


def looking_ahead(size: Mapping[str, int], calibration: Calibration) -> Case:
    """Let both policies decide about GPUs that are all in play; of some decisions the quickest counts."""
    # las knows no tenants, and lets apps that run go on: with little patience an app moves, and las has no such round
    plain = {"maxmin-ftf": {"tenants_first": False, "patience": 1e9}}
    ours_s, las_s = (min(_decisions_s(size, policy, calibration, policies=plain)) for policy in ("maxmin-ftf", "las"))
    return {"spent_s": ours_s, "parts": 1, "las_s": las_s}


def _decisions_s(size: Mapping[str, int], policy: str, calibration: Calibration, **more: Any) -> list[float]:
    """Return what equal decisions take, in a full site where apps wait, all leases about to end if they do."""
    site = full({**size, "nodes": size["few"]}, policy, calibration, **more)
    asked: list[Decide] = []
    site.decisions = lambda effect: _noted(effect, asked)
    for number in range(size["few"], size["waiting"]):
        site.submit(number, GPUS)
    before = site.holders()
    site.wait(1.0)
    while len(asked[-1].view.gpus if asked else ()) < len(before):
        site.wait(10.0)
    gc.collect()
    took_s = []
    for _ in range(15):
        began = time.process_time()
        decided = decide(asked[-1])
        took_s.append(time.process_time() - began)
    kept = decided.allocation.assign if decided.allocation.unnamed == "nobody" else before
    assert kept == before, "an app moved"
    assert len(decided.allocation.outcomes) == size["waiting"], "not every app was told why"
    return took_s


def _noted(effect: Decide, asked: list[Decide]) -> Decided:
    asked.append(effect)
    return _stay(effect)


CASES: dict[str, Callable[[Mapping[str, int], Calibration], Case]] = {
    "enrolled": enrolling,
    "lost": losing,
    "beat": beating,
    "still": resting,
    "auction": auctioning,
    "crowd": crowding,
    "kinds": naming,
    "renewed": renewing,
    "moved": moving,
    "guests": guesting,
    "submitted": submitting,
    "ahead": looking_ahead,
}


@contextmanager
def untold() -> Iterator[None]:
    """Tell only the apps whose holding changes, in rounds of any size: what is measured is the decision."""
    before, views.REASONS_MAX = views.REASONS_MAX, 0
    try:
        yield
    finally:
        views.REASONS_MAX = before


def measure(name: str, *, quick: bool) -> Case:
    """Run one case in this process; times are calibrated seconds from here on."""
    size = QUICK if quick else WHOLE
    calibration = Calibration()
    with seldom_collected(), nullcontext() if name in TOLD else untold():  # as the daemon is
        found = CASES[name](size, calibration)
    calibration.around()
    second_s = calibration.second_s
    told = {key: value / second_s if key.endswith("_s") else value for key, value in found.items()}
    per = told["spent_s"] / (told["parts"] if name in EACH else told[OVER[name]] if name in OVER else 1)
    row = {"case": name, "size": dict(size), "ours": per, "calibrated_second_s": second_s} | told
    if "until_run_s" in told:
        row["until_run_per_gpu_s"] = told["until_run_s"] / told["parts"]
    if "bare_s" in told:
        row["ratio_to_bare_table"] = told["spent_s"] / told["bare_s"]
    return row


# --- the document -----------------------------------------------------------------------------------------------------


def goals(rows: Sequence[Case]) -> list[dict[str, Any]]:
    """Return the goals of the cases that have one, at the size that was measured."""
    return [
        {
            "name": WORDS[row["case"]].format(**row["size"]),
            "goal": GOALS[row["case"]],
            "ours": row["ours"],
            "met": row["ours"] <= GOALS[row["case"]],
        }
        for row in rows
        if row["case"] in GOALS
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a site of a sixteenth of the size")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", choices=sorted(CASES), default="", metavar="CASE", help="one case")
    parser.add_argument("--case", choices=sorted(CASES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case, quick=options.quick)))
        return 0
    rows = []
    for name in [options.only] if options.only else CASES:
        command = [sys.executable, __file__, "--case", name, *(["--quick"] if options.quick else [])]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout))
        print(done.stdout, file=sys.stderr, end="")
    found = goals(rows)
    if options.json:
        print(json.dumps({"schema": "bench-rounds/v1", "goals": found, "rows": rows}, indent=2))
        return 0
    for goal in found:
        print(f"{'met   ' if goal['met'] else 'MISSED'} {goal['name']}: {goal['ours']:.3g} (goal {goal['goal']:.3g})")
    for row in rows:
        if "ratio_to_bare_table" in row:
            print(f"a lease renewed takes {row['ratio_to_bare_table']:.0f} times what a bare table takes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
