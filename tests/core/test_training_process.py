"""What a training process answers to an order, whatever its training thread is doing at that very moment."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from app_agent.training import figures, orders
from app_agent.training.state import Identity
from app_agent.training.training_process import TrainingProcess


def process(step: int = 5, **facts: bool) -> TrainingProcess:
    """One whose threads never started: the test does what they would do."""
    one = TrainingProcess("/nowhere", Identity("me-1.0-a0", 0), [])
    one.step = step
    for name, fact in {"can_park": True, "can_checkpoint": True, **facts}.items():
        setattr(one, name, fact)
    return one


def take(one: TrainingProcess, do: str, seq: int = 1, gen: int = 1, at_step: int = -1, size: int = 0) -> list[Any]:
    """Pass an order on; return what is said to that."""
    one.link._outbox.clear()
    orders.take(one, {"do": do, "gen": gen, "seq": seq, "at_step": at_step, "bytes": size})
    return [(line["type"], line["seq"]) for line in one.link._outbox]


@pytest.mark.parametrize("do", ["hold", "suspend", "save", "leave"])
@pytest.mark.parametrize(
    ("at_step", "held", "in_time"),
    [
        (-1, False, True),
        (4, False, False),
        (5, False, False),  # the training thread may have looked for orders already
        (5, True, True),  # it stands there
        (4, True, False),
        (6, False, True),
    ],
)
def test_an_order_for_a_step_is_taken_only_if_the_training_thread_will_certainly_find_it(
    do: str, at_step: int, held: bool, in_time: bool
) -> None:
    one = process(held=held)
    said = take(one, do, at_step=at_step)
    if do == "hold":
        assert said == [("ready" if in_time else "late", 1)]
    else:
        assert said == ([] if in_time else [("refused", 1)])
    assert (one.order is not None) is one.due is in_time


def test_one_that_is_late_takes_the_order_back_before_the_training_thread_can_obey_it() -> None:
    one = process()
    take(one, "hold", at_step=5)
    standing = threading.Thread(target=one.obey, args=(None,), kwargs={"by_hook": True}, daemon=True)
    standing.start()
    standing.join(5)
    assert not standing.is_alive()


def test_an_order_for_a_later_step_lets_the_steps_before_it_pass() -> None:
    one = process()
    take(one, "hold", at_step=7)
    assert not one.obey(None, by_hook=True)
    assert one.due
    one.step = 7
    standing = threading.Thread(target=one.obey, args=(None,), kwargs={"by_hook": True}, daemon=True)
    standing.start()
    while not one.held:
        pass
    assert figures.hello(one)["state"] == "held"
    assert take(one, "hold", seq=2, at_step=9) == [("ready", 2)]
    standing.join(5)
    assert not standing.is_alive()
    assert (one.held, one.due) == (False, True)
    assert take(one, "resume", seq=3) == [("resumed", 3)]
    assert not one.due


def test_what_is_answered_at_once_is_answered_again_and_is_not_what_hello_calls_obeyed() -> None:
    one = process()
    assert take(one, "hold", seq=4, at_step=9) == [("ready", 4)]
    for _ in range(2):
        assert take(one, "tell", seq=5) == [("progress", 5)]
        assert take(one, "cap", seq=6, size=2**30) == [("progress", 6)]
    assert figures.hello(one)["seq"] == 4
    assert take(one, "hold", seq=4, at_step=9) == [("ready", 4)]  # its first answer was lost
    assert take(one, "suspend", seq=3) == []
    assert take(one, "tell", seq=9, gen=0) == []
    assert one.order is not None
    assert one.order.do == "hold"


def test_a_process_that_leaves_or_has_finished_refuses_whatever_needs_a_boundary() -> None:
    for do in ("hold", "suspend", "save"):
        assert take(process(leaving=True), do) == [("refused", 1)]
    assert take(process(leaving=True), "tell") == [("progress", 1)]


def test_the_newest_report_of_a_metric_counts_also_when_it_is_no_number() -> None:
    one = process()
    for loss in (0.5, float("nan"), float("inf")):
        one.report({"loss": loss, "lr": 0.1})
        with pytest.warns(UserWarning, match="report single numbers"):
            one.report({"loss": "a word"})  # type: ignore[dict-item]
    assert (figures.progress(one)["metrics"], figures.progress(one)["diverged"]) == ({"lr": 0.1}, ["loss"])
    one.report({"loss": 0.4})
    assert figures.progress(one)["metrics"] == {"loss": 0.4, "lr": 0.1}
    assert "diverged" not in figures.progress(one)
