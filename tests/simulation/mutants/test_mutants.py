"""Every planted fault is noticed by some world among the first `SEEDS`, and without it those worlds pass.

So the check is known to be able to fail. A mutant's worlds are run up to the first that fails.
"""

from __future__ import annotations

import pytest

from simulator.worlds import run_world
from tests.simulation.mutants import MUTANTS

SEEDS = 120
#: Where each was found when it was planted: tried first, since a world takes a tenth of a second.
FOUND_AT: dict[str, int] = {
    "a_bid_for_an_earlier_round_counts": 71,
    "a_crash_counts_as_a_finish": 20,
    "a_gpu_counts_as_empty_while_its_worker_leaves": 6,
    "a_gpu_is_granted_while_it_drains": 3,
    "a_lease_has_a_number_from_outside_the_state": 6,
    "a_node_does_not_ask_workers_to_leave": 40,
    "a_node_obeys_older_plans": 11,
    "a_report_of_an_older_epoch_proves_a_release": 5,
    "a_report_on_an_older_plan_proves_a_release": 10,
    "a_restarted_arbiter_keeps_its_epoch": 1,
    "a_silent_app_keeps_what_it_does_not_use": 66,
    "a_snapshot_leaves_out_a_counter": 1,
    "an_attempt_keeps_its_number": 6,
    "leases_never_end": 15,
    "parked_jobs_wish_for_the_same_gpus": 46,
    "plans_and_holdings_are_said_only_once": 5,
    "the_gpus_of_a_silent_node_are_free": 1,
    "the_next_attempt_does_not_wait_for_the_last": 40,
    "what_an_app_gives_back_is_not_taken": 6,
}


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 12


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_a_planted_fault_is_noticed(name: str) -> None:
    first = FOUND_AT.get(name, 0)
    for seed in [first, *(seed for seed in range(SEEDS) if seed != first)]:
        verdict = run_world(seed, mutant=MUTANTS[name])
        if verdict.wrong:
            print(f"{name}: noticed in world {seed} of {SEEDS}: {verdict.wrong}")
            assert run_world(seed).wrong == "", f"world {seed} fails without {name}, too"
            return
    pytest.fail(f"none of {SEEDS} worlds notices {name}")
