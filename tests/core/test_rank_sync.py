"""The training processes of one task stop at the same step, or none of them does."""

from __future__ import annotations

from itertools import count

import pytest
from msgspec.structs import replace

from node_agent.core import rank_sync
from node_agent.core.rank_sync import AHEAD_STEPS, AHEAD_STEPS_BLIND, Ranks
from protocol.worker import Hello, Late, Order, Progress, Ready, Refused, Resumed, Saved, Suspended

WISH = Order("suspend", 7, 1)


def hello(rank: int, *, step: int = 5, state: str = "running", world: int = 2) -> Hello:
    return Hello(1, "t", 100 + rank, state, step, -1, 100, True, True, rank=rank, world=world)  # type: ignore[arg-type]


def progress(step: int, *, step_s: float = 0.0) -> Progress:
    return Progress(step, step_s, -1, 100, True, True, 3, state_bytes=10)


class Table:
    """Two ranks of a task, both connected, and the numbers of its orders."""

    def __init__(self, world: int = 2) -> None:
        self.seqs = count(2)
        self.ranks = Ranks()
        for rank in range(world):
            self.hear(rank, hello(rank, world=world))

    def ask(self, wish: Order = WISH) -> list[Order]:
        self.ranks, orders = rank_sync.ask(self.ranks, wish, lambda: next(self.seqs))
        return orders

    def hear(self, rank: int, line: object) -> tuple[list[Order], object]:
        self.ranks, orders, said = rank_sync.heard(self.ranks, rank, line, lambda: next(self.seqs))  # type: ignore[arg-type]
        return orders, said


def test_a_single_process_is_told_directly() -> None:
    table = Table(world=1)
    assert table.ask() == [WISH]
    assert table.hear(0, Suspended(1, 5, 9, 0, 0.1)) == ([], Suspended(1, 5, 9, 0, 0.1))


def test_no_rank_is_told_to_park_before_all_have_promised_the_same_step() -> None:
    table = Table()
    (hold,) = table.ask()
    assert (hold.do, hold.at_step) == ("hold", 5 + AHEAD_STEPS_BLIND)
    assert table.hear(0, Ready(hold.seq, 6)) == ([], None)
    orders, said = table.hear(1, Ready(hold.seq, 5))
    assert said is None
    assert [(order.do, order.at_step) for order in orders] == [("suspend", hold.at_step)]
    assert orders[0].seq > hold.seq > WISH.seq


def test_one_rank_that_is_late_moves_the_step_for_all_before_any_parks() -> None:
    table = Table()
    (hold,) = table.ask()
    table.hear(0, Ready(hold.seq, 6))
    (later,), said = table.hear(1, Late(hold.seq, hold.at_step + 3))
    assert said is None
    assert later.do == "hold"
    assert later.at_step > hold.at_step + 3
    assert table.hear(0, Ready(hold.seq, 6)) == ([], None), "a promise for the old step counts no more"
    table.hear(0, Ready(later.seq, 7))
    orders, _ = table.hear(1, Ready(later.seq, hold.at_step + 4))
    assert [(order.do, order.at_step) for order in orders] == [("suspend", later.at_step)]


def test_the_step_is_as_far_ahead_as_news_may_be_old() -> None:
    table = Table()
    table.hear(0, progress(10, step_s=0.1))
    table.hear(1, progress(11, step_s=0.1))
    (hold,) = table.ask()
    assert hold.at_step == 11 + AHEAD_STEPS + 5


def suspend(table: Table) -> Order:
    (hold,) = table.ask()
    table.hear(0, Ready(hold.seq, 6))
    (order,), _ = table.hear(1, Ready(hold.seq, 6))
    return order


def test_the_task_is_suspended_when_all_its_processes_are_and_their_bytes_add_up() -> None:
    table = Table()
    order = suspend(table)
    assert table.hear(0, Suspended(order.seq, 25, 100, 1, 0.1)) == ([], None)
    assert table.hear(1, Suspended(order.seq, 25, 50, 2, 0.3)) == ([], Suspended(WISH.seq, 25, 150, 3, 0.3))
    assert table.ranks.phase is None


