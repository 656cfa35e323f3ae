"""Fault worlds in which nothing goes wrong but that nodes are drained: what can save loses no mini-batch by it."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from simulator.faults.runs import _Run
from simulator.faults.scenario import NetworkOptions, Options, _drain, draw

DRAINS = 6


def only_drained(seed: int, policy: str) -> Options:
    """Return the world of a seed with a good network, no trait of a node, and no faults but drains."""
    options = draw(seed, policy=policy)
    dice = Random(f"only drains {seed}")
    drains = sorted((replace(_drain(dice, options), force=False) for _ in range(DRAINS)), key=lambda fault: fault.at)
    network = NetworkOptions(loss=0.0, repeat=0.0, delay_s=0.05, ordered=True, kept=True)
    return replace(options, faults=tuple(drains), network=network, clocks=(), traits=())


#: Orders, shares of tenants, turns on one GPU, bookings. `make check` drains under one of them.
POLICIES = [
    pytest.param("gandiva"),
    *(pytest.param(policy, marks=pytest.mark.full) for policy in ("las", "fifo", "drf", "oasis")),
]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_can_save_loses_no_mini_batch_by_a_drain(policy: str) -> None:
    moved = 0
    for seed in range(6):
        options = only_drained(seed, policy)
        run = _Run(options, None)
        assert run.verdict().wrong == "", seed
        for wished, app in zip(options.apps, run.world.apps.values(), strict=True):
            record = app.actor.core.state.records[app.id]
            moved += record.migrations
            if wished.can_checkpoint:
                assert record.steps_lost == 0, (seed, app.id)
    assert moved, "no job was moved"
