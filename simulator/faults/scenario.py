"""The scenario of a fault world, drawn from a seed: cluster, apps, settings, network and every fault with its time.

The whole scenario is drawn before the world begins, so that a world can be printed, and repeated with more output:
`draw` gives the `Options`, `injector` brings them about. Worlds are small (a few nodes, a few minutes) and rough:
leases of half a minute, timeouts of seconds, and more faults in these minutes than a site sees in a year. No fault
begins after `calm_at`; losses for good remain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from random import Random
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from app_agent.core.spec import AppSpec, mistake, wishing
from app_agent.core.tuning import scheduler_for
from app_agent.core.tuning.scheduler import Trial
from arbiter.core.registry import POLICIES
from arbiter.core.seam import DEFAULT_POLICY, Setting
from arbiter.core.state.model import ArbiterSettings
from protocol.messages import ARBITER, Level, NodeId, OwnerId, Party, Requirements, Sharing, Utility
from simulator.cluster import Cluster, NodeSpec
from simulator.costs import Costs
from simulator.jobs import WORKER_BYTES, JobFacts
from simulator.workers import NodeTraits

Kind = Literal[
    "crash",  # a daemon's process ends and is started again; nodes and workers go on
    "depose",  # a standby leads while the leader lives, and does not know of it
    "stale",  # the arbiter ends, and starts again with a journal that has lost its end
    "freeze",  # a daemon's process stands still (SIGSTOP, swapping, a debugger) and goes on
    "cut",  # no message passes between the arbiter and one agent, in one direction or both
    "vanish",  # an app agent ends for good
    "power",  # a node loses power: workers and node agent end
    "gpu",  # a GPU falls off the bus
    "worker-crash",  # a script ends by itself, badly
    "worker-kill",  # a stranger kills it
    "worker-deaf",  # it trains on but neither says nor hears anything
    "worker-stall",  # it stands still, says and hears nothing
    "mps",  # a kernel of a client of MPS faults, which ends all clients of its GPU
    "cancel",  # its user ends an app
    "policy",  # the operator changes policy
    "sharing",  # the operator changes how GPUs are shared
    "drain",  # an administrator empties a node, and lets it be used again
    "hold",  # an app is held, and released
    "requeue",  # an app leaves its GPUs and waits behind all others
]

#: How a former leader lives on as another takes over from it.
Lives = Literal[
    "stopped",  # its process stood still meanwhile: it goes on with what it was about to do
    "cut",  # the broker cannot be reached, and it does not know yet
    "slow",  # it hears what the leader hears, and its commit takes its time
    "token",  # it knows that it has lost its token, and stands by at once
]

#: A policy that deals with all seats of shared GPUs itself, which worlds of such GPUs run more often than others.
_SHARES = next(name for name, entry in sorted(POLICIES.items()) if entry.kind.traits.shares)
#: Mini-batches per second where they matter to packing; elsewhere one, which is rougher on everything else.
FINE = 20.0
#: Faults of a world, at most: all of them within `calm_at` seconds.
FAULTS_MAX = 24
#: Drains of a world that has any, at most; and the administrator who orders them.
DRAINS_MAX = 5
#: Likewise holds and requeues, takeovers by a standby, and faults of clients of MPS.
HOLDS_MAX = 6
TAKEOVERS_MAX = 4
STANDBYS = 1 / 3  #: of the worlds have a second arbiter
#: Of these, the part in which leaders live on; and then the part of the takeovers from one that does.
FORMERS, FORMER = 1 / 2, 2 / 3
#: Times that the journal loses its end in a world that has any, at most; and the part of the worlds that have some.
LOSSES_MAX = 2
STALE = 1 / 8
MPS_FAULTS_MAX = 6
ADMIN = Party("app", OwnerId("ops"))
APPS_MAX = 8
GIB = 2**30
#: The names of GPUs where a world has two types; one has the letters of the other in it.
TYPES = ("imaginary A1", "imaginary A10")
#: S of GPUs apart, where placement matters in a world; the figures are PAPERS.md section 1's crude ones, rounded up.
SLOWDOWN: dict[Level, float] = {"slot": 1.0, "machine": 1.1, "rack": 1.3, "cluster": 1.6}


class Fault(Struct, frozen=True):
    """One fault, at `at` for `for_s` seconds (0: for good, where the kind has a duration).

    `party` is the participant that it strikes, the arbiter where the kind needs none. `number` picks one of those
    present at that time: the GPU of a node, the worker on a node, or the direction of a cut (0 both, 1 to the arbiter,
    2 from it). A crash that is `midway` comes after the next event was written down and handled, and before any of its
    effects. A stale journal has lost that event then, too: its commit had not ended. A leader that is deposed `midway`
    has committed that event, and performs its effects when it goes on.
    """

    at: float
    kind: Kind
    party: Party = ARBITER
    for_s: float = 0.0
    number: int = 0
    midway: bool = False
    policy: str = ""
    sharing: Sharing = "exclusive"
    force: bool = False  #: of a drain
    by_admin: bool = False  #: of a hold or requeue: by the administrator, and not by the owner
    lost_s: float = 0.0  #: of a stale journal: it knows nothing of so many seconds before its end
    told: bool = False  #: and it says so, as a backup does that was restored
    epochs_lost: bool = False  #: and neither does it know which epochs were led in since
    lives: Lives = "stopped"  #: of a leader that is deposed: `for_s` later another one leads
    lingers_s: float = 0.0  #: and it lives on for so long, at most


class NetworkOptions(Struct, frozen=True):
    """The quality of the network: each message is lost or repeated by these odds and late by up to `delay_s`.

    `ordered` keeps the messages of one participant to another in order, as a live link does; otherwise any message may
    overtake another. `kept` lets messages for a participant that is down wait for it, as in a broker's queue.
    """

    loss: float
    repeat: float
    delay_s: float
    ordered: bool
    kept: bool


class AppOptions(Struct, frozen=True):
    """One app: its owner's submission with its time, the true work, and the honesty of its agent.

    `work_s` are serial seconds of each job, `lie` multiplies every rho that it states. Its `kind` decides its speed
    beside others on a GPU. An app that `balks` says that its jobs can be parked, and they refuse. Those of one that
    `keeps_bytes` do not give them back when they are parked (`JobFacts`).
    """

    submit_s: float
    spec: AppSpec
    work_s: float
    apart: bool  #: whether it is slower when its GPUs lie apart
    lie: float = 1.0
    kind: str = ""
    peak_bytes: int = WORKER_BYTES
    can_park: bool = True
    can_checkpoint: bool = True
    balks: bool = False
    keeps_bytes: int = 0
    hidden: bool = False

    @property
    def steps(self) -> int:
        """Mini-batches of each job."""
        return max(1, round(self.work_s))


class Clock(Struct, frozen=True):
    """A participant's clock: fast or slow by a constant rate, early or late."""

    rate: float
    offset_s: float