def test_when_one_cannot_park_the_task_refuses_and_those_that_have_are_known_to_stand() -> None:
    table = Table()
    order = suspend(table)
    table.hear(0, Suspended(order.seq, 25, 100, 1, 0.1))
    assert not table.ranks.halted, "an order is still to be answered"
    assert table.hear(1, Refused(order.seq, "no memory")) == ([], Refused(WISH.seq, "no memory"))
    assert table.ranks.halted
    assert table.hear(0, Suspended(order.seq, 25, 100, 1, 0.1)) == ([], None), "an answer to an order that is over"
    (resume,) = table.ask(Order("resume", 7, 30))
    table.hear(1, Resumed(resume.seq, 25, 0.0))
    table.hear(0, Resumed(resume.seq, 25, 0.1))
    assert not table.ranks.halted


def test_when_one_cannot_save_those_that_stand_go_on() -> None:
    table = Table()
    (hold,) = table.ask(Order("leave", 7, 1))
    table.hear(0, Ready(hold.seq, 6))
    (leave,), _ = table.hear(1, Ready(hold.seq, 6))
    (resume,), said = table.hear(1, Refused(leave.seq, "the disk is full"))
    assert (resume.do, resume.gen, said) == ("resume", 7, Refused(1, "the disk is full"))


def test_an_order_that_needs_no_common_step_goes_to_all_and_is_done_when_all_answer() -> None:
    table = Table()
    resume = Order("resume", 7, 30)
    assert table.ask(resume) == [resume]
    assert table.hear(1, Resumed(30, 25, 0.1)) == ([], None)
    assert table.hear(0, Resumed(30, 25, 0.2)) == ([], Resumed(30, 25, 0.2))


def test_progress_is_that_of_the_last_and_said_once_all_have_spoken() -> None:
    table = Table()
    assert table.hear(0, progress(12)) == ([], None)
    _, said = table.hear(1, progress(10))
    assert said == replace(progress(10), state_bytes=20)


def test_what_all_would_park_is_the_sum_of_what_their_hellos_say() -> None:
    table = Table()
    table.hear(0, replace(hello(0), state_bytes=10))
    for of_other, of_both in ((20, 30), (0, 0)):
        _, said = table.hear(1, replace(hello(1), state_bytes=of_other))
        assert isinstance(said, Hello)
        assert said.state_bytes == of_both, "not known before all know it"


def test_after_a_reconnect_the_order_of_the_present_phase_is_said_again() -> None:
    table = Table()
    (hold,) = table.ask()
    table.ranks, orders = rank_sync.repeated_orders(table.ranks, WISH, lambda: next(table.seqs))
    assert orders == [hold]
    table.hear(0, Ready(hold.seq, 6))
    (order,), _ = table.hear(1, Ready(hold.seq, 6))
    table.ranks, orders = rank_sync.repeated_orders(table.ranks, WISH, lambda: next(table.seqs))
    assert orders == [order]


def test_a_task_counts_as_running_if_a_node_agent_died_between_the_phases() -> None:
    table = Table(world=1)
    table.ranks = Ranks()
    assert table.hear(0, hello(0, state="suspended")) == ([], None)
    _, said = table.hear(1, replace(hello(1, state="held"), gen=7))
    assert isinstance(said, Hello)
    assert said.state == "running"
    assert table.ranks.halted


def test_ranks_that_are_all_parked_stay_parked() -> None:
    table = Table(world=1)
    table.ranks = Ranks()
    table.hear(0, hello(0, state="suspended"))
    orders, said = table.hear(1, hello(1, state="suspended"))
    assert orders == []
    assert isinstance(said, Hello)
    assert said.state == "suspended"


def test_all_are_parked_if_one_connects_anew_that_is_parked_with_the_others() -> None:
    table = Table()
    order = suspend(table)
    for rank in (0, 1):
        table.hear(rank, Suspended(order.seq, 25, 100, 1, 0.1))
    table.ranks = rank_sync.parted(table.ranks, 1)
    orders, said = table.hear(1, hello(1, state="suspended"))
    assert (orders, getattr(said, "state", "")) == ([], "suspended")


