"""Turns on shared GPUs: fair, gangs included, higher priorities first, no longer than they pay."""

from __future__ import annotations

from msgspec.structs import replace

from node_agent.core.slicing import Contender, Slices
from protocol.messages import GpuId, TaskId


def contender(name: str, *devices: int, **more: object) -> Contender:
    made = Contender((TaskId(name),), frozenset(GpuId(f"GPU-{device}") for device in devices))
    return replace(made, **more)


class Clock:
    """Slices and the contenders of a node; each has a process once it has had a turn."""

    def __init__(self, *contenders: Contender, quantum_s: float = 60.0) -> None:
        self.slices, self.contenders, self.now, self.quantum_s = Slices(), list(contenders), 0.0, quantum_s
        self.had: dict[str, float] = {}
        self.changes: list[tuple[float, tuple[str, ...]]] = []

    def look(self) -> set[str]:
        on = self.slices.update(self.now, self.contenders, self.quantum_s)
        self.contenders = [self._after(each, bool(on & set(each.tasks))) for each in self.contenders]
        assert self.slices.update(self.now, self.contenders, self.quantum_s) == on
        if not self.changes or self.changes[-1][1] != tuple(sorted(on)):
            self.changes.append((self.now, tuple(sorted(on))))
        return {str(task) for task in on}

    def _after(self, contender: Contender, has_turn: bool) -> Contender:
        return replace(contender, fresh=contender.fresh and not has_turn, active=contender.fixed or has_turn)

    def wait(self, seconds: float) -> set[str]:
        end, on = self.now + seconds, self.look()
        while (deadline := self.slices.deadline) is not None and deadline < end:
            assert deadline > self.now, "it would spin"
            self._book(deadline, on)
            on = self.look()
        self._book(end, on)
        return self.look()

    def _book(self, until: float, on: set[str]) -> None:
        for task in on:
            self.had[task] = self.had.get(task, 0.0) + until - self.now
        self.now = until


def test_who_shares_nothing_always_has_its_turn_and_nothing_is_ever_due() -> None:
    clock = Clock(contender("a", 0), contender("b", 1))
    assert clock.look() == {"a", "b"}
    assert clock.slices.deadline is None
    clock.wait(100.0)
    assert clock.slices.share(TaskId("a")) == 1.0


def test_three_jobs_on_one_gpu_have_the_same_time_and_never_two_at_once() -> None:
    clock = Clock(contender("a", 0), contender("b", 0), contender("c", 0))
    clock.wait(1800.0)
    assert all(len(on) == 1 for _, on in clock.changes)
    assert max(clock.had.values()) - min(clock.had.values()) <= 60.0
    assert abs(clock.slices.share(TaskId("a")) - 1 / 3) < 0.04


def test_a_gang_gets_its_turn_beside_jobs_of_one_gpu() -> None:
    clock = Clock(contender("gang", 0, 1), contender("a", 0), contender("b", 0), contender("c", 1))
    clock.wait(3600.0)
    assert clock.had["gang"] >= 0.9 * clock.had["a"]
    for _, on in clock.changes:
        assert "gang" not in on or len(on) == 1
    assert clock.had["c"] > clock.had["a"], "GPUs that the gang's turn leaves free are used"


def test_a_parked_task_that_keeps_memory_of_a_gpu_is_next_if_the_turn_of_another_cannot_begin_there() -> None:
    gang, a, b = contender("gang", 0, 1, active=True), contender("a", 0), contender("b", 1)
    slices = Slices()
    slices.update(0.0, [gang, a, b], 60.0)
    slices.update(1.0, [gang, a, b], 60.0)
    assert slices.update(61.0, [gang, a, b], 60.0) == {"a", "b"}
    keeping, runs = replace(gang, active=False, keeping=True), replace(b, active=True)
    assert slices.update(62.0, [keeping, replace(a, active=True), runs], 60.0) == {"a", "b"}, "both have begun"
    assert slices.update(63.0, [keeping, a, runs], 60.0) == {"gang"}
    assert slices.update(63.0, [keeping, replace(a, keeping=True), runs], 60.0) == {"gang"}, "of two the first stays"