class Options(Struct, frozen=True):
    """All that a seed decides."""

    seed: int
    cluster: Cluster
    settings: ArbiterSettings
    costs: Costs
    beat_s: float
    hello_s: float
    calm_at: float
    apps: tuple[AppOptions, ...]
    network: NetworkOptions
    faults: tuple[Fault, ...]
    clocks: tuple[tuple[Party, Clock], ...]
    traits: tuple[tuple[NodeId, NodeTraits], ...]
    snapshot_every: int  #: events between two snapshots of a journal
    standby: bool = False  #: a second arbiter follows the journal, and goes on where the first one ended
    site: str = ""  #: its id; an arbiter that has one finds out that its journal is older than what nodes have seen

    def owner(self, number: int) -> Party:
        """Return the agent of the app that is submitted as the `number`-th, from 0."""
        return Party("app", OwnerId(f"app{number + 1}"))


def draw(seed: int, *, policy: str = "") -> Options:
    """Return the world of `seed`; under this `policy` from its beginning to its end, if one is named."""
    dice = Random(seed)  # noqa: S311 - a world is to be repeatable, not secret
    cluster = _cluster(dice)
    settings = _settings(dice, seed)
    calm_at = dice.uniform(50.0, 130.0)
    apps = tuple(sorted(_apps(dice, cluster, calm_at), key=lambda app: app.submit_s))
    options = Options(
        seed=seed,
        cluster=cluster,
        settings=settings,
        costs=_costs(dice),
        beat_s=dice.choice((2.0, 3.0, 4.0)),
        hello_s=dice.choice((3.0, 6.0)),
        calm_at=calm_at,
        apps=apps,
        network=_network(dice),
        faults=(),
        clocks=(),
        traits=tuple((node.id, _traits(dice)) for node in cluster.nodes),
        snapshot_every=dice.choice((10, 100, 1000)),
    )
    overlaps = Random(f"mps {seed}")  # noqa: S311 - repeatable, not secret
    options = _with_later_draws(seed, options, overlaps)
    takeovers = _takeovers(seed, options)
    losses = _losses(seed, options)
    options = replace(options, standby=bool(takeovers), site=f"s-{seed}" if losses else "")
    drawn = (
        *_faults(dice, options),
        *_drains(seed, options),
        *_holds(seed, options),
        *_mps_faults(overlaps, options),
        *takeovers,
        *losses,
    )
    faults = sorted(drawn, key=lambda fault: fault.at)
    if policy:
        options = replace(options, settings=replace(options.settings, policy=policy))
        faults = [replace(fault, policy=policy) if fault.policy else fault for fault in faults]
    return replace(options, faults=tuple(faults), clocks=tuple(_clocks(dice, options)))


