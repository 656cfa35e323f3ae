"""The figures that a training process tells of its memory: troughs, peaks, and samples of a script without steps."""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from app_agent.training import boundary, figures, memory_cycle, orders, process_memory
from app_agent.training.agent_link import BEAT_S, AgentLink
from app_agent.training.process_memory import Reading
from app_agent.training.state import Identity
from app_agent.training.training_process import TrainingProcess
from tests.support.patience import PATIENCE_S

MIB = 2**20
GIB = 2**30
REAL = "GPU-5f0c1d2e-0000-0000-0000-000000000000"


class PlayedCuda(ModuleType):
    """`torch.cuda` as far as memory is concerned, of two devices; the process uses the second."""

    def __init__(self) -> None:
        super().__init__("torch.cuda")
        self._initialized = True
        self.held, self.most, self.kept = 0, 0, 0
        self.emptied_by: list[str] = []
        self.fractions: list[tuple[int, float]] = []

    def take(self, size: int) -> None:
        self.held += size
        self.most, self.kept = max(self.most, self.held), max(self.kept, self.held)

    def device_count(self) -> int:
        return 2

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, Any]:
        now, peak, kept = (self.held, self.most, self.kept) if device else (0, 0, 0)
        return {
            "allocated_bytes": {"all": {"current": now, "peak": peak, "allocated": peak}},
            "reserved_bytes": {"all": {"current": kept, "peak": kept}},
        }

    def empty_cache(self) -> None:
        self.emptied_by.append(threading.current_thread().name)
        self.kept = self.held

    def get_device_properties(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(total_memory=80 * GIB)

    def device(self, device: int) -> Any:
        return nullcontext()

    def set_per_process_memory_fraction(self, fraction: float, device: int) -> None:
        self.fractions.append((device, fraction))

    def reset_peak_memory_stats(self, device: int) -> None:
        if device:
            self.most = self.held


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> PlayedCuda:
    """CUDA on a real GPU, which has not begun yet; the host has 3 GiB in use, as after data was loaded there."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{REAL},{REAL}")
    monkeypatch.setattr(process_memory, "_private_bytes", lambda: (3 * GIB, 3 * GIB))
    monkeypatch.setattr(process_memory, "anonymous_bytes", lambda: 3 * GIB)
    played = PlayedCuda()
    played._initialized = False
    monkeypatch.setitem(sys.modules, "torch.cuda", played)
    return played


def process() -> TrainingProcess:
    """One whose threads never started: the test does what they would do."""
    return TrainingProcess("/nowhere", Identity("me-1.0-a0", 0), [])


def surveyed(monkeypatch: pytest.MonkeyPatch, devices: tuple[int, ...] = (1,), sampled: int = 0) -> TrainingProcess:
    """A process at the boundary after its survey; the state lies on these devices. `sampled`: its peak before."""
    monkeypatch.setattr(boundary.parking, "survey", lambda: SimpleNamespace(devices=devices, bytes=100 * MIB))
    one = process()
    one.peak_bytes = sampled
    for _ in range(figures.BOUNDARIES_BEFORE_SURVEY):
        one.optimizer_stepped()
    figures.beat(one)
    one.optimizer_stepped()
    assert told(one) == (0, 0, 0)  # no mini-batch has been counted yet
    one.optimizer_stepped()
    return one


def told(one: TrainingProcess) -> tuple[int, int, int]:
    """The peak, the trough and what is reserved, as progress tells them."""
    line = figures.progress(one)
    return line["peak_bytes"], line["trough_bytes"], line["reserved_bytes"]


def test_memory_of_the_host_is_never_told_as_memory_of_a_gpu(cuda: PlayedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    one = process()
    figures.beat(one)
    assert told(one) == (0, 0, 0)  # nothing is known yet
    one = surveyed(monkeypatch, devices=())  # and trains on the host, or with another library
    assert told(one) == (0, 0, 0)
    assert process_memory.allocated_bytes() is None
    cuda._initialized = True
    cuda.take(400 * MIB)
    one.memory_due_s = 0.0
    one.optimizer_stepped()
    assert told(one) == (400 * MIB, 400 * MIB, 400 * MIB)


def order_to_cap(one: TrainingProcess, seq: int, size: int) -> None:
    """Have the helper thread take in a limit."""
    line = {"do": "cap", "gen": 1, "seq": seq, "at_step": -1, "bytes": size}
    helper = threading.Thread(target=orders.take, args=(one, line), name="helper")
    helper.start()
    helper.join()


def test_a_limit_holds_at_once_and_what_is_cached_goes_in_the_training_thread_at_the_next_boundary(
    cuda: PlayedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda._initialized = True
    one = surveyed(monkeypatch)
    cuda.take(30 * GIB)
    cuda.take(-20 * GIB)
    order_to_cap(one, 1, 20 * GIB)
    assert (cuda.fractions, cuda.emptied_by) == ([(1, 0.25)], [])
    one.optimizer_stepped()
    one.optimizer_stepped()
    assert cuda.emptied_by == [threading.current_thread().name]
    assert told(one)[2] == 10 * GIB
    order_to_cap(one, 2, 0)
    one.optimizer_stepped()
    assert (cuda.fractions[-1], len(cuda.emptied_by)) == ((1, 1.0), 1), "no limit: what it caches is its own"


def test_training_goes_on_where_the_allocator_cannot_give_back_its_cache(
    cuda: PlayedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    cuda._initialized = True
    one = surveyed(monkeypatch)
    monkeypatch.setattr(cuda, "empty_cache", refuse)
    order_to_cap(one, 1, 20 * GIB)
    before = one.step
    one.optimizer_stepped()
    one.optimizer_stepped()
    assert one.step == before + 2
    assert not one.cache_unwanted, "it is asked once, not at each boundary"


@pytest.mark.parametrize(
    ("given", "real"), [("", False), (f"{process_memory.VIRTUAL}n1-0", False), (REAL, True), ("MIG-5f0c1d2e", True)]
)
def test_private_memory_stands_for_that_of_gpus_unless_real_ones_were_given(
    monkeypatch: pytest.MonkeyPatch, given: str, real: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert process_memory.has_real_gpus() is real


def test_the_peak_is_that_of_a_mini_batch_after_the_survey_and_the_trough_that_of_its_end(
    cuda: PlayedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda._initialized = True
    cuda.take(2 * GIB)  # to load
    cuda.take(-2 * GIB + 300 * MIB)
    one = surveyed(monkeypatch, sampled=GIB)
    assert told(one) == (300 * MIB, 300 * MIB, 2 * GIB)
    for activations in (500 * MIB, 200 * MIB):
        cuda.take(activations)
        cuda.take(-activations)
        one.memory_due_s = 0.0
        one.optimizer_stepped()
    assert told(one) == (800 * MIB, 300 * MIB, 2 * GIB)


def test_a_process_that_cannot_be_parked_tells_the_memory_of_its_gpus_all_the_same(
    cuda: PlayedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        raise boundary.parking.ParkRefused("a CUDA graph is alive")

    cuda._initialized = True
    cuda.take(400 * MIB)
    monkeypatch.setattr(boundary.parking, "survey", refused)
    one = process()
    for _ in range(figures.BOUNDARIES_BEFORE_SURVEY):
        one.optimizer_stepped()
    figures.beat(one)
    for _ in range(2):
        one.optimizer_stepped()
    assert told(one) == (400 * MIB, 400 * MIB, 400 * MIB)


def test_an_allocator_without_counters_costs_the_script_nothing_but_its_figures(
    cuda: PlayedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(device: int) -> dict[str, Any]:
        raise RuntimeError("this allocator does not support getDeviceStats")

    cuda._initialized = True
    monkeypatch.setattr(cuda, "memory_stats_as_nested_dict", unsupported)
    assert told(surveyed(monkeypatch)) == (0, 0, 0)


@pytest.mark.parametrize(("price_s", "pause_s"), [(1e-5, BEAT_S), (1e-4, 2.0), (0.05, 5.0)])
def test_the_counters_are_read_once_for_each_beat_and_less_often_where_they_are_dear(
    monkeypatch: pytest.MonkeyPatch, price_s: float, pause_s: float
) -> None:
    one = process()
    clock = itertools.count(100.0, price_s)
    monkeypatch.setattr(boundary.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(boundary.process_memory, "reading", lambda devices: Reading(1, 2, 3))
    boundary.read_memory(one)
    assert told(one) == (2, 1, 3)
    assert one.memory_due_s == pytest.approx(100.0 + pause_s)


# --- private memory, which stands for that of a GPU -----------------------------------------------------------------


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not process_memory._peak_can_be_forgotten():
        pytest.skip("this kernel has no /proc/self/clear_refs")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{process_memory.VIRTUAL}n1-0")
    monkeypatch.setitem(sys.modules, "torch.cuda", PlayedCuda())
    monkeypatch.setattr(sys.modules["torch.cuda"], "_initialized", False)
    return


def touch(size: int) -> None:
    bytearray(os.urandom(4096) * (size // 4096)).clear()


def test_on_a_virtual_gpu_the_peak_within_a_mini_batch_is_seen_though_nobody_looks_then(
    virtual: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    touch(512 * MIB)  # to load
    one = surveyed(monkeypatch, devices=())
    peak, trough, reserved = told(one)
    assert 0 < trough <= peak < trough + 100 * MIB
    assert reserved == trough
    touch(128 * MIB)
    one.memory_due_s = 0.0
    one.optimizer_stepped()
    peak, trough, _ = told(one)
    assert 128 * MIB <= peak - trough < 400 * MIB


def test_a_forked_process_reads_its_own_memory(virtual: None) -> None:
    parent = process_memory.anonymous_bytes()
    ends = os.pipe()
    child = os.fork()
    if child == 0:
        kept = bytearray(os.urandom(4096) * (64 * MIB // 4096))
        os.write(ends[1], str(process_memory.anonymous_bytes() + 0 * len(kept)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert int(os.read(ends[0], 64)) >= parent + 32 * MIB
    for end in ends:
        os.close(end)


# --- samples --------------------------------------------------------------------------------------------------------


def test_samples_come_in_lists_until_a_step_is_seen() -> None:
    held = ((number, 2 * number) for number in range(10**6))
    seen: list[memory_cycle.Samples] = []
    lasts = []
    for samples, last in memory_cycle.read(lambda: next(held), 60.0, lambda: len(seen) >= 2):
        seen.append(samples)
        lasts.append(last)
    assert lasts == [False, False, True]
    assert [len(each) for each in seen] == [memory_cycle.LINE_SAMPLES, memory_cycle.LINE_SAMPLES, 0]
    flat = [sample for samples in seen for sample in samples]
    assert [counted for _, *counted in flat] == [[number, 2 * number] for number in range(len(flat))]
    gaps = [later - sooner for (sooner, *_), (later, *_) in itertools.pairwise(flat)]
    assert min(gaps) >= memory_cycle.GAP_S[0]


def test_a_counter_that_is_unknown_gives_no_samples() -> None:
    assert list(memory_cycle.read(lambda: None, 0.05, lambda: False)) == [([], True)]


def test_a_trough_is_the_fall_of_the_memory_to_its_floor_and_not_a_low_that_may_be_about_to_end() -> None:
    cycle = [10, 12, 80, 100, 90, 31, 30, 12]
    seen = []

    def counter() -> int:
        seen.append(cycle[len(seen) % len(cycle)])
        return seen[-1]

    assert memory_cycle.until_trough(counter, floor=30.0, seconds=60.0)
    assert seen == cycle[:7]
    assert not memory_cycle.until_trough(lambda: 50, floor=30.0, seconds=0.05)
    assert not memory_cycle.until_trough(lambda: None, floor=30.0, seconds=60.0)


def test_at_the_trough_unused_memory_is_given_back_and_the_worker_says_so(
    cuda: PlayedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda._initialized = True
    cuda.take(GIB)
    cuda.take(100 * MIB - GIB)
    monkeypatch.setattr(memory_cycle, "until_trough", lambda *_: True)
    one = process()
    orders.take(one, {"do": "trough", "gen": 1, "seq": 4, "at_step": -1, "bytes": 0})
    for thread in threading.enumerate():
        if thread.name == "gpu-arbiter-trough":
            thread.join()
    assert cuda.kept == 100 * MIB
    assert [(line["type"], line["seq"]) for line in one.link._outbox] == [("progress", 4)]


def test_a_script_whose_memory_does_not_swing_is_at_a_trough_at_any_time(
    cuda: PlayedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda._initialized = True
    monkeypatch.setattr(memory_cycle, "until_trough", None)
    one = process()
    one.cycle_bytes = (GIB - GIB // 100, GIB)
    orders.take(one, {"do": "trough", "gen": 1, "seq": 4, "at_step": -1, "bytes": 0})
    for thread in threading.enumerate():
        if thread.name == "gpu-arbiter-trough":
            thread.join()
    assert cuda.emptied_by == ["gpu-arbiter-trough"]
    assert [(line["type"], line["seq"]) for line in one.link._outbox] == [("progress", 4)]


def test_no_other_thread_runs_python_while_the_interpreter_is_held() -> None:
    ended, seen = threading.Event(), [time.monotonic()]

    def look() -> None:
        while not ended.is_set():
            seen.append(time.monotonic())

    other = threading.Thread(target=look)
    other.start()
    begun = time.monotonic()
    memory_cycle.hold_interpreter(0.3)
    assert time.monotonic() - begun >= 0.3
    ended.set()
    other.join()
    meanwhile = sum(begun + 0.1 < at < begun + 0.3 for at in seen)
    assert meanwhile == 0


def told_of_a_trough(one: TrainingProcess, seq: int = 4) -> list[tuple[str, int]]:
    """Ask for a trough; return what is said before the next boundary."""
    orders.take(one, {"do": "trough", "gen": 1, "seq": seq, "at_step": -1, "bytes": 0})
    return [(line["type"], line["seq"]) for line in one.link._outbox]


def test_a_script_that_tells_its_steps_is_at_a_trough_at_the_end_of_its_mini_batch_and_stands_there_for_a_moment(
    cuda: PlayedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boundary, "STAND_S", 0.2)
    cuda._initialized = True
    one = process()
    one.optimizer_stepped()
    cuda.take(GIB)
    cuda.take(100 * MIB - GIB)
    assert told_of_a_trough(one) == []
    assert cuda.kept == GIB, "in the midst of a mini-batch nothing is given back"
    orders.take(one, {"do": "resume", "gen": 1, "seq": 5, "at_step": -1, "bytes": 0})
    assert one.due, "another order does not undo it"
    one.link._outbox.clear()
    begun = time.monotonic()
    one.optimizer_stepped()
    assert time.monotonic() - begun >= 0.2
    assert cuda.kept == 100 * MIB
    (line,) = one.link._outbox
    assert (line["type"], line["seq"], line["step"], line["reserved_bytes"]) == ("progress", 4, 1, 100 * MIB)
    one.optimizer_stepped()
    assert len(one.link._outbox) == 1
    assert not one.due


def test_a_script_leaves_its_trough_for_the_next_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary, "STAND_S", 2 * PATIENCE_S)
    one = process()
    one.optimizer_stepped()
    told_of_a_trough(one)
    thread = threading.Thread(target=one.optimizer_stepped, daemon=True)
    thread.start()
    until = time.monotonic() + PATIENCE_S
    while not one.link._outbox and time.monotonic() < until:
        time.sleep(0.001)
    orders.take(one, {"do": "hold", "gen": 1, "seq": 5, "at_step": -1, "bytes": 0})
    while not one.held and time.monotonic() < until:
        time.sleep(0.001)
    assert one.held
    orders.take(one, {"do": "resume", "gen": 1, "seq": 6, "at_step": -1, "bytes": 0})
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_trough_that_nobody_waits_for_any_more_is_passed_by(
    cuda: PlayedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_cycle, "TROUGH_S", 0.0)
    monkeypatch.setattr(boundary, "STAND_S", PATIENCE_S)
    cuda._initialized = True
    one = process()
    one.optimizer_stepped()
    cuda.take(GIB)
    cuda.take(100 * MIB - GIB)
    told_of_a_trough(one)
    one.optimizer_stepped()
    assert not one.link._outbox
    assert cuda.kept == GIB
    assert one.trough is None


@pytest.mark.parametrize("tells", ["optimizer", "step_end", "nothing"])
def test_a_script_is_sampled_by_one_thread_at_a_time(tells: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    monkeypatch.setattr(memory_cycle.threading.Thread, "start", lambda thread: begun.append(thread.name))
    one = process()
    if tells == "optimizer":
        one.optimizer_stepped()
    elif tells == "step_end":
        one.begin_explicit()
    for seq in (1, 2):
        orders.take(one, {"do": "sample", "gen": 1, "seq": seq, "at_step": -1, "bytes": 0})
    assert begun == ["gpu-arbiter-cycle"]
    assert one.order is None


def test_of_a_script_that_tells_its_steps_samples_leave_its_figures_and_its_own_peak_as_they_are(
    cuda: PlayedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_cycle, "WINDOW_S", PATIENCE_S)
    monkeypatch.setattr(process_memory, "forget_peak", lambda devices: pytest.fail("the peak is forgotten"))
    cuda._initialized = True
    one = process()
    monkeypatch.setattr(AgentLink, "connected", True)
    one.optimizer_stepped()
    before = one.cycle_bytes, one.trough_bytes, one.peak_bytes
    orders.take(one, {"do": "sample", "gen": 1, "seq": 1, "at_step": -1, "bytes": 0})
    until = time.monotonic() + PATIENCE_S
    while not one.link._outbox:
        assert time.monotonic() < until
        one.optimizer_stepped()
    one.parked = True  # what is in memory now is no part of the cycle
    while one.sampled:
        assert time.monotonic() < until
        time.sleep(0.001)
    assert (one.cycle_bytes, one.trough_bytes, one.peak_bytes) == before
