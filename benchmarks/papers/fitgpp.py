"""FitGpp's evaluation: ``python benchmarks/papers/fitgpp.py [--quick] [--json] [--only PART,...] [--keep FILE]``.

Every published figure of FitGpp (OpML 2019; PAPERS.md section 3) beside what the cores that run live do under virtual
time, on seeded workloads after its own (`simulator.workload.fitgpp`). As there, decisions come every simulated minute,
and nothing takes time but the grace periods, which are taken in full. Policies: `fitgpp`, `lrtp`, `rand`; *fifo* is the
same policy without interactive apps (``interactive_s = 0``), so that it, too, looks at CPU cores and memory. The
shipped `fitgpp` knows no run times; `lrtp` takes from the jobs what truly is left. Parts:

*policies*: the published table, and `fitgpp` with a node for interactive apps only (``reserved_nodes``, not the
paper's); *cap*: P; *robustness*: other parts of interactive apps, longer grace periods, more nodes for interactive apps
only.

Slowdown is 1 + waiting / execution (Eq. 5); percentiles are of the jobs of all seeds together. A job that was preempted
waits from the moment that it is told to leave to its next start.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, the repository is not on the path

from arbiter.core.registry import tables
from arbiter.core.seam import Setting
from arbiter.core.state.model import ArbiterSettings
from benchmarks.papers.document import Claim, Memory, Table, arguments, keeping, report_of, show
from node_agent.core.events import StartWorker
from protocol.core import Send
from protocol.messages import AppId, Preempt
from simulator.cluster import Cluster, parse_cluster
from simulator.costs import NONE
from simulator.profiles import crude
from simulator.run import Simulation
from simulator.workload.fitgpp import fitgpp_workload
from simulator.world import Actor, quiet

SCHEMA = "fitgpp-evaluation/v1"
CLUSTER = "fitgpp-84x8"
#: Nodes of a quick run; the workload's density follows the cluster.
QUICK_NODES = 21
MINUTE_S = 60.0
FIFO, FITGPP, LRTP, RAND = "fifo", "fitgpp", "lrtp", "rand"
POLICIES = (FIFO, LRTP, RAND, FITGPP)
#: Slowdowns at the 50th, 95th and 99th percentile: interactive apps, then batch jobs. *Source:* FitGpp, Table 1.
PUBLISHED = {
    FIFO: ("9.38 / 33.4 / 48.5", "2.78 / 4.89 / 8.21"),
    LRTP: ("1.00 / 1.17 / 1.58", "3.78 / 7.25 / 12.5"),
    RAND: ("1.00 / 1.17 / 1.58", "3.87 / 7.49 / 12.9"),
    FITGPP: ("1.00 / 1.15 / 1.54", "3.28 / 6.06 / 10.3"),
}
#: Minutes from preemption to restart at the 50th, 75th, 95th and 99th percentile; and the part of jobs preempted.
PUBLISHED_RESTART = {LRTP: "4 / 4 / 5 / 7", RAND: "4 / 4 / 6 / 7", FITGPP: "2 / 2 / 4 / 6", FIFO: "-"}
PUBLISHED_PREEMPTED = {LRTP: "9.6 %", RAND: "9.7 %", FITGPP: "0.63 %", FIFO: "-"}


class Plan(Struct, frozen=True):
    """How much is done."""

    nodes: int
    jobs: int
    seeds: tuple[int, ...]
    caps: tuple[int, ...]  #: P
    shares: tuple[float, ...]  #: of interactive apps
    graces: tuple[float, ...]  #: times the grace periods
    kept: int  #: of the nodes, so many for interactive apps only, in one more row (not the paper's)
    more_kept: tuple[int, ...]  #: the same, in the sweep
    few_seeds: tuple[int, ...]  #: of the sweeps


FULL = Plan(84, 2**13, tuple(range(8)), (1, 2, 4, 1000), (0.1, 0.5), (8.0,), 2, (0, 1, 2, 4), (0, 1))
QUICK = Plan(QUICK_NODES, 2**10, (0, 1), (1, 1000), (), (), 1, (), (0,))


class Case(Struct, frozen=True):
    """One run."""

    policy: str
    seed: int
    nodes: int
    jobs: int
    cap: int = 1
    share: float = 0.3
    grace: float = 1.0
    kept: int = 0  #: nodes for interactive apps only


class Figures(Struct, frozen=True):
    """What became of one case: slowdowns of interactive apps and of batch jobs, minutes to restart, jobs preempted."""

    interactive: tuple[float, ...]
    batch: tuple[float, ...]
    restarts_min: tuple[float, ...]
    preempted: int
    preemptions: int
    jobs: int
    unfinished: int


# --- one run ----------------------------------------------------------------------------------------------------------


def cluster_of(nodes: int) -> Cluster:
    """Return the first so many nodes of the paper's cluster."""
    whole = parse_cluster(CLUSTER)
    return replace(whole, nodes=whole.nodes[:nodes])