def test_a_task_that_keeps_memory_has_the_priority_of_those_that_it_keeps_out_and_suspends_no_higher_one() -> None:
    keeper, far = contender("keeper", 0, 1, keeping=True), [contender(name, 2) for name in "de"]
    linked = contender("h", 1, 2)
    for one, beside, other in (
        (contender("a", 0), contender("b", 1, active=True, fixed=True), "b"),
        (contender("a", 0), contender("b", 1, active=True, priority=3), "b"),
        (contender("a", 0, priority=3), contender("b", 1, active=True), "keeper"),
        (contender("a", 0, leaving=True), contender("b", 1, active=True), "keeper"),
    ):
        slices, group = Slices(), [one, beside, linked, *far]
        slices.update(0.0, group, 60.0)
        seen = [slices.update(1.0 + number, [keeper, *group], 60.0) for number in range(4)]
        assert other in seen[0]
        assert seen == [seen[0]] * 4, "it changes with every look"


def test_of_equal_priority_a_task_that_keeps_memory_goes_before_one_that_has_waited_longer() -> None:
    slices, keeper = Slices(), contender("keeper", 0, 1, active=True)
    a, b, c = contender("a", 0), contender("b", 1), contender("c", 0)
    for now in (0.0, 1.0):
        assert slices.update(now, [keeper, a, b], 60.0) == {"keeper"}
    assert slices.update(61.0, [keeper, a, b], 60.0) == {"a", "b"}
    keeping = replace(keeper, active=False, keeping=True)
    assert slices.update(62.0, [keeping, a, replace(b, active=True), c], 60.0) == {"keeper"}


def test_a_higher_priority_is_never_suspended_for_a_lower_one() -> None:
    clock = Clock(contender("low", 0), contender("high", 0, priority=5))
    assert clock.wait(600.0) == {"high"}
    assert "low" not in clock.had
    clock.contenders = [each for each in clock.contenders if each.tasks != ("high",)]
    assert clock.look() == {"low"}


def test_a_higher_priority_that_arrives_has_its_turn_at_once() -> None:
    clock = Clock(contender("low", 0))
    clock.wait(5.0)
    clock.contenders.append(contender("high", 0, priority=1))
    assert clock.look() == {"high"}


def test_a_newcomer_waits_for_a_part_of_a_turn_only() -> None:
    clock = Clock(contender("old", 0), contender("older", 0))
    clock.wait(70.0)
    on = clock.look()
    clock.contenders.append(contender("new", 0, fresh=True))
    assert clock.look() == on
    assert clock.wait(15.5) == {"new"}


def test_a_turn_is_as_long_as_its_cost_demands() -> None:
    clock = Clock(contender("a", 0, cost_s=3.0), contender("b", 0, cost_s=3.0))
    clock.look()
    assert clock.slices.deadline == 150.0
    dear = Clock(contender("a", 0, cost_s=30.0), contender("b", 0))
    dear.look()
    assert dear.slices.deadline == 300.0


def test_a_turn_begins_when_who_has_it_is_on_its_gpus_and_is_lost_if_it_never_comes() -> None:
    slices = Slices()
    running, coming = contender("a", 0, active=True), contender("b", 0)
    assert slices.update(0.0, [running, coming], 60.0) == {"a"}
    assert slices.update(60.0, [running, coming], 60.0) == {"b"}
    still_there = [contender("a", 0, active=True), coming]
    assert slices.update(125.0, still_there, 60.0) == {"b"}
    there = [contender("a", 0), replace(coming, active=True)]
    assert slices.update(130.0, there, 60.0) == {"b"}
    assert slices.update(189.0, there, 60.0) == {"b"}
    assert slices.update(190.0, there, 60.0) == {"a"}
    assert slices.update(369.0, there, 60.0) == {"a"}, "b does not leave"
    assert slices.update(371.0, there, 60.0) == {"b"}


