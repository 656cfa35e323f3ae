"""OASiS's evaluation: its slot model by hand, and that a small one runs through every algorithm."""

from __future__ import annotations

import math

import numpy as np
import pytest
from msgspec.structs import replace

from arbiter.core.policies.oasis.prices import Bounds
from arbiter.core.policies.oasis.schedule import Servers
from arbiter.core.policies.oasis.utility import Sigmoid
from benchmarks.papers import oasis as evaluation
from benchmarks.papers.slots import Draw, Hosts, SlotJob, baselines, draw, hosts_of, learnt, oasis, play, request_of

ONE_HOST = Draw(2, slots=10, hosts=1, servers=False)


def job(arrival: int, work: int, fixed: int, *, demand: float = 0.25, target: float = 5.0) -> SlotJob:
    """A job of so many slots of a worker that takes a part of a host, worth 10 until its target."""
    return SlotJob(arrival, work, 1.0, 4, (demand, 0.0, 0.0, 0.0), Sigmoid(10.0, 50.0, target + 0.5), fixed)


def test_fifo_by_hand_the_second_waits_for_the_first() -> None:
    first, second = play([job(0, 6, 3), job(0, 4, 2)], ONE_HOST, baselines()["fifo"])
    assert (first.took, second.took) == (2, 4), "three and two workers do not fit on four places"
    first, second = play([job(0, 6, 2), job(0, 4, 2)], ONE_HOST, baselines()["drf"])
    assert (first.took, second.took) == (3, 2)


def test_workers_get_the_parameter_servers_that_they_need_or_are_not_put() -> None:
    served = replace(job(0, 4, 4), servers=Servers((0.0, 0.5, 0.0, 0.0), 1.0))
    hosts = Hosts(*hosts_of(ONE_HOST))
    assert hosts.put(served, 4) == 2, "a host has room for two parameter servers"
    assert hosts.put(job(0, 4, 4), 4) == 2, "two workers are there already"


def test_a_request_counts_slots_of_a_worker_and_no_chunk_is_begun_twice() -> None:
    """Six chunks of 1.5 slots of a worker each: nine in all."""
    request = request_of(replace(job(0, 6, 2), chunk=1.5))
    assert (request.work, request.counts, request.units) == (9, (1, 2, 3, 4), (1, 2, 3, 4))


def test_a_second_look_moves_who_is_patient_and_nobody_below_what_it_was_promised() -> None:
    bounds = Bounds((math.log(8.0),) * 4, math.log(0.1)), Bounds((0.0,) * 4, 0.0)
    patient = replace(job(0, 8, 4), sigmoid=Sigmoid(20.0, 0.0, 0.0))
    jobs = [patient, job(1, 4, 4, target=1.0)]
    once, _ = oasis(jobs, ONE_HOST, bounds, promise=None)
    assert [each.took for each in oasis(jobs, ONE_HOST, bounds, promise=None)] == [once.took, None]
    assert [each.took for each in oasis(jobs, ONE_HOST, bounds, promise=1.0)] == [3, 1]


def test_drawn_jobs_can_meet_their_targets_and_no_algorithm_does_more_than_there_is() -> None:
    plan = Draw(12, slots=30, hosts=10)
    jobs = draw(plan, 7)
    assert [each.arrival for each in jobs] == sorted(each.arrival for each in jobs)
    assert all(each.fewest <= max(1.0, each.sigmoid.target) for each in jobs)
    best = sum(float(each.sigmoid.at(float(each.fewest))) for each in jobs)
    found = [oasis(jobs, plan, learnt(draw(plan, 8), plan))]
    found += [play(jobs, plan, algorithm) for algorithm in baselines().values()]
    for ended in found:
        assert 0.0 < sum(each.utility for each in ended) <= best + 1e-9
        assert all(end.took is None or end.took >= each.fewest for end, each in zip(ended, jobs, strict=True))


def test_a_claim_is_missed_if_one_seed_misses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    totals = {("oasis", 1): 2.0, ("oasis", 2): 1.0, ("fifo", 1): 1.0, ("fifo", 2): 1.5}
    known = {key: ([], [evaluation.Ended(value, 1)]) for key, value in totals.items()}
    monkeypatch.setattr(evaluation, "NAMES", ("oasis", "fifo"))
    monkeypatch.setattr(evaluation, "run", lambda _case, seed, name, _fixed="": known[name.split(",")[0], seed])
    plan = replace(evaluation.QUICK, loads=(50,), seeds=(1, 2))
    claims, (table,) = evaluation.utility_part(plan)
    assert [claim.met for claim in claims] == [False]
    assert table.rows[0][0] == "50"
    known["fifo", 2] = ([], [evaluation.Ended(0.5, 1)])
    assert [claim.met for claim in evaluation.utility_part(plan)[0]] == [True]


def test_the_speed_of_a_decision_is_measured_on_requests_that_can_be_met() -> None:
    worst_s, urgent_s = evaluation.decision_s(20, 5, 100)
    assert worst_s > 0.0
    assert urgent_s > 0.0
    assert np.isfinite(worst_s)