MEMORY = Memory(Case, Figures)


def run(case: Case) -> Figures:
    """Return what becomes of `case`; each is run once."""
    if case not in MEMORY.done:
        MEMORY.add(case, _run(case))
        print(f"  {case}", file=sys.stderr)
    return MEMORY.done[case]


def _run(case: Case) -> Figures:
    cluster = cluster_of(case.nodes)
    workload = fitgpp_workload(cluster, seed=case.seed, jobs=case.jobs, interactive=case.share, grace=case.grace)
    fifo = case.policy == FIFO
    policy = FITGPP if fifo else case.policy
    kept: dict[str, Setting] = {"reserved_nodes": case.kept / case.nodes}
    settings = ArbiterSettings(
        policy=policy,
        policies=tables(policy, **kept, **({"p": case.cap} if policy == FITGPP else {})),
        seed=case.seed,
        round_pause_s=MINUTE_S,
        interactive_s=0.0 if fifo else ArbiterSettings().interactive_s,
    )
    simulation = Simulation(workload, cluster, quiet(settings), NONE, crude())
    restarts = _watch(simulation)
    result = simulation.run()
    plans = {app.id: app for app in workload.apps}
    slowdowns: dict[str, list[float]] = {"interactive": [], "batch": []}
    for app in result.apps:
        if app.jct_s is not None:
            plan = plans[app.app]
            slowdowns[plan.kind].append(app.jct_s / plan.jobs[0].duration_s)
    return Figures(
        interactive=tuple(slowdowns["interactive"]),
        batch=tuple(slowdowns["batch"]),
        restarts_min=tuple(seconds / MINUTE_S for seconds in restarts),
        preempted=sum(app.preemptions > 0 for app in result.apps),
        preemptions=sum(app.preemptions for app in result.apps),
        jobs=len(result.apps),
        unfinished=sum(app.state != "finished" for app in result.apps),
    )


def _watch(simulation: Simulation) -> list[float]:
    """Return the list that fills with the seconds from each preemption to the restart."""
    told: dict[AppId, float] = {}
    seconds: list[float] = []
    world = simulation.world
    before = world.watcher

    def watch(actor: Actor, event: object, effects: Sequence[object]) -> bool:
        for effect in effects:
            if type(effect) is Send and type(effect.message) is Preempt:
                told.setdefault(effect.message.app, world.now)
            elif type(effect) is StartWorker and effect.app in told:
                seconds.append(world.now - told.pop(effect.app))
        return before is None or before(actor, event, effects)

    world.watcher = watch
    return seconds


# --- figures over seeds -----------------------------------------------------------------------------------------------


def pooled(cases: Sequence[Case], of: Callable[[Figures], Sequence[float]]) -> list[float]:
    """Return the values of all cases, sorted."""
    return sorted(value for case in cases for value in of(run(case)))


