"""Former leaders in fault worlds: each lives on beside the next one, is refused by the store, and performs nothing."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from arbiter.core.arbiter import Arbiter
from arbiter.core.arbiter import Event as ArbiterEvent
from arbiter.core.state.model import ArbiterSettings
from protocol.core import Tick
from protocol.journal import Deposed
from simulator.cluster import parse_cluster
from simulator.costs import NONE
from simulator.faults.checks import Checks, Violation
from simulator.faults.journals import Record, Writer
from simulator.faults.runs import WorldVerdict, _Run
from simulator.faults.scenario import Fault, Lives, NetworkOptions, draw
from simulator.world import World

#: A small world, in which two apps are at work from its 10th to its 40th second.
SEED = 163
QUIET = NetworkOptions(loss=0.0, repeat=0.0, delay_s=0.05, ordered=True, kept=True)


def run(*faults: Fault) -> tuple[WorldVerdict, list[str]]:
    """Return the verdict on the small world with these faults and no others, and its trace."""
    options = draw(SEED)
    apps = tuple(replace(app, submit_s=2.0 * number) for number, app in enumerate(options.apps))
    options = replace(
        options, apps=apps, network=QUIET, faults=faults, clocks=(), standby=True, site="s-1", calm_at=60.0
    )
    lines: list[str] = []
    return _Run(options, lines.append).verdict(), lines


def takeover(lives: Lives, at: float = 15.0, *, midway: bool = False) -> Fault:
    return Fault(at, "depose", for_s=1.0, lives=lives, lingers_s=6.0, midway=midway)


def of_former(lines: list[str]) -> list[tuple[float, str]]:
    """Return what was told of former leaders, with its times."""
    found = [re.fullmatch(r" *([\d.]+) former arbiter: (.*)", line) for line in lines]
    return [(float(each[1]), each[2]) for each in found if each is not None]


# --- the store ------------------------------------------------------------------------------------------------------


def test_the_store_refuses_all_that_a_deposed_arbiter_writes() -> None:
    world = World(parse_cluster("1x1"), ArbiterSettings(), NONE)
    record = Record(world.arbiter.core, ArbiterEvent, every=100)
    leader = Writer(record, world, world.arbiter)
    leader.append((1.0, Tick()))
    assert record.entries == [], "nothing is written before the commit"
    leader.commit()
    former = world.take_over(Arbiter())
    deposed = Writer(record, world, former)
    deposed.append((2.0, Tick()))
    deposed.commit()  # no epoch has been taken since
    world.lead()
    for _ in range(2):
        deposed.append((3.0, Tick()))
        with pytest.raises(Deposed, match="another arbiter leads in epoch 2, and ours was 1"):
            deposed.commit()
    with pytest.raises(Deposed, match="leads in epoch 2"):
        world.take_epoch(former, 7)
    assert world.epoch == 2
    leader.append((3.0, Tick()))
    leader.commit()
    assert [now for now, _ in record.entries] == [1.0, 2.0, 3.0]


# --- each way to live on --------------------------------------------------------------------------------------------


def test_a_leader_that_was_stopped_hears_what_waits_and_is_refused() -> None:
    verdict, lines = run(takeover("stopped"))
    assert (verdict.wrong, verdict.deposed) == ("", 1)
    *handled, (at, last) = of_former(lines)
    assert at == 22.0
    assert last == "stands by: the imaginary store: another arbiter leads in epoch 2, and ours was 1"
    assert {at for at, _ in handled} == {22.0}
    assert any(" said " in what for _, what in handled)


def test_a_leader_that_was_stopped_after_its_commit_performs_that_late_and_no_node_obeys_it() -> None:
    verdict, lines = run(takeover("stopped", midway=True))
    assert (verdict.wrong, verdict.deposed) == ("", 1)
    (at,) = (at for at, what in of_former(lines) if what.startswith("stands by"))
    heard = [
        line for line in lines if float(line[:9]) > at and re.search(r"arbiter said (plan|holdings)\(.*\b1\.", line)
    ]
    assert heard, "what it had committed before it was stopped should arrive"
    assert not any("RememberFence" in line for line in heard)


def test_a_leader_that_is_cut_from_the_broker_hears_nothing_and_its_next_commit_is_refused() -> None:
    verdict, lines = run(takeover("cut"))
    assert (verdict.wrong, verdict.deposed) == ("", 1)
    (_, handled), (at, last) = of_former(lines)
    assert handled == "Tick()"
    assert 16.0 <= at < 22.0
    assert last.startswith("stands by")


def test_a_slow_leader_hears_what_the_next_one_hears_until_its_commit_is_refused() -> None:
    verdict, lines = run(takeover("slow"))
    assert (verdict.wrong, verdict.deposed) == ("", 1)
    *handled, (at, _) = of_former(lines)
    assert at == 22.0
    spoke = [what for at, what in handled if " said " in what and at < 22.0]
    assert len(spoke) > 3
    assert any(what == "Tick()" for _, what in handled)


def test_a_leader_that_knows_that_it_has_lost_its_token_leads_again_with_the_core_that_it_has() -> None:
    verdict, lines = run(takeover("token"), Fault(25.0, "crash"))
    assert (verdict.wrong, verdict.deposed) == ("", 0)
    assert of_former(lines) == []
    assert any("Connected(epoch=3)" in line for line in lines)


# --- and then -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "then",
    [
        Fault(18.0, "crash", for_s=2.0),  # no standby is left: the next leader starts again
        Fault(18.0, "crash", for_s=2.0, midway=True),
        Fault(18.0, "stale", lost_s=5.0),  # the store itself has been away
        takeover("cut", at=18.0),  # there is no standby to take over
        takeover("cut", at=30.0),  # the former leader is the standby by then
        Fault(15.5, "crash", for_s=0.0),  # the leader ends before the standby leads
        Fault(15.5, "freeze", for_s=0.2),
    ],
    ids=lambda fault: f"{fault.kind} at {fault.at}",
)
def test_what_strikes_a_site_with_a_former_leader_breaks_no_promise(then: Fault) -> None:
    verdict, _ = run(takeover("stopped", midway=True), then)
    assert verdict.wrong == ""
    assert verdict.outcomes == {"finished": 2}


def test_a_former_leader_that_lives_beyond_the_faults_learns_of_it_as_they_end() -> None:
    verdict, lines = run(replace(takeover("slow", at=50.0), lingers_s=500.0))
    assert (verdict.wrong, verdict.deposed) == ("", 1)
    assert of_former(lines)[-1][0] == 60.0


# --- the checks -----------------------------------------------------------------------------------------------------


def test_former_leaders_are_noticed_that_write_or_perform_or_lead_in_the_epoch_of_another() -> None:
    world, checks = World(parse_cluster("1x1"), ArbiterSettings(), NONE), Checks()
    world.run(until=1.0)
    checks.judge_commit(world, world.arbiter)
    checks.judge_leader(world, world.arbiter)
    former = world.take_over(Arbiter())
    with pytest.raises(Violation, match="events of a former leader stand in the journal"):
        checks.judge_commit(world, former)
    with pytest.raises(Violation, match="a former leader performs"):
        checks.judge_leader(world, former)
    world.arbiter.core.state.epoch = 1
    with pytest.raises(Violation, match="two arbiters have led in epoch 1"):
        checks.judge_leader(world, world.arbiter)
    world.arbiter.core.state.epoch = 2
    checks.judge_leader(world, world.arbiter)


# --- the draw -------------------------------------------------------------------------------------------------------


def test_leaders_live_on_in_half_of_the_worlds_with_a_standby_and_in_every_way() -> None:
    worlds = [options for options in map(draw, range(200)) if options.standby]
    deposed = [[fault for fault in options.faults if fault.kind == "depose"] for options in worlds]
    assert len(worlds) / 3 < sum(map(bool, deposed)) < len(worlds) / 1.5
    drawn = [fault for faults in deposed for fault in faults]
    assert {fault.lives for fault in drawn} == {"stopped", "cut", "slow", "token"}
    assert any(fault.lives == "stopped" and fault.midway for fault in drawn)