def test_old_news_of_a_rank_does_not_undo_a_step_that_was_saved() -> None:
    table = Table()
    for rank in (0, 1):
        table.hear(rank, progress(10))
    (hold,) = table.ask(Order("save", 7, 1))
    table.hear(0, Ready(hold.seq, 10))
    (order,), _ = table.hear(1, Ready(hold.seq, 10))
    for rank in (0, 1):
        table.hear(rank, Saved(order.seq, hold.at_step, "/d", 0.1, False))
    _, said = table.hear(0, progress(hold.at_step + 1))
    assert isinstance(said, Progress)
    assert said.step == hold.at_step


def test_a_task_has_saved_when_all_its_ranks_have() -> None:
    table = Table()
    (hold,) = table.ask(Order("leave", 7, 1))
    table.hear(0, Ready(hold.seq, 6))
    (order,), _ = table.hear(1, Ready(hold.seq, 6))
    assert order.do == "leave"
    assert table.hear(0, Saved(order.seq, 25, "/d", 0.1, True)) == ([], None)
    assert table.hear(1, Saved(order.seq, 25, "/d", 0.1, True)) == ([], Saved(1, 25, "/d", 0.1, True))


# --- a job on several nodes: the step is named from outside -----------------------------------------------------------

HOLD = Order("hold", 7, 3, at_step=20)


def standing(table: Table) -> None:
    table.ranks, orders = rank_sync.stand(replace(table.ranks, apart=True), HOLD)
    assert orders == [HOLD]


@pytest.mark.parametrize("world", [1, 2])
def test_ranks_that_are_to_stand_at_a_named_step_say_together_whether_they_will(world: int) -> None:
    table = Table(world=world)
    standing(table)
    for rank in range(world):
        assert table.ranks.stood == (-1, False)
        assert table.hear(rank, Ready(HOLD.seq, 6)) == ([], None)
    assert table.ranks.stood == (20, True)
    wish = Order("leave", 7, 4, at_step=20)
    assert table.ask(wish) == [wish], "they stand there: there is nothing to agree on"
    saved = Saved(4, 20, "there", 0.1, leaving=True)
    for rank in range(world - 1):
        assert table.hear(rank, saved) == ([], None)
    assert table.hear(world - 1, saved) == ([], saved)


@pytest.mark.parametrize("world", [1, 2])
def test_if_a_rank_is_late_none_stands_and_its_step_is_known(world: int) -> None:
    table = Table(world=world)
    standing(table)
    if world > 1:
        table.hear(0, Ready(HOLD.seq, 6))
    orders, said = table.hear(world - 1, Late(HOLD.seq, 25))
    assert [order.do for order in orders] == ["resume"]
    assert said is None
    assert (table.ranks.stood, table.ranks.late_at) == ((20, False), 25)


def test_a_new_node_agent_leaves_ranks_standing_that_others_elsewhere_may_stand_with() -> None:
    table = Table(world=0)
    table.ranks = Ranks(apart=True)
    assert table.hear(0, hello(0, state="held"))[0] == []
    assert table.hear(1, hello(1))[0] == []
    table.ranks, orders = rank_sync.stand_no_more(table.ranks, Order("resume", 8, 1))
    assert [order.do for order in orders] == ["resume"]
    assert {line.state for line in table.ranks.hellos.values()} == {"running"}


def test_of_a_job_on_several_nodes_those_that_are_suspended_go_on_if_another_cannot_be() -> None:
    table = Table()
    table.ranks = replace(table.ranks, apart=True)
    (order,) = table.ask(Order("suspend", 7, 30, at_step=40))
    table.hear(0, Suspended(order.seq, 40, 100, 1, 0.1))
    (resume,), said = table.hear(1, Refused(order.seq, "no memory"))
    assert (resume.do, said) == ("resume", Refused(30, "no memory"))