def percentile(values: Sequence[float], p: float) -> float:
    """Return the p-th percentile, the value at place floor(n p / 100)."""
    return values[min(len(values) - 1, int(len(values) * p / 100))] if values else float("nan")


def said(values: Sequence[float], points: Sequence[float]) -> str:
    """Return percentiles side by side."""
    return " / ".join(f"{percentile(values, p):.3g}" for p in points) if values else "-"


def share_preempted(cases: Sequence[Case]) -> float:
    """Return the part of all jobs that were preempted at least once."""
    return sum(run(case).preempted for case in cases) / sum(run(case).jobs for case in cases)


def row_of(name: str, cases: Sequence[Case]) -> tuple[str, ...]:
    """Return a line of figures: of interactive apps, batch jobs, restarts, jobs preempted, unfinished."""
    return (
        name,
        said(pooled(cases, lambda each: each.interactive), (50, 95, 99)),
        said(pooled(cases, lambda each: each.batch), (50, 95, 99)),
        said(pooled(cases, lambda each: each.restarts_min), (50, 75, 95, 99)),
        f"{100 * share_preempted(cases):.2f} %",
        str(sum(run(case).unfinished for case in cases)),
    )


COLUMNS = ("", "TE 50/95/99", "BE 50/95/99", "restart min 50/75/95/99", "preempted", "unfinished")


def policies_part(plan: Plan) -> tuple[list[Claim], list[Table]]:
    """What the paper's tables show; and `fitgpp` with nodes for interactive apps only."""
    cases = {name: [Case(name, seed, plan.nodes, plan.jobs) for seed in plan.seeds] for name in POLICIES}
    rows = []
    for name in POLICIES:
        published = (*PUBLISHED[name], PUBLISHED_RESTART[name], PUBLISHED_PREEMPTED[name])
        rows += [row_of(name, cases[name]), (f"{name}, published", *published, "")]
    claims = []
    for kept in (0, plan.kept):
        title = f"{FITGPP}, {kept} of {plan.nodes} nodes for interactive apps only" if kept else FITGPP
        runs = [replace(case, kept=kept) for case in cases[FITGPP]]
        rows += [row_of(title, runs)] if kept else []
        claims += [*slowdown_claims(cases, title, runs), *preemption_claims(cases, title, runs)]
    return claims, [Table("slowdown, restarts and preempted jobs", COLUMNS, tuple(rows))]


def cap_part(plan: Plan) -> tuple[list[Claim], list[Table]]:
    """How much P matters."""
    caps = {cap: [replace(case, cap=cap) for case in _few(plan)] for cap in plan.caps}
    rows = tuple(row_of(f"P = {cap}", some) for cap, some in caps.items())
    return [cap_claim(caps)], [Table("P", COLUMNS, rows)]


def robustness_part(plan: Plan) -> tuple[list[Claim], list[Table]]:
    """Other parts of interactive apps, longer grace periods, more nodes for interactive apps only."""
    changes = [(f"interactive apps {value:g}", {"share": value}, POLICIES) for value in plan.shares]
    changes += [(f"grace x {value:g}", {"grace": value}, POLICIES) for value in plan.graces]
    changes += [(f"{kept} nodes for interactive apps only", {"kept": kept}, (FITGPP,)) for kept in plan.more_kept]
    rows = tuple(
        row_of(f"{policy}, {what}", [replace(case, policy=policy, **change) for case in _few(plan)])  # type: ignore[arg-type]
        for what, change, policies in changes
        for policy in policies
    )
    return [], [Table("robustness", COLUMNS, rows)] if rows else []


def _few(plan: Plan) -> list[Case]:
    return [Case(FITGPP, seed, plan.nodes, plan.jobs) for seed in plan.few_seeds]


PARTS = {"policies": policies_part, "cap": cap_part, "robustness": robustness_part}


