"""A terminal without use gives its GPUs back, after a warning; a key, output or a GPU at work keeps it."""

from __future__ import annotations

from msgspec.structs import replace

from node_agent.core.events import (
    DoorOpened,
    GpuSample,
    OpenDoor,
    SignalWorker,
    StartWorker,
    TerminalQuiet,
    WarnTerminal,
    WorkerStarted,
)
from protocol.core import Received, Send
from protocol.messages import ARBITER, LaunchSpec, OpenTerminal, TaskId, Terminal, TerminalDoor
from tests.support.node_harness import Bench, process, sample, task_order

A = "ana-1.0-a0"
IDLE_S = 100.0


def shell() -> Bench:
    """A task with a terminal that has just begun."""
    bench = Bench()
    launch = LaunchSpec(("bash",), "/", "/checkpoints", terminal=Terminal())
    bench.plan(replace(task_order(A, 0), launch=launch))
    bench.only(StartWorker)
    bench.say(WorkerStarted(TaskId(A), 100))
    return bench


def quiet(bench: Bench, quiet_s: float, idle_s: float = IDLE_S) -> None:
    bench.say(TerminalQuiet(TaskId(A), quiet_s, idle_s))


def at_work(part: float | None, *processes: str) -> GpuSample:
    return replace(sample(0, *(process(task, 1) for task in processes)), utilisation=part)


def test_a_task_with_a_terminal_runs_as_soon_as_it_lives_as_a_shell_says_no_hello() -> None:
    assert shell().status(A).phase == "running"


def test_a_shell_that_leaves_well_has_finished_and_no_word_of_the_library_is_told() -> None:
    bench = shell()
    bench.gone(A, 0)
    assert (bench.status(A).outcome, bench.status(A).reason) == ("finished", "")


def test_a_terminal_without_use_is_warned_once_and_then_gives_its_gpus_back() -> None:
    bench = shell()
    bench.wait(79.0)
    quiet(bench, 79.0)
    assert not bench.all(WarnTerminal)
    bench.wait(2.0)
    quiet(bench, 81.0)
    assert bench.only(WarnTerminal).sentence == (
        "this terminal is unused; in 20 seconds its GPUs go back, unless a key is pressed"
    )
    bench.wait(1.0)
    quiet(bench, 82.0)
    assert not bench.all(WarnTerminal)
    assert not bench.all(SignalWorker)
    bench.wait(19.0)
    quiet(bench, 101.0)
    assert bench.only(SignalWorker).how == "terminate"
    bench.gone(A, 129)
    assert (bench.status(A).outcome, bench.status(A).reason) == (
        "finished",
        "for 100 seconds nothing was typed or shown and no GPU of it worked, so its GPUs went back",
    )


def test_a_key_ends_the_warning_and_the_next_one_comes_in_its_time() -> None:
    bench = shell()
    bench.wait(90.0)
    quiet(bench, 90.0)
    bench.only(WarnTerminal)
    bench.wait(9.0)
    quiet(bench, 1.0)
    bench.wait(81.0)
    quiet(bench, 82.0)
    bench.only(WarnTerminal)
    assert not bench.all(SignalWorker)


def test_a_gpu_at_work_keeps_a_terminal_that_says_nothing() -> None:
    bench = shell()
    for _ in range(5):
        bench.wait(50.0)
        quiet(bench, 500.0)
        bench.measure(at_work(0.4, A))
        assert not bench.all(SignalWorker)
    bench.wait(50.0)
    bench.measure(at_work(0.0, A))
    bench.wait(51.0)
    quiet(bench, 1000.0)
    bench.wait(21.0)
    quiet(bench, 1000.0)
    assert bench.all(SignalWorker)


def test_where_the_driver_tells_no_utilisation_a_process_on_the_gpu_counts_as_work() -> None:
    bench = shell()
    quiet(bench, 1.0)
    bench.wait(99.0)
    bench.measure(at_work(None, A))
    bench.wait(99.0)
    quiet(bench, 198.0)
    bench.wait(21.0)
    bench.measure(at_work(None))
    quiet(bench, 219.0)
    assert bench.all(SignalWorker)


def test_no_terminal_ends_without_a_warning_that_it_has_had_time_for() -> None:
    bench = shell()
    bench.wait(500.0)  # a node agent that has just begun, or was busy
    quiet(bench, 500.0)
    bench.only(WarnTerminal)
    assert not bench.all(SignalWorker)
    bench.wait(20.0)
    quiet(bench, 520.0)
    assert bench.all(SignalWorker)


def test_a_terminal_is_as_old_as_its_process_whatever_it_says_of_itself() -> None:
    bench = shell()
    bench.wait(10.0)
    quiet(bench, 5000.0)
    assert not bench.all(SignalWorker)


def test_news_of_a_task_that_is_gone_are_no_harm() -> None:
    bench = Bench()
    quiet(bench, 5000.0)
    assert not bench.all(SignalWorker)


def test_a_task_that_is_being_started_has_a_terminal_soon() -> None:
    bench = Bench()
    bench.plan(task_order(A, 0))
    bench.say(Received(ARBITER, OpenTerminal("q1", TaskId(A))))
    assert not bench.all(OpenDoor)
    (door,) = [send.message for send in bench.all(Send) if isinstance(send.message, TerminalDoor)]
    assert door == TerminalDoor("q1", TaskId(A), error=f"{A} is being started", soon=True)


def test_the_way_to_a_terminal_is_asked_of_the_adapter_and_told_to_the_arbiter() -> None:
    bench = shell()
    bench.say(Received(ARBITER, OpenTerminal("q1", TaskId(A))))
    assert bench.only(OpenDoor) == OpenDoor("q1", TaskId(A))
    door = TerminalDoor("q1", TaskId(A), "n1", 7073, "0f" * 24)
    bench.say(DoorOpened(door))
    assert Send(ARBITER, door) in bench.effects
