"""Every planted fault is noticed by a world that is known for it, and without it that world passes.

So the check is known to be able to fail. Should a change of the cores move what happens in that world, others are run,
up to the first that fails.
"""

from __future__ import annotations

import pytest

from simulator.faults.runs import run_world
from tests.simulation.mutants import MUTANTS

#: A world takes half a second.
SEEDS = 200
#: The policy and the world in which each was noticed when it was planted.
FOUND_AT: dict[str, tuple[str, int]] = {
    "a_bid_for_an_earlier_round_counts": ("themis", 386),
    "a_crash_counts_as_a_finish": ("themis", 15),
    "a_drained_node_gets_new_leases": ("fifo", 4),
    "a_gpu_counts_as_empty_while_its_worker_leaves": ("themis", 3),
    "a_gpu_that_is_being_left_counts_for_nobody": ("themis", 3),
    "a_gpu_is_granted_while_it_drains": ("themis", 3),
    "a_lease_has_a_number_from_outside_the_state": ("themis", 0),
    "a_node_does_not_ask_workers_to_leave": ("themis", 40),
    "a_node_obeys_older_plans": ("themis", 1),
    "a_report_of_an_older_epoch_proves_a_release": ("themis", 3),
    "a_report_on_an_older_plan_proves_a_release": ("themis", 3),
    "a_restarted_arbiter_keeps_its_epoch": ("themis", 1),
    "a_silent_app_keeps_what_it_does_not_use": ("fifo", 54),
    "a_snapshot_leaves_out_a_counter": ("themis", 9),
    "a_standby_is_one_event_behind": ("fifo", 21),
    "a_standby_takes_an_event_in_twice": ("fifo", 21),
    "a_turn_goes_to_the_same_task_again": ("themis", 31),
    "a_standby_keeps_what_the_journal_has_lost": ("fifo", 27),
    "an_app_says_its_wish_only_once": ("themis", 0),
    "an_array_goes_beyond_its_bound": ("fifo", 11),
    "an_attempt_keeps_its_number": ("themis", 42),
    "a_former_leader_performs_what_is_refused": ("fifo", 138),
    "effects_are_performed_before_the_commit": ("fifo", 20),
    "every_gpu_is_of_the_kind_that_is_asked_for": ("fifo", 9),
    "host_memory_for_parked_workers_has_no_end": ("themis", 6),
    "what_an_app_has_lost_is_not_its_tenants": ("themis", 3),
    "leases_never_end": ("themis", 3),
    "parked_jobs_wish_for_the_same_gpus": ("themis", 46),
    "nodes_obey_an_arbiter_that_has_forgotten_plans": ("fifo", 23),
    "one_part_of_a_large_site_is_restated_at_every_beat": ("fifo", 53),
    "plans_and_holdings_are_said_only_once": ("themis", 33),
    "seats_of_one_gpu_count_as_gpus": ("themis", 3),
    "the_answer_to_an_older_sale_counts": ("oasis", 0),
    "the_end_of_an_app_is_never_acknowledged": ("themis", 0),
    "the_gpus_of_a_silent_node_are_free": ("themis", 18),
    "the_store_takes_what_a_former_leader_commits": ("fifo", 138),
    "the_journal_is_written_after_handling": ("themis", 0),
    "the_next_attempt_does_not_wait_for_the_last": ("themis", 35),
    "turns_never_end": ("fifo", 7),
    "two_are_packed_whose_memory_exceeds_the_gpu": ("fifo", 10),
    "what_a_parked_task_keeps_is_never_found_out": ("fifo", 3),
    "what_an_app_gives_back_is_not_taken": ("themis", 3),
    "what_is_found_running_is_not_adopted": ("fifo", 152),
    "what_nodes_know_of_later_epochs_is_not_heard": ("fifo", 20),
    "a_start_does_not_wait_until_the_gpu_is_free": ("themis", 3),
    "a_task_lost_by_the_driver_counts_as_refused": ("themis", 32),
    "a_gpu_of_a_job_on_several_nodes_has_guests": ("fifo", 3),
    "guests_stay_however_far_their_own_gpus_lie": ("maxmin-ftf", 8117),
    "a_job_of_a_fatal_fault_is_a_client_of_mps_again": ("fifo", 3),
    "the_driver_suspends_clients_of_mps": ("fifo", 3),
}
#: Planted by `make check`, in a world that ends soon; `make full` plants all.
QUICK = "an_attempt_keeps_its_number"
#: What a planted fault says of itself if it no longer fits into the code it is planted in.
MISFITS = ("TypeError", "AttributeError", "NameError")


def test_there_are_enough_of_them_and_each_has_its_world() -> None:
    assert len(MUTANTS) >= 12
    assert set(FOUND_AT) == set(MUTANTS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == QUICK else pytest.mark.full) for name in sorted(MUTANTS)]
)
def test_a_planted_fault_is_noticed(name: str) -> None:
    policy, first = FOUND_AT[name]
    for seed in [first, *(seed for seed in range(SEEDS) if seed != first)]:
        verdict = run_world(seed, policy=policy, mutant=MUTANTS[name])
        assert not verdict.wrong.startswith(MISFITS), f"{name} does not fit the code any more: {verdict.wrong}"
        if verdict.wrong:
            print(f"{name}: noticed in world {seed} under {policy}: {verdict.wrong}")
            assert run_world(seed, policy=policy).wrong == "", f"world {seed} fails without {name}, too"
            return
    pytest.fail(f"none of {SEEDS} worlds notices {name}")