def test_a_start_is_no_part_of_a_turn_and_loses_it_if_it_takes_too_long() -> None:
    """World 1795826283: what started for longer than a turn was parked before its first mini-batch, time and again."""
    slices = Slices()
    running, coming = contender("a", 0, active=True), contender("b", 0)
    assert slices.update(0.0, [running, coming], 5.0) == {"a"}
    assert slices.update(5.0, [running, coming], 5.0) == {"b"}
    starts = [contender("a", 0), replace(coming, active=True, starting=True)]
    assert slices.update(17.0, starts, 5.0) == {"b"}
    trains = [contender("a", 0), replace(coming, active=True)]
    assert slices.update(17.5, trains, 5.0) == {"b"}
    assert slices.update(22.4, trains, 5.0) == {"b"}
    assert slices.update(22.6, trains, 5.0) == {"a"}
    slices = Slices()
    assert slices.update(0.0, starts, 5.0) == {"b"}
    assert slices.update(124.0, starts, 5.0) == {"b"}
    assert slices.update(126.0, starts, 5.0) == {"a"}, "it starts for too long"


def test_who_cannot_be_suspended_keeps_its_gpu() -> None:
    clock = Clock(contender("fixed", 0, fixed=True, active=True), contender("b", 0, priority=9))
    assert clock.wait(600.0) == {"fixed"}


def test_two_that_cannot_be_suspended_do_not_make_the_turns_spin() -> None:
    stuck = Clock(
        contender("x", 0, fixed=True, active=True), contender("y", 0, fixed=True, active=True), contender("z", 0)
    )
    assert stuck.wait(600.0) == {"x", "y"}
    assert "z" not in stuck.had


def test_what_cannot_be_changed_does_not_make_others_rotate_at_every_event() -> None:
    fixed = [contender("x", 0, fixed=True, active=True), contender("y", 0, fixed=True, active=True)]
    for stuck in (fixed[:1], fixed):
        clock = Clock(*stuck, contender("gang", 0, 1, priority=9), contender("a", 1), contender("b", 1))
        for _ in range(599):
            clock.wait(1.0)
        assert len(clock.changes) <= 11


def test_who_is_found_running_by_a_new_node_agent_keeps_its_turn() -> None:
    clock = Clock(contender("parked", 0), contender("running", 0, active=True))
    assert clock.look() == {"running"}


def test_two_that_run_together_are_on_and_off_together() -> None:
    pair = replace(contender("a", 0), tasks=(TaskId("a"), TaskId("b")))
    clock = Clock(pair, contender("c", 0))
    clock.wait(1200.0)
    assert {on for _, on in clock.changes} == {("a", "b"), ("c",)}


def test_who_must_save_and_leave_goes_first_though_it_had_the_last_turn() -> None:
    clock = Clock(contender("a", 0), contender("b", 0))
    clock.wait(61.0)
    assert clock.look() == {"b"}
    clock.contenders = [contender("a", 0, leaving=True), contender("b", 0), contender("c", 0)]
    assert clock.wait(60.0) == {"a"}


def test_a_newcomer_does_not_make_up_for_the_time_before_it_came() -> None:
    clock = Clock(contender("a", 0), contender("b", 0))
    clock.wait(6000.0)
    clock.contenders.append(contender("c", 0))
    clock.had.clear()
    clock.wait(1800.0)
    assert clock.had["c"] <= 1.2 * min(clock.had["a"], clock.had["b"])


def test_of_two_that_are_found_running_on_one_gpu_one_is_suspended_at_once() -> None:
    clock = Clock(contender("a", 0, active=True), contender("b", 0, active=True))
    assert len(clock.look()) == 1