def _with_later_draws(seed: int, options: Options, overlaps: Random) -> Options:
    """Return a world with what has dice of its own, so that all other draws stay as they are."""
    options = _shared(Random(f"sharing {seed}"), options)  # noqa: S311 - repeatable, not secret
    helpless = Random(f"helpless {seed}")  # noqa: S311 - likewise
    options = replace(options, apps=tuple(_maybe_helpless(helpless, app) for app in options.apps))
    arrays = Random(f"arrays {seed}")  # noqa: S311 - likewise
    options = replace(options, apps=tuple(_maybe_array(arrays, app) for app in options.apps))
    options = _maybe_driven(Random(f"drivers {seed}"), options)  # noqa: S311 - likewise
    options = _of_kinds(Random(f"kinds {seed}"), options)  # noqa: S311 - likewise
    options = _maybe_overlapping(overlaps, options)
    if seed % 4 == 1:  # a large site, by its rule for restatements: each beat restates a third to a fifth of it
        options = replace(options, settings=replace(options.settings, beat_s=1.0, restatements_per_s=0.25))
    return options


# --- the site -------------------------------------------------------------------------------------------------------


def _cluster(dice: Random) -> Cluster:
    shapes = ((1,), (2,), (1, 1), (2, 2), (4,), (2, 1), (1, 1, 1))
    count = dice.randint(1, 4)
    racks = dice.randint(1, count)
    nodes = tuple(
        NodeSpec(NodeId(f"n{number + 1}"), f"r{number % racks + 1}", dice.choice(shapes), "imaginary", 16 * GIB)
        for number in range(count)
    )
    return Cluster(f"{count} nodes", nodes)


def _traits(dice: Random) -> NodeTraits:
    return NodeTraits(slow=dice.choice((2.0, 5.0)) if dice.random() < 0.15 else 1.0)


