"""A trial whose metric is no number any more: its search hears of it, ranks it last, and takes no old value for it."""

from __future__ import annotations

import json
import math

import msgspec
import pytest
from msgspec.structs import replace

from app_agent.core.jobs import joined_status
from app_agent.core.tuning import AppScheduler, CurveStopping, Exhaustive, Halving, Hyperband, Left, Search, Trial
from app_agent.core.tuning.bracket import Bracket, Yardstick
from app_agent.training import figures
from app_agent.training.state import Identity
from app_agent.training.training_process import TrainingProcess
from arbiter.core.leases.plans import take_task
from node_agent.core import rank_sync
from protocol.codec import decode, encode
from protocol.messages import GpuId, Measured, NodeReport, Party, TaskId, newest_metrics
from protocol.worker import Finished, Progress, decode_line
from tests.support.app_harness import Bench as AppBench
from tests.support.app_harness import exited, status
from tests.support.node_harness import Bench as NodeBench
from tests.support.node_harness import progress

NO_NUMBERS = (math.nan, math.inf, -math.inf)
MODES = ("min", "max")
A = "ada-1.0-a0"


def told(*metrics: float | None, steps: int = 10, state: str = "live") -> tuple[Trial, ...]:
    return tuple(Trial(number, steps, 30, state, metric) for number, metric in enumerate(metrics))  # type: ignore[arg-type]


