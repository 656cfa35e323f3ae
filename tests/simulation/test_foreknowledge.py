"""Experiments as publications make them: a part of a cluster, shorter acts, apps that know their work."""

from __future__ import annotations

from typing import Any

import pytest

from app_agent.core import estimates
from app_agent.core.agent import AppAgent
from app_agent.core.host import AppHost
from app_agent.core.spread import UNMEASURED
from protocol.messages import OwnerId
from simulator import experiment
from simulator.cluster import ClusterError, parse_cluster
from simulator.costs import DEFAULT, CostsError, parse_costs
from simulator.experiment import Experiment
from simulator.foreknowledge import host_of
from simulator.run import budget_of, facts_of, spec_of
from simulator.workload.plans import AppPlan, JobPlan


def test_a_part_of_a_cluster_has_as_much_of_each_kind_and_the_arrivals_of_the_whole() -> None:
    whole, quarter = parse_cluster("themis-64"), parse_cluster("themis-64/4")
    assert (quarter.gpus, quarter.whole_gpus, quarter.name) == (16, 64, "themis-64/4")
    assert sorted(node.gpus for node in quarter.nodes) == [2, 2, 4, 4, 4]
    assert set(quarter.nodes) <= set(whole.nodes)
    trace = "themis-nsdi:1?apps=4&scale=0.1"
    assert experiment.workload_of(trace, quarter, seed=3) == experiment.workload_of(trace, whole, seed=3)
    assert parse_cluster("8x2/2").gpus == 8


@pytest.mark.parametrize("text", ["themis-64/8", "themis-64/0", "3x4/2"])
def test_a_part_that_divides_no_kind_of_node_is_refused_with_the_mend(text: str) -> None:
    with pytest.raises(ClusterError, match="equal parts; give a number that divides the nodes of each kind"):
        parse_cluster(text)


def test_a_fifth_of_the_costs_is_a_fifth_of_every_time_and_the_same_switches() -> None:
    fifth = parse_costs("default/5")
    assert (fifth.start_s, fifth.checkpoint_s, fifth.message_s) == (4.0, 1.5, 0.001)
    assert (fifth.boundaries, fifth.placement, fifth.saves) == (DEFAULT.boundaries, DEFAULT.placement, DEFAULT.saves)
    with pytest.raises(CostsError, match="or default/5 for a fifth"):
        parse_costs("default/0")


def app(search: Any, **fields: Any) -> AppPlan:
    """Four trials of 70 mini-batches that take 1, 2, 3 and 5 s each on one GPU; the slowest two have the best loss."""
    jobs = tuple(JobPlan(70.0 * each, 70, (6.0 - each,)) for each in (1, 2, 3, 5))
    return AppPlan("a", "ann", 0.0, 1, fields.pop("gpus_max", 1), jobs, search=search, **fields)


def drafted(plan: AppPlan, *, exact: bool) -> AppAgent:
    """Return the agent of the app before it has done anything."""
    facts = facts_of(plan, spec_of(plan), lambda gpus, level: 1.0 if level in ("slot", "machine") else 1.5)
    make = host_of(plan, facts) if exact else AppHost
    agent = make(OwnerId("ann"), tenant="ann", beat_s=2.0, spread=UNMEASURED).draft(spec_of(plan), "", 0.0)
    assert isinstance(agent, AppAgent)
    return agent


def test_an_app_that_knows_its_trials_knows_what_each_has_left_and_all_of_its_work() -> None:
    known = drafted(app("all"), exact=True).app
    assert estimates.works_s(known) == ((70.0, 140.0, 210.0, 350.0),)
    assert estimates.left_s(known) == (pytest.approx(350.0), pytest.approx(770.0))
    assert estimates.budget_gpu_s(known) == pytest.approx(budget_of(app("all"))) == pytest.approx(770.0)
    assert estimates.works_s(drafted(app("all"), exact=False).app) == ((210.0,) * 4,), "the guess of its owner"


def test_a_search_that_knows_its_survivors_names_their_times_in_phases_to_come() -> None:
    plan = app("halving", gpus_max=4, phase_growth=2)
    known = drafted(plan, exact=True).app
    # Ten steps of all four, twenty of trials 2 and 3, forty of trial 3.
    assert estimates.works_s(known) == ((10.0, 20.0, 30.0, 50.0), (60.0, 100.0), (200.0,))
    assert estimates.left_s(known) == (pytest.approx(50 / 1 + 100 / 2 + 200 / 4), pytest.approx(110 + 160 + 200))
    assert known.facts.slowdown["rack"] == 1.5


def test_a_run_with_exact_knowledge_tells_so_and_ends_as_well() -> None:
    given = Experiment("themis-nsdi:2?apps=2&scale=0.05", "1x4", "srtf", "default/5", seed=3, knowledge="exact")
    run = experiment.execute(given)
    assert run.given["knowledge"] == "exact"
    assert {row.state for row in run.apps} == {"finished"}