def _settings(dice: Random, seed: int) -> ArbiterSettings:
    return ArbiterSettings(
        policy=DEFAULT_POLICY if dice.random() < 0.35 else _any_policy(dice),
        policies=_of_policies(
            fairness_knob=dice.choice((0.0, 0.5, 0.8, 1.0)),
            threshold_gpu_s=dice.choice((20.0, 100.0)),
            start_within_s=(10.0, 60.0, inf)[seed // 3 % 3],
            renewal_factor=(1.0, 1.25, 4.0)[seed // 9 % 3],
        ),
        solver_budget_ms=100.0,
        admins=(OwnerId(ADMIN.id),),
        interactive_share=0.5,
        interactive_s=10.0,
        lease_s=dice.choice((15.0, 25.0, 40.0)),
        renewal_lead_s=dice.choice((2.0, 4.0)),
        round_pause_s=dice.choice((0.5, 1.0)),
        probe_s=dice.choice((0.5, 1.0, 2.0)),
        ask_max=(0, 1, 100)[seed % 3],  # asked of no dice, so that worlds of earlier seeds stay as they are
        bid_s=dice.choice((0.5, 1.0, 2.0)),
        decide_grace_s=dice.choice((2.0, 5.0)),
        beat_s=dice.choice((2.0, 3.0, 4.0)),
        node_timeout_s=dice.choice((10.0, 15.0)),
        app_timeout_s=dice.choice((10.0, 20.0)),
        admission_wait_s=dice.choice((2.0, 5.0)),
        seed=seed,
    )


def _of_policies(**drawn: float) -> dict[str, dict[str, Setting]]:
    """Return policies' settings that fit worlds of minutes: those drawn and these, for every policy that has them.

    `leftover` is not "idle": where bidders want a GPU about equally, it can be idle in every round.
    """
    fit: dict[str, Setting] = {**drawn, "leftover": "bidders", "slot_s": 20.0}
    return {
        name: {field: value for field, value in fit.items() if field in entry.settings.__struct_fields__}
        for name, entry in POLICIES.items()
    }


def _any_policy(dice: Random) -> str:
    """Return a policy by one draw, however many there are: a new one leaves the rest of every world as it was."""
    policies = sorted(POLICIES)
    return policies[int(dice.random() * len(policies))]


def _costs(dice: Random) -> Costs:
    free = dice.random() < 0.2
    return Costs(
        message_s=0.01,
        decide_s=dice.choice((0.0, 0.05, 1.0, 8.0)),
        sample_s=0.0 if free else dice.choice((0.05, 0.5)),
        start_s=0.0 if free else dice.choice((0.5, 2.0)),
        restore_s=0.0 if free else 0.5,
        checkpoint_s=0.0 if free else dice.choice((0.2, 1.5)),
        suspend_s=0.0 if free else dice.choice((0.1, 1.0)),
        resume_s=0.0 if free else 0.3,
        boundaries=not free,
    )


def _network(dice: Random) -> NetworkOptions:
    return NetworkOptions(
        loss=dice.choice((0.0, 0.02, 0.1, 0.3)),
        repeat=dice.choice((0.0, 0.0, 0.05, 0.2)),
        delay_s=dice.choice((0.01, 0.2, 1.0, 3.0)),
        ordered=dice.random() < 0.4,
        kept=dice.random() < 0.5,
    )


def _clocks(dice: Random, options: Options) -> list[tuple[Party, Clock]]:
    parties = [ARBITER, *_nodes(options), *_owners(options)]
    return [
        (party, Clock(dice.uniform(0.95, 1.05), dice.choice((0.0, 5.0, 1e4))))
        for party in parties
        if dice.random() < 0.4
    ]


def _nodes(options: Options) -> list[Party]:
    return [Party("node", node.id) for node in options.cluster.nodes]


def _owners(options: Options) -> list[Party]:
    return [options.owner(number) for number in range(len(options.apps))]


# --- GPUs that are shared ---------------------------------------------------------------------------------------------


def _shared(dice: Random, options: Options) -> Options:
    """Return the same world, in half of the draws with GPUs that jobs share."""
    sharing: Sharing = dice.choice(("exclusive", "exclusive", "timeslice", "pack"))
    if sharing == "exclusive":
        return options
    settings = replace(
        options.settings,
        sharing=sharing,
        seats=dice.choice((2, 3, 4)),
        quantum_s=dice.choice((2.0, 5.0, 10.0)),
        policy=_SHARES if dice.random() < 0.35 else options.settings.policy,
    )
    costs = options.costs
    if dice.random() < 0.7:  # expensive turns are long ones, and a world sees few of these
        costs = replace(costs, suspend_s=dice.choice((0.0, 0.03)), resume_s=0.02)
    return replace(
        options,
        settings=settings,
        costs=costs,
        traits=tuple((node, _equipped(dice, traits)) for node, traits in options.traits),
        apps=tuple(sorted(_sharing_apps(dice, options), key=lambda app: app.submit_s)),
    )


def _sharing_apps(dice: Random, options: Options) -> list[AppOptions]:
    """Return twice as many apps that come early: GPUs are shared only where they are scarce."""
    apps = [*options.apps, *_apps(dice, options.cluster, options.calm_at)]
    return [_sharing_app(dice, replace(app, submit_s=app.submit_s * 0.4)) for app in apps]


def _equipped(dice: Random, traits: NodeTraits) -> NodeTraits:
    return replace(
        traits,
        host_bytes=dice.choice((0, 0, 5 * GIB, 20 * GIB)),
        driver=dice.random() < 0.4,
        driver_refuses=dice.choice((0.0, 0.3)),
        driver_loses=dice.choice((0.0, 0.0, 0.15)),
    )


def _sharing_app(dice: Random, app: AppOptions) -> AppOptions:
    spec = wishing(app.spec, priority=dice.choice((0, 0, 0, 0, 0, -1)))
    if (
        len(spec.trials) == 1 and dice.random() < 0.5
    ):  # two gangs seldom have the very same GPUs, and only then they are packed
        app = replace(app, work_s=2.0 * app.work_s / spec.gang)
        spec = wishing(replace(spec, gang=1, gpus_max=0, sizes=()), spans=False)
    if len(spec.trials) == 1:  # mini-batches so short that packing can be measured
        spec = replace(spec, steps_total=max(1, round(app.work_s * FINE)), step_serial_s=0.0)
    if spec.gpus_max and dice.random() < 0.5:  # the same, by the sizes that it accepts
        spec = replace(spec, sizes=tuple(spec.gang * times for times in (1, 2, 3)), gpus_max=0)
    app = _maybe_keeping(Random(f"keeps {app.submit_s} {app.work_s}"), app)  # noqa: S311 - repeatable, not secret
    return replace(
        app,
        spec=spec,
        kind=dice.choice("abc"),
        # Two of the small ones fit on a GPU together; no app fits beside one of the large ones.
        peak_bytes=int(dice.choice((2.0, 5.0, 7.0, 11.0)) * GIB),
        can_park=dice.random() < 0.85,
        balks=dice.random() < 0.1,
    )


def _maybe_overlapping(dice: Random, options: Options) -> Options:
    """Return the same world; in half of those whose GPUs are shared, MPS is on some nodes, or on all."""
    if options.settings.sharing == "exclusive" or dice.random() >= 1 / 2:
        return options
    everywhere = dice.random() < 0.5
    traits = tuple((node, replace(each, mps=everywhere or dice.random() < 0.5)) for node, each in options.traits)
    return replace(options, traits=traits)


def _maybe_keeping(dice: Random, app: AppOptions) -> AppOptions:
    """Return the app; one in eight keeps GPU memory when its jobs are parked, as DDP's buckets or `cupy` do."""
    keeps = dice.random() < 1 / 8
    return replace(app, keeps_bytes=int(dice.choice((0.5, 3.0)) * GIB), hidden=dice.random() < 0.5) if keeps else app


def _maybe_helpless(dice: Random, app: AppOptions) -> AppOptions:
    """Return the app; one in ten of the apps with one job can neither save nor be suspended."""
    helpless = dice.random() < 0.1 and len(app.spec.trials) == 1
    return replace(app, can_park=False, can_checkpoint=False) if helpless else app


def _maybe_driven(dice: Random, options: Options) -> Options:
    """Return the same world, in some draws with many helpless apps that drivers suspend, and move within a node."""
    if options.settings.sharing != "exclusive" or dice.random() >= 0.25:
        return options
    # The work of a helpless job is gone if its driver will not suspend it: with short leases it would never end.
    traits = tuple(
        (node, replace(each, driver=True, move_refuses=_equipped(dice, each).driver_refuses))
        for node, each in options.traits
    )
    more = [*options.apps, *_apps(dice, options.cluster, options.calm_at)]
    apps = [_driven_app(dice, replace(app, submit_s=app.submit_s * 0.4)) for app in more]
    return replace(options, traits=traits, apps=tuple(sorted(apps, key=lambda app: app.submit_s)))


def _driven_app(dice: Random, app: AppOptions) -> AppOptions:
    if dice.random() < 0.3:
        return app
    if len(app.spec.trials) == 1:  # a job of one GPU finds another on its node most often
        spec = wishing(replace(app.spec, gang=1, gpus_max=0, sizes=()), spans=False)
        app = replace(app, spec=spec, work_s=2.0 * app.work_s / app.spec.gang)
    return replace(app, can_park=False, can_checkpoint=False)


def _maybe_array(dice: Random, app: AppOptions) -> AppOptions:
    """Return the app; one in ten of the apps with one job is an array of as much work."""
    jobs, at_most = dice.randint(2, 6), dice.choice((0, 1, 2))
    if dice.random() >= 0.1 or len(app.spec.trials) > 1:
        return app
    spec = replace(app.spec, array=tuple(range(jobs)), array_at_most=at_most)
    if spec.steps_total:
        spec = replace(spec, steps_total=max(1, spec.steps_total // jobs))
    return replace(app, spec=spec, work_s=app.work_s / jobs)


def _of_kinds(dice: Random, options: Options) -> Options:
    """Return the same world, in a quarter of the draws with nodes of two types of GPUs, which some apps ask for."""
    if dice.random() >= 0.25:
        return options
    nodes = tuple(replace(node, gpu_type=dice.choice(TYPES)) for node in options.cluster.nodes)
    apps = tuple(
        replace(app, spec=wishing(app.spec, gpu_types=(dice.choice(TYPES).split()[1],))) if dice.random() < 0.4 else app
        for app in options.apps
    )
    return replace(options, cluster=replace(options.cluster, nodes=nodes), apps=apps)


# --- apps -----------------------------------------------------------------------------------------------------------


def _apps(dice: Random, cluster: Cluster, calm_at: float) -> list[AppOptions]:
    return [_app(dice, cluster, calm_at) for _ in range(dice.randint(2, APPS_MAX))]


def _app(dice: Random, cluster: Cluster, calm_at: float) -> AppOptions:
    work_s = dice.uniform(5.0, 50.0)
    makers: Sequence[Callable[[Random, Cluster, AppSpec], AppSpec]] = (_gang, _gang, _spanning, _elastic, _search)
    plain = AppSpec(
        trials=(("imaginary",),),
        cwd="/",
        checkpoint_root="/",
        env={"SEED": "7", "DATA": "/data"},  # not in the order of their names, in which a snapshot writes them
        tenant=dice.choice(("red", "blue", "green")),
        name="imaginary",
        steps_total=max(1, round(work_s)) if dice.random() < 0.7 else 0,
        step_serial_s=dice.choice((0.0, 1.0, 3.0)),
        restart_s=dice.choice((1.0, 5.0)),
        requirements=Requirements(
            # Long enough to save on a slow node: a job that is killed before that at every preemption never finishes.
            grace_s=dice.choice((14.0, 25.0)),
            preempt_by=dice.choice(("auto", "checkpoint", "suspend")),
        ),
        max_restarts=10,
        level_max=dice.choice(("cluster", "cluster", "machine", "slot")),
    )
    spec = wishing(dice.choice(makers)(dice, cluster, plain), utility=_utility(plain, work_s), kind=_kind(work_s))
    wrong = mistake(spec)
    assert wrong is None, wrong
    return AppOptions(
        submit_s=dice.uniform(0.0, calm_at * 0.6),
        spec=spec,
        work_s=work_s * spec.gang,
        apart=dice.random() < 0.5,
        lie=dice.choice((0.1, 3.0, 100.0)) if dice.random() < 0.2 else 1.0,
    )


def _kind(work_s: float) -> Literal["batch", "interactive"]:
    """Return an app's class, from dice of its own, so that the rest of a world known by its seed stays as it was."""
    return "interactive" if Random(f"class {work_s}").random() < 0.2 else "batch"  # noqa: S311 - repeatable, not secret


def _utility(spec: AppSpec, work_s: float) -> Utility | None:
    """Return an app's utility, if it has one; from dice of its own, so that worlds known by their seeds stay."""
    dice = Random(work_s)  # noqa: S311 - repeatable, not secret
    known = spec.steps_total > 0 and spec.step_serial_s > 0.0
    return Utility(dice.choice((1.0, 10.0, 1000.0)), 0.0, 0.0) if known and dice.random() < 0.7 else None


def _gang(dice: Random, cluster: Cluster, spec: AppSpec) -> AppSpec:
    too_large = dice.random() < 0.05
    gang = cluster.gpus_of_largest_node + 1 if too_large else dice.randint(1, cluster.gpus_of_largest_node)
    return replace(spec, gang=gang)


def _spanning(dice: Random, cluster: Cluster, spec: AppSpec) -> AppSpec:
    gang = dice.randint(1, min(4, cluster.gpus))
    return wishing(replace(spec, level_max="cluster", gang=gang), spans=True)


def _elastic(dice: Random, cluster: Cluster, spec: AppSpec) -> AppSpec:
    gang = dice.choice((1, 1, 2)) if cluster.gpus_of_largest_node > 1 else 1
    return replace(spec, gang=gang, gpus_max=gang * dice.randint(2, 3))


def _search(dice: Random, cluster: Cluster, spec: AppSpec) -> AppSpec:
    trials = dice.randint(2, 5)
    search = dice.choice(("halving", "hyperband", "curve", "all"))
    gang = dice.choice((1, 1, 2)) if cluster.gpus_of_largest_node > 1 else 1
    return replace(
        spec,
        trials=spec.trials * trials,
        gang=gang,
        metric="loss",
        mode="min",
        search=search,
        steps_total=max(20, spec.steps_total),
        target=0.2 if search == "curve" and dice.random() < 0.3 else None,
    )


def facts_of(app: AppOptions, seed: int) -> list[JobFacts]:
    """Return the truth about the jobs of an app; a search's trials report a loss that falls with their steps."""
    spec = app.spec
    steps = spec.steps_total or app.steps
    slowdown = _slower_apart if app.apart else _as_fast_anywhere
    dice = Random(f"{seed} {app.submit_s}")  # noqa: S311 - repeatable, not secret
    facts = []
    for number in spec.numbers:
        reports: tuple[tuple[int, float], ...] = ()
        if spec.metric:
            trial = Trial(number=number, steps_done=0, steps_total=steps, state="live")
            power, floor = dice.uniform(0.2, 1.0), dice.uniform(0.0, 0.3)
            at = sorted({*scheduler_for(spec).report_steps(trial), steps})
            reports = tuple((step, floor + (1 + step) ** -power) for step in at if step <= steps)
        facts.append(
            JobFacts(
                work_s=app.work_s,
                steps=steps,
                demand_max=spec.job_demand_max,
                slowdown=slowdown,
                reports=reports,
                metric=spec.metric,
                kind=app.kind,
                beside=partial(_pair_speed, seed, app.kind),
                busy=None,
                peak_bytes=app.peak_bytes,
                can_park=app.can_park,
                can_checkpoint=app.can_checkpoint,
                balks=app.balks,
                keeps_bytes=app.keeps_bytes,
                hidden=app.hidden,
                overlapping=partial(_overlapping, seed, app.kind),
            )
        )
    return facts


def _pair_speed(seed: int, kind: str, other: str) -> float:
    """Return the speed of a job of that kind beside another: some pairs gain by sharing, some lose."""
    dice = Random(f"beside {seed} {kind} {other}")  # noqa: S311 - repeatable, not secret
    return 0.0 if dice.random() < 0.05 else dice.uniform(0.3, 1.0)


def _overlapping(seed: int, kind: str, other: str) -> float:
    """Return the same where both are clients of MPS: half of the loss is gone."""
    speed = _pair_speed(seed, kind, other)
    return (1.0 + speed) / 2 if speed > 0.0 else 0.0


def _slower_apart(gpus: int, level: Level) -> float:
    return SLOWDOWN[level] if gpus > 1 else 1.0


def _as_fast_anywhere(gpus: int, level: Level) -> float:  # noqa: ARG001 - a slowdown is asked of both
    return 1.0


# --- faults -----------------------------------------------------------------------------------------------------------


def _faults(dice: Random, options: Options) -> list[Fault]:
    # A world of few kinds shows more of each than one of all: faults that hide behind crashes show without them.
    last = _policy if options.settings.sharing == "exclusive" else _operator
    makers = (_daemon, _cut, _vanish, _power, _gpu, _worker, _cancel, last)
    chosen = dice.sample(makers, dice.randint(1, len(makers)))
    return [_one_fault(dice, options, chosen) for _ in range(dice.randint(0, FAULTS_MAX))]


def _one_fault(dice: Random, options: Options, makers: Sequence[Callable[[Random, Options], Fault]]) -> Fault:
    fault = dice.choice(makers)(dice, options)
    return replace(fault, at=dice.uniform(1.0, options.calm_at))


def _daemon(dice: Random, options: Options) -> Fault:
    party = dice.choice((ARBITER, dice.choice(_nodes(options)), dice.choice(_owners(options))))
    kind: Kind = dice.choice(("crash", "crash", "freeze"))
    return Fault(0.0, kind, party, for_s=_for_s(dice), midway=kind == "crash" and dice.random() < 0.4)


def _cut(dice: Random, options: Options) -> Fault:
    party = dice.choice((*_nodes(options), *_owners(options)))
    return Fault(0.0, "cut", party, for_s=_for_s(dice), number=dice.randint(0, 2))


def _vanish(dice: Random, options: Options) -> Fault:
    if dice.random() < 0.7:  # vanishing for good is rare
        return _daemon(dice, options)
    return Fault(0.0, "vanish", dice.choice(_owners(options)))


def _power(dice: Random, options: Options) -> Fault:
    return Fault(0.0, "power", dice.choice(_nodes(options)), for_s=_for_s(dice))


def _gpu(dice: Random, options: Options) -> Fault:
    for_s = 0.0 if dice.random() < 0.4 else _for_s(dice)
    return Fault(0.0, "gpu", dice.choice(_nodes(options)), for_s=for_s, number=dice.randrange(8))


def _worker(dice: Random, options: Options) -> Fault:
    kind: Kind = dice.choice(("worker-crash", "worker-kill", "worker-deaf", "worker-stall"))
    return Fault(0.0, kind, dice.choice(_nodes(options)), number=dice.randrange(8))


def _cancel(dice: Random, options: Options) -> Fault:
    return Fault(0.0, "cancel", dice.choice(_owners(options)))


def _policy(dice: Random, options: Options) -> Fault:  # noqa: ARG001 - drawn like the others
    return Fault(0.0, "policy", policy=_any_policy(dice))


def _operator(dice: Random, options: Options) -> Fault:
    if dice.random() < 0.5:
        return _policy(dice, options)
    return Fault(0.0, "sharing", sharing=dice.choice(("exclusive", "timeslice", "pack")))


def _drains(seed: int, options: Options) -> list[Fault]:
    """Return the drains of a world, in a third of the draws; from dice of their own, so that the rest stays."""
    dice = Random(f"drains {seed}")  # noqa: S311 - repeatable, not secret
    count = dice.randint(1, DRAINS_MAX) if dice.random() < 1 / 3 else 0
    return [_drain(dice, options) for _ in range(count)]


def has_standby(seed: int) -> bool:
    """Whether the world of `seed` has a standby."""
    return _standby_dice(seed).random() < STANDBYS


def _standby_dice(seed: int) -> Random:
    return Random(f"standby {seed}")  # noqa: S311 - repeatable, not secret


def _takeovers(seed: int, options: Options) -> list[Fault]:
    """Return ends of the arbiter after which a standby leads, in some of the draws; from dice of their own.

    The standby leads at once, or late. One takeover in three is followed by another at once: the standby has hardly
    begun to lead when it is deposed.
    """
    dice = _standby_dice(seed)
    count = dice.randint(1, TAKEOVERS_MAX) if dice.random() < STANDBYS else 0
    faults = []
    for _ in range(count):
        at, for_s, midway = dice.uniform(1.0, options.calm_at), dice.choice((0.0, 0.1, 2.0, 10.0)), dice.random() < 0.5
        faults.append(Fault(at, "crash", for_s=for_s, midway=midway))
        if dice.random() < 1 / 3:
            again = min(options.calm_at, at + for_s + dice.uniform(0.0, 0.3))
            faults.append(Fault(again, "crash", for_s=0.0, midway=dice.random() < 0.5))
    return _deposed(seed, faults)


def _deposed(seed: int, takeovers: list[Fault]) -> list[Fault]:
    """Return the takeovers, in some draws with leaders that live on; from dice of their own, so that the rest stays."""
    dice = Random(f"former {seed}")  # noqa: S311 - repeatable, not secret
    if dice.random() >= FORMERS:
        return takeovers
    return [_lives_on(dice, fault) if dice.random() < FORMER else fault for fault in takeovers]


def _lives_on(dice: Random, fault: Fault) -> Fault:
    lives: Lives = dice.choice(("stopped", "stopped", "cut", "slow", "token"))
    return replace(
        fault, kind="depose", lives=lives, lingers_s=dice.choice((0.0, 0.5, 5.0, 20.0)) * dice.uniform(0.5, 1.5)
    )


def has_stale_journal(seed: int) -> bool:
    """Whether the arbiter's journal loses its end in the world of `seed`."""
    return _stale_dice(seed).random() < STALE


def _stale_dice(seed: int) -> Random:
    return Random(f"stale {seed}")  # noqa: S311 - repeatable, not secret


def _losses(seed: int, options: Options) -> list[Fault]:
    """Return losses of the end of the arbiter's journal, in some of the draws; from dice of their own.

    Lost are the last events of a power cut; or all since an older copy was made, which was put back by hand, or by
    `restore` and says so.
    """
    dice = _stale_dice(seed)
    count = dice.randint(1, LOSSES_MAX) if dice.random() < STALE else 0
    return [_loss(dice, options) for _ in range(count)]


def _loss(dice: Random, options: Options) -> Fault:
    lost_s = dice.choice((0.0, 0.3, 3.0, 20.0, 60.0)) * dice.uniform(0.5, 1.5)
    return Fault(
        dice.uniform(5.0, options.calm_at),
        "stale",
        for_s=dice.choice((0.0, 0.5, 5.0, 20.0)),
        midway=dice.random() < 0.5,
        lost_s=lost_s,
        told=dice.random() < 0.4,
        epochs_lost=dice.random() < 0.4,
    )


def _mps_faults(dice: Random, options: Options) -> list[Fault]:
    """Return faults of clients of MPS, where nodes have it."""
    nodes = [Party("node", node) for node, traits in options.traits if traits.mps]
    count = dice.randint(0, MPS_FAULTS_MAX) if nodes else 0
    return [
        Fault(dice.uniform(1.0, options.calm_at), "mps", dice.choice(nodes), number=dice.randrange(8))
        for _ in range(count)
    ]


def _drain(dice: Random, options: Options) -> Fault:
    at, for_s = dice.uniform(1.0, options.calm_at), dice.choice((1.0, 10.0, 40.0)) * dice.uniform(0.5, 1.5)
    return Fault(at, "drain", dice.choice(_nodes(options)), for_s=for_s, force=dice.random() < 0.15)


def _holds(seed: int, options: Options) -> list[Fault]:
    """Return the holds and requeues of a world, in a third of the draws; likewise from dice of their own."""
    dice = Random(f"holds {seed}")  # noqa: S311 - repeatable, not secret
    count = dice.randint(1, HOLDS_MAX) if dice.random() < 1 / 3 else 0
    return [_hold(dice, options) for _ in range(count)]


def _hold(dice: Random, options: Options) -> Fault:
    at, for_s = dice.uniform(1.0, options.calm_at), dice.choice((1.0, 10.0, 40.0)) * dice.uniform(0.5, 1.5)
    kind: Kind = dice.choice(("hold", "hold", "requeue"))
    return Fault(at, kind, dice.choice(_owners(options)), for_s=for_s, by_admin=dice.random() < 0.5)


def _for_s(dice: Random) -> float:
    """Return the length of a fault: within the timeouts, or beyond."""
    return dice.choice((0.1, 2.0, 6.0, 25.0)) * dice.uniform(0.5, 1.5)