# --- searches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", NO_NUMBERS)
def test_who_diverged_is_ranked_last_whichever_way_is_better(mode: str, value: float) -> None:
    by = Yardstick("loss", mode)  # type: ignore[arg-type]
    ranked = sorted(told(value, None, -1e9, 1e9), key=by.rank)
    assert [trial.number for trial in ranked][2:] == [1, 0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", NO_NUMBERS)
def test_who_diverged_does_not_go_on_in_the_place_of_a_healthy_one(mode: str, value: float) -> None:
    halving = Halving(2, (10, 30), "loss", mode)  # type: ignore[arg-type]
    assert halving.advance(halving.begin(), told(value, 0.6)).survivors == (1,)
    brackets = (Bracket((0, 1), (10, 30), (2, 1)),)
    hyperband = Hyperband(brackets, "loss", mode)  # type: ignore[arg-type]
    assert hyperband.advance(hyperband.begin(), told(value, 0.6)).survivors == (1,)


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize("mode", MODES)
def test_who_diverged_is_the_answer_only_if_all_have(mode: str, value: float) -> None:
    whole = Bracket((0, 1), (30,), (2,))
    searches: tuple[AppScheduler, ...] = (
        Exhaustive(2, "loss", mode),  # type: ignore[arg-type]
        Hyperband((whole,), "loss", mode),  # type: ignore[arg-type]
        CurveStopping(2, "loss", mode),  # type: ignore[arg-type]
    )
    for search in searches:
        assert search.answer(search.begin(), told(value, 0.6, steps=30, state="done")) == 1
        assert search.answer(search.begin(), told(value, value, steps=30, state="done")) == 0


def test_who_diverged_runs_to_the_end_of_its_rung_and_may_recover_there() -> None:
    halving = Halving(2, (10, 30), "loss", "min")
    shown = (Trial(0, 3, 30, "live", math.nan), Trial(1, 10, 30, "live", 0.6))
    assert halving.runnable(halving.begin(), shown) == (0,)
    assert halving.left(halving.begin(), shown)[0] == (Left(0, 7), Left(1, 0))
    assert halving.advance(halving.begin(), (Trial(0, 10, 30, "live", 0.5), shown[1])) == Search((0,), 1)
    assert halving.advance(halving.begin(), (Trial(0, 10, 30, "live", math.nan), shown[1])) == Search((1,), 1)


def test_the_last_that_is_left_runs_to_its_end_though_it_diverged() -> None:
    halving = Halving(2, (10, 30), "loss", "min")
    last = Search((1,), 1)
    assert halving.runnable(last, (Trial(0, 10, 30, "live"), Trial(1, 12, 30, "live", math.nan))) == (1,)


def test_where_all_diverged_in_one_bracket_the_others_go_on() -> None:
    hyperband = Hyperband((Bracket((0, 1), (10, 30), (2, 1)), Bracket((2,), (30,), (1,))), "loss", "min")
    search = hyperband.advance(hyperband.begin(), told(math.nan, math.nan, 0.5))
    assert (search.fault, search.survivors) == ("", (0, 2))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", NO_NUMBERS)
def test_a_curve_that_diverged_for_a_tenth_of_its_steps_is_stopped_and_stops_nobody(mode: str, value: float) -> None:
    stopping = CurveStopping(3, "loss", mode, target=0.1 if mode == "min" else 0.9)  # type: ignore[arg-type]
    search = stopping.advance(stopping.begin(), (Trial(0, 5, 30, "live", 0.5), *told(0.6, None, steps=5)))
    for steps, survivors in ((7, (0, 1, 2)), (8, (1, 2))):
        shown = (Trial(0, steps, 30, "live", value), Trial(1, 5, 30, "live", 0.6), Trial(2, 0, 30, "live"))
        search = stopping.advance(search, shown)
        assert (search.survivors, search.phase) == (survivors, 0)


def test_curves_that_have_all_diverged_go_on_as_nobody_is_better() -> None:
    stopping = CurveStopping(2, "loss", "min")
    assert stopping.advance(stopping.begin(), told(math.nan, math.nan)) == stopping.begin()


# --- from the script to its node agent ------------------------------------------------------------------------------


def script() -> TrainingProcess:
    return TrainingProcess("/nowhere", Identity(A, 0), [])


def heard(one: TrainingProcess) -> Progress:
    line = decode_line(json.dumps(figures.progress(one), allow_nan=False).encode())
    assert isinstance(line, Progress)
    return line


def test_a_line_says_which_metrics_are_no_numbers() -> None:
    one = script()
    one.report({"loss": 0.5, "lr": 0.1})
    one.report({"loss": math.nan})
    assert (heard(one).metrics, heard(one).diverged) == ({"lr": 0.1}, ("loss",))
    one.report({"loss": 0.4})
    assert (heard(one).metrics, heard(one).diverged) == ({"loss": 0.4, "lr": 0.1}, ())
    one.report({"best": math.inf})  # so far: nothing
    assert (heard(one).metrics, heard(one).diverged) == ({"loss": 0.4, "lr": 0.1}, ())
    one.finish({"loss": math.inf})
    last = decode_line(json.dumps(one.link._outbox[-1], allow_nan=False).encode())
    assert last == Finished(-1, {"lr": 0.1}, ("loss",))


def test_the_node_agent_passes_on_the_newest_word_on_each_metric() -> None:
    bench = NodeBench()
    bench.run(A, 0)
    bench.worker(A, replace(progress(6), metrics={"loss": 0.5, "lr": 0.1}))
    bench.worker(A, replace(progress(7), metrics={"lr": 0.1}, diverged=("loss",)))
    said = bench.status(A)
    assert (said.metrics, said.measured.diverged) == ({"lr": 0.1}, ("loss",))
    assert said.measured.remark == "reports no number for loss"
    bench.worker(A, progress(8))  # says nothing of metrics
    assert bench.status(A).measured.diverged == ("loss",)
    bench.worker(A, replace(progress(9), metrics={"loss": 0.4, "lr": 0.1}))
    assert (bench.status(A).metrics["loss"], bench.status(A).measured) == (
        0.4,
        replace(said.measured, diverged=(), remark=""),
    )
    bench.worker(A, Finished(99, {"lr": 0.2}, ("loss",)))
    assert (bench.status(A).metrics, bench.status(A).measured.diverged) == ({"lr": 0.2}, ("loss",))


def test_a_first_report_that_is_no_number_is_passed_on_at_once() -> None:
    bench = NodeBench()
    bench.run(A, 0)
    bench.wait(5.0)
    bench.worker(A, replace(progress(6), diverged=("loss",)))
    report = bench.report()
    assert report is not None
    assert report.tasks[0].measured.diverged == ("loss",)


def test_a_finish_that_was_only_written_down_says_so_too() -> None:
    bench = NodeBench()
    bench.run(A, 0)
    bench.worker(A, replace(progress(6), metrics={"loss": 0.5}))
    bench.gone(A, 0, finished={}, diverged=("loss",))
    assert (bench.status(A).metrics, bench.status(A).measured.diverged) == ({}, ("loss",))


def test_of_several_processes_the_first_that_speaks_of_a_metric_counts() -> None:
    assert newest_metrics(({"a": 1.0, "b": 2.0}, ()), ({"c": 3.0}, ("a",)), ({"b": 4.0}, ())) == (
        {"b": 4.0, "c": 3.0},
        ("a",),
    )
    pair = rank_sync.Ranks(
        2, news={0: replace(progress(6), diverged=("loss",)), 1: replace(progress(6), metrics={"loss": 1.0})}
    )
    merged = rank_sync._progress(pair)
    assert (merged.metrics, merged.diverged) == ({}, ("loss",))
    first = status(A, "n1g0", measured=Measured(diverged=("loss",)))
    second = status(A, "n2g0", metrics={"loss": 1.0}, measured=Measured(share=0.5))
    whole = joined_status((first, replace(second, task=TaskId(A + ".1"))), [GpuId("n1g0"), GpuId("n2g0")])
    assert whole is not None
    assert (whole.metrics, whole.measured) == ({}, Measured(share=0.5, diverged=("loss",)))


def test_old_peers_and_new_ones_understand_each_other() -> None:
    old = (
        b'{"type":"progress","step":7,"step_s":0.1,"start_step":0,"total_steps":9,"can_park":true,"can_checkpoint":true'
    )
    assert decode_line(old + b',"saved_step":-1,"metrics":{"loss":0.5}}').diverged == ()  # type: ignore[union-attr]
    assert msgspec.to_builtins(Measured()) == {}
    assert msgspec.convert({}, Measured).diverged == ()


def test_the_arbiter_passes_it_on_and_every_message_can_be_encoded() -> None:
    bench = NodeBench()
    bench.run(A, 0)
    bench.wait(5.0)
    bench.worker(A, replace(progress(6), metrics={"lr": 0.1}, diverged=("loss",)))
    report = bench.report()
    assert report is not None
    read = decode(encode(report, sender=Party("node", "n1"), id="m-1")).body
    assert isinstance(read, NodeReport)
    task = take_task(read.node, read.tasks[0])
    assert (task.metrics, task.measured.diverged) == ({"lr": 0.1}, ("loss",))


# --- in the app agent -----------------------------------------------------------------------------------------------

LOSS_OF_TWO: dict[str, object] = {"trials": (("a",), ("b",)), "metric": "loss", "mode": "min", "steps_total": 30}
GPUS = "n1g0 n1g1"


def at(number: int, step: int, loss: float, **facts: object) -> object:
    """What is told of a trial that has reported `loss`."""
    figures = {"metrics": {"loss": loss}} if math.isfinite(loss) else {"measured": Measured(diverged=("loss",))}
    return status(f"ada-1.{number}-a0", f"n1g{number}", step=step, **(figures | facts))


def test_an_old_loss_is_forgotten_when_a_trial_diverges_and_a_later_one_counts_again() -> None:
    bench = AppBench(**LOSS_OF_TWO)
    bench.grant(GPUS)
    bench.holdings(GPUS, at(0, 3, 0.5), at(1, 3, 0.6))  # type: ignore[arg-type]
    bench.holdings(GPUS, at(0, 4, math.nan), at(1, 4, 0.6))  # type: ignore[arg-type]
    assert [trial.diverged for trial in bench.agent.app.facts.trials] == [True, False]
    bench.tick()
    assert bench.report.metrics == {"loss": 0.6}
    bench.holdings(GPUS, at(0, 5, 0.4), at(1, 5, 0.6))  # type: ignore[arg-type]
    assert [trial.metric for trial in bench.agent.app.facts.trials] == [0.4, 0.6]


def test_a_trial_that_diverged_is_dropped_at_the_end_of_the_phase() -> None:
    bench = AppBench(**LOSS_OF_TWO)
    bench.grant(GPUS)
    bench.holdings(GPUS, at(0, 3, 0.5), at(1, 3, 0.6))  # type: ignore[arg-type]
    bench.holdings(GPUS, at(0, 4, math.nan), at(1, 4, 0.6))  # type: ignore[arg-type]
    assert (bench.wished(0), bench.wished(1)) == ((0, "n1g0"), (0, "n1g1"))
    bench.holdings(GPUS, at(0, 10, math.nan), at(1, 10, 0.6))  # type: ignore[arg-type]
    assert [wish.job for wish in bench.report.jobs] == ["ada-1.1"]


def test_an_app_whose_answer_has_diverged_says_so() -> None:
    bench = AppBench(metric="loss", mode="min")
    bench.grant("n1g0")
    bench.holdings("n1g0", at(0, 3, 0.5))  # type: ignore[arg-type]
    bench.holdings("n1g0", exited(A, "n1g0", "finished", step=99, measured=Measured(diverged=("loss",))))
    assert (bench.report.state, bench.report.metrics) == ("finished", {})
    assert bench.report.reason == "ada-1.0 has diverged: the newest loss that it reported is no number"