def slowdown_claims(cases: dict[str, list[Case]], title: str, runs: list[Case]) -> list[Claim]:
    """Return what interactive apps gain and batch jobs lose against FIFO."""

    def against(of: Callable[[Figures], Sequence[float]], p: float) -> tuple[float, float, float]:
        ours, fifo = percentile(pooled(runs, of), p), percentile(pooled(cases[FIFO], of), p)
        return 100 * (ours / fifo - 1), ours, fifo

    claims = []
    for name, of, p, paper, most in (
        ("TE slowdown, 95th percentile", lambda each: each.interactive, 95, "-96.6 %", -96.0),
        ("BE slowdown, median", lambda each: each.batch, 50, "+18.0 %", 18.0),
        ("BE slowdown, 95th percentile", lambda each: each.batch, 95, "+23.9 %", 24.0),
    ):
        change, ours, fifo = against(of, p)
        said_ = f"{change:+.1f} % ({ours:.3g} against {fifo:.3g})"
        claims.append(Claim(f"{name}, {title} against fifo", paper, said_, f"<= {most:+g} %", change <= most))
    return claims


def preemption_claims(cases: dict[str, list[Case]], title: str, runs: list[Case]) -> list[Claim]:
    """Return how few are preempted, and how soon they run again."""
    share = share_preempted(runs)
    restart = percentile(pooled(runs, lambda each: each.restarts_min), 50)
    claims = []
    for name in (LRTP, RAND):
        other = share_preempted(cases[name])
        later = percentile(pooled(cases[name], lambda each: each.restarts_min), 50)
        claims += [
            Claim(
                f"jobs preempted, {title} over {name}",
                f"0.63 % of {PUBLISHED_PREEMPTED[name]}",
                f"{100 * share:.2f} % of {100 * other:.2f} %",
                "at most a tenth",
                share <= other / 10 if other > 0 else None,  # nobody had to make room: nothing is shown
            ),
            Claim(
                f"median minutes from preemption to restart, {title} over {name}",
                "2 of 4",
                f"{restart:.3g} of {later:.3g}",
                "at most half",
                restart <= later / 2 if restart == restart and later == later else None,
            ),
        ]
    return claims


def cap_claim(caps: dict[int, list[Case]]) -> Claim:
    """Return how much the slowdowns depend on P: by at most a tenth, as the goal is read here."""
    figures = {
        cap: (
            percentile(pooled(some, lambda each: each.interactive), 95),
            percentile(pooled(some, lambda each: each.batch), 50),
            percentile(pooled(some, lambda each: each.batch), 95),
        )
        for cap, some in caps.items()
    }
    spread = max(max(column) / min(column) for column in zip(*figures.values(), strict=True))
    ours = "; ".join(f"P {cap}: {te:.3g}, {mid:.3g}, {high:.3g}" for cap, (te, mid, high) in figures.items())
    return Claim(
        "insensitive to P: TE p95, BE median, BE p95", "insensitive", ours, "within 10 % of each other", spread <= 1.1
    )


# --- the document -----------------------------------------------------------------------------------------------------


def main() -> None:
    """Run what the command line asks for."""
    parser = keeping(arguments(__doc__, PARTS, quick=f"{QUICK.jobs} jobs on {QUICK.nodes} nodes, two seeds, a minute"))
    parser.add_argument("--seeds", type=int, help="so many workloads")
    options = parser.parse_args()
    if options.keep:
        MEMORY.use(options.keep)
    plan = QUICK if options.quick else FULL
    plan = plan if options.seeds is None else replace(plan, seeds=tuple(range(options.seeds)))
    began = time.process_time()
    found = [PARTS[part](plan) for part in options.only]
    inputs = {"quick": options.quick, "cluster": CLUSTER, **msgspec.to_builtins(plan)}
    show(report_of(SCHEMA, found, inputs, round(time.process_time() - began, 1)), json=options.json)


if __name__ == "__main__":
    main()
