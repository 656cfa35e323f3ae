"""Whole runs in which jobs share GPUs: arbiter, app agents and node agents together, worked out by hand."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from arbiter.core.state.model import ArbiterSettings
from launch.cli import app as command_line
from protocol.messages import Sharing
from simulator.cluster import parse_cluster
from simulator.costs import NONE, Costs
from simulator.figures.results import Run, summary
from simulator.profiles import Profiles, built_in, kind_of, measured
from simulator.run import facts_of, simulate, spec_of
from simulator.workload import AppPlan, JobPlan, Workload
from simulator.world import World, quiet
from tests.support.traces import shared


def job(name: str, submit_s: float, duration_s: float, *, gpus: int = 1, model: str = "") -> AppPlan:
    return AppPlan(name, "team", submit_s, gpus, gpus, (JobPlan(duration_s, int(duration_s) * 10),), model)


def run(
    apps: list[AppPlan],
    sharing: Sharing,
    *,
    policy: str = "gandiva",
    cluster: str = "1x1",
    costs: Costs = NONE,
    profiles: Profiles | None = None,
    quantum_s: float = 10.0,
) -> Run:
    settings = ArbiterSettings(sharing=sharing, quantum_s=quantum_s, round_pause_s=0.0)
    return simulate(
        Workload("test", tuple(apps)),
        parse_cluster(cluster),
        policy=policy,
        settings=settings,
        costs=costs,
        profiles=profiles or built_in(),
    )


@pytest.mark.parametrize("policy", ["gandiva", "fifo"])
def test_who_comes_second_sees_something_of_its_job_long_before_the_first_has_ended(policy: str) -> None:
    apps = [job("long", 0.0, 1000.0), job("short", 100.0, 50.0)]
    alone, turns = (run(apps, sharing, policy=policy) for sharing in ("exclusive", "timeslice"))
    firsts = [{row.app: row.first_percent_s for row in result.apps} for result in (alone, turns)]
    assert firsts[0] == {"long": 10.0, "short": 1000.5}
    assert (firsts[1]["short"] or 0.0) < 115.0
    assert [row.state for row in turns.apps] == ["finished", "finished"]
    assert max(row.finish_s or 0.0 for row in turns.apps) == pytest.approx(1050.0)
    assert summary(turns)["suspensions"] > 4
    assert summary(turns)["avg_first_percent_s"] == pytest.approx((10.0 + (firsts[1]["short"] or 0.0) - 100.0) / 2)


def test_a_cluster_that_packs_does_more_than_it_has_gpus_and_says_so() -> None:
    # Of the shipped table, a3c keeps a GPU busy for 30 % of its time, lm for 55 %: together both run at full speed.
    apps = [job("a", 0.0, 600.0, model="a3c"), job("b", 0.0, 600.0, model="lm")]
    turns, pairs = (run(apps, sharing) for sharing in ("timeslice", "pack"))
    assert summary(turns)["utilisation"] == pytest.approx(1.0, abs=0.001)
    figures = summary(pairs)
    assert figures["utilisation"] > 1.5
    assert figures["makespan_s"] < 800.0
    assert figures["gpu_seconds_useful"] == pytest.approx(1200.0)
    assert figures["packed_s"] > 900.0
    assert summary(turns)["packed_s"] == 0.0


def test_two_gangs_of_the_same_gpus_are_packed_and_run_at_the_speed_of_their_slowest_gpu() -> None:
    apps = [job("a", 0.0, 600.0, gpus=2, model="a3c"), job("b", 0.0, 600.0, gpus=2, model="lm")]
    figures = summary(run(apps, "pack", cluster="1x2"))
    assert figures["makespan_s"] < 800.0
    assert figures["packed_s"] > 900.0


def test_a_gang_is_packed_with_a_job_of_one_of_its_gpus_if_that_costs_neither_more_than_turns() -> None:
    gang = job("a", 0.0, 600.0, gpus=2, model="a3c")
    # Guests under fifo: gandiva shares the GPUs of a server only among jobs of one size.
    light = summary(run([gang, job("b", 0.0, 600.0, model="lm")], "pack", policy="fifo", cluster="1x2"))
    assert light["packed_s"] > 900.0
    assert light["makespan_s"] < 800.0
    assert (
        summary(run([gang, job("b", 0.0, 600.0, model="lm")], "timeslice", policy="fifo", cluster="1x2"))["packed_s"]
        == 0.0
    )


def test_a_pair_that_loses_by_it_is_parted_and_costs_little() -> None:
    # Gavel measured two ResNet-50 of 64 pictures at 0.4981 of their speed each: no more than in turns.
    apps = [replace(job(name, 0.0, 600.0, model="ResNet-50"), batch_size=64) for name in "ab"]
    result = run(apps, "pack", profiles=measured(shared("traces")))
    assert 0.0 < summary(result)["packed_s"] < 100.0
    assert summary(result)["makespan_s"] == pytest.approx(1200.0, rel=0.02)


def test_without_sharing_nothing_of_it_happens() -> None:
    result = run([job("a", 0.0, 60.0), job("b", 0.0, 60.0)], "exclusive")
    figures = summary(result)
    assert (figures["suspensions"], figures["packed_s"], figures["makespan_s"]) == (0, 0.0, 120.0)


def test_no_parked_job_starves_beside_a_free_seat_of_its_gpu() -> None:
    """Its seat was dealt to a job without end, time and again; found by experiment."""
    work = [(5.4, 44.8), (7.9, 26.4), (9.7, 1e5), (10.0, 23.9), (14.4, 35.6), (14.7, 37.2), (20.8, 1e5)]
    apps = [replace(job(f"j{at}", at, length), tenant=f"t{number}") for number, (at, length) in enumerate(work)]
    settings = ArbiterSettings(
        policy="themis",
        sharing="timeslice",
        seats=2,
        lease_s=12.0,
        renewal_lead_s=3.0,
        quantum_s=5.0,
        round_pause_s=0.5,
        probe_s=1.0,
        bid_s=1.0,
        seed=18,
    )
    world = World(parse_cluster("1x2"), quiet(settings), NONE, talks=True)
    for app in apps:
        spec = spec_of(app)
        facts = [replace(each, can_checkpoint=False) for each in facts_of(app, spec, lambda *_: 1.0)]
        world.call_at(app.submit_s - 5.4, lambda app=app, spec=spec, facts=facts: world.submit(app.id, spec, facts))  # type: ignore[misc]
    world.run(1000.0)
    standing = {app.name: next(iter(app.actor.core.state.apps.values())).over for app in world.apps.values()}
    assert {name for name, over in standing.items() if over is None} == {"j9.7", "j20.8"}


# --- what is known of pairs -------------------------------------------------------------------------------------------


def test_measured_kinds_come_before_models_and_say_how_busy_and_how_large_they_are() -> None:
    known = measured(shared("traces"))
    assert kind_of("ResNet-50", 64) == "resnet50@64"
    assert kind_of("ResNet-50", 0) == "resnet50"
    assert known.interference("resnet50@128", "lm@5") == (0.0, 0.0)
    assert known.interference("resnet50@64", "resnet50@64") == (0.4981, 0.4981)
    assert known.interference("resnet50@7", "lm@5") == known.interference("ResNet-50", "LM")
    assert known.utilisation("lm@5") == pytest.approx(1 / (2 * 0.6220))
    assert known.utilisation("resnet50@64") == 1.0
    assert known.utilisation("a model nobody knows") is None
    assert built_in().utilisation("lm@5") == 0.55


def test_one_figure_of_memory_for_each_kind_says_who_fits_beside_whom() -> None:
    known = measured(shared("traces"))
    kinds = sorted(known.memory)
    assert len(kinds) == 26
    wrong = [
        (a, b)
        for number, a in enumerate(kinds)
        for b in kinds[number:]
        if (known.interference(a, b) == (0.0, 0.0)) != (known.memory_share(a) + known.memory_share(b) > 0.95)
    ]
    assert wrong == [("resnet50@128", "transformer@32")]
    assert known.memory_share("never measured") == 0.42


# --- the command line -------------------------------------------------------------------------------------------------


def command(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(command_line, [*words])
    return result.exit_code, result.stdout, result.stderr


def test_flags_say_how_gpus_are_shared_and_a_wrong_one_is_refused_with_the_choices() -> None:
    trace = "tests/data/simulation/neutral.csv"
    words = ["simulate", trace, "--cluster", "2x8", "--policy", "gandiva", "--sharing", "pack", "--seats", "3"]
    code, out, _ = command(*words, "--quantum", "2m", "--json")
    assert code == 0
    settings = json.loads(out)["inputs"]["settings"]
    assert (settings["sharing"], settings["seats"], settings["quantum_s"]) == ("pack", 3, 120.0)
    code, _, wrong = command("simulate", trace, "--cluster", "2x8", "--sharing", "often")
    assert code == 2
    assert "sharing is 'often'; choose one of exclusive, timeslice, pack" in wrong
    code, _, wrong = command("simulate", trace, "--cluster", "2x8", "--seats", "3", "--set", "seats=4")
    assert code == 2
    assert "seats is set twice" in wrong


def test_a_sweep_takes_several_ways_to_share() -> None:
    words = ["sweep", "tests/data/simulation/neutral.csv", "--cluster", "2x8", "--policies", "fifo", "--jobs", "1"]
    code, out, _ = command(*words, "--sharing", "exclusive,pack", "--quantum", "30s,1m", "--json")
    assert code == 0
    told = [row["settings"] for row in json.loads(out)["rows"]]
    assert {(each["sharing"], each["quantum_s"]) for each in told} == {
        (sharing, quantum) for sharing in ("exclusive", "pack") for quantum in ("30.0", "60.0")
    }
