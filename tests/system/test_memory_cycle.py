"""Scripts that tell nothing of their steps: their mini-batch time is found from their own memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.site.site import bootstrap_dir
from node_agent.core import measurements
from node_agent.devices.simulated import SimulatedBackend
from node_agent.introspection import from_counter
from protocol.worker import Counted, Hello, Progress
from tests.support.node_site import NODE, node_site, task_order
from tests.support.worker_agent import Worker, WorkerAgent

PERIOD_S = 0.3
MIB = 2**20
#: Activations live for a share of each mini-batch, which begins by the clock under any other load.
MANUAL = f"""
import mmap, time
begun, number = time.monotonic(), 0
while True:
    number += 1
    activations = mmap.mmap(-1, {64 * MIB}, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(0, {64 * MIB}, 4096):
        activations[page] = 1
    time.sleep(max(0, begun + (number - 0.4) * {PERIOD_S} - time.monotonic()))
    activations.close()
    time.sleep(max(0, begun + number * {PERIOD_S} - time.monotonic()))
"""
#: The same with a step after each fourth of them.
ACCUMULATING = "from app_agent import session" + MANUAL + "    if number % 4 == 0:\n        session.step_end()\n"
#: Tells of its steps once it is told to.
LATE_STEPS = """
import sys, time
from app_agent import session
while not sys.stdin.readline():
    pass
while True:
    time.sleep(0.01)
    session.step_end()
"""

pytestmark = [pytest.mark.alone, pytest.mark.slow]


@pytest.fixture(scope="module")
def manual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerAgent]:
    """The agent of a loop without an optimizer, which is sampled from now on."""
    folder = tmp_path_factory.mktemp("manual")
    with WorkerAgent(folder / "agent.sock") as agent, Worker(folder, "-c", MANUAL):
        agent.wait(Hello)
        agent.order("sample")
        yield agent


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("manual")  # its window of samples goes on beside these
async def test_a_node_agent_has_scripts_sampled_and_reports_their_mini_batch_times_and_where_those_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measurements, "SAMPLE_AFTER_S", 5.0)
    async with node_site(tmp_path, backend=SimulatedBackend(NODE, 2), bootstrap_dir=str(bootstrap_dir())) as site:
        await site.plan(
            task_order(tmp_path, "ana-1.0-a0", sys.executable, "-c", ACCUMULATING),
            task_order(tmp_path, "bob-1.0-a0", sys.executable, "-c", MANUAL, gpus=(1,)),
        )
        report = await site.report(
            lambda told: (
                any(task.measured.micro_batches for task in told.tasks)
                and any(task.measured.source == "allocator" for task in told.tasks)
            ),
            patience_s=150.0,
        )
    steps, manual = sorted(report.tasks, key=lambda status: status.task)
    assert (steps.measured.source, steps.measured.micro_batches) == ("steps", 4)
    assert steps.step_s == pytest.approx(4 * PERIOD_S, rel=0.05)
    assert manual.measured.source == "allocator"
    assert manual.step_s == pytest.approx(PERIOD_S, rel=0.05)
    assert 0 < manual.measured.confidence <= 1
    assert set(manual.measured.periods) == {"allocator"}
    assert manual.measured.trough_bytes < manual.measured.peak_bytes


@pytest.mark.timeout(300)
def test_a_window_of_samples_tells_the_period_the_trough_and_the_peak_of_a_loop_without_an_optimizer(
    manual: WorkerAgent,
) -> None:
    manual.wait(Counted, seq=manual.seq, last=True)
    told = manual.wait(Progress, seq=manual.order("tell").seq)
    at_trough = manual.wait(Progress, seq=manual.order("trough").seq)
    lines = [line for line in manual.heard if isinstance(line, Counted)]
    found = from_counter([at for line in lines for at in line.at_s], [held for line in lines for held in line.bytes])
    assert found is not None
    assert found.period_s == pytest.approx(PERIOD_S, rel=0.05)
    assert 60 * MIB < told.peak_bytes - told.trough_bytes < 100 * MIB
    assert told.step == at_trough.step == -1  # a period is no count of steps


@pytest.mark.timeout(300)
def test_sampling_ends_with_the_first_step_that_the_script_tells(tmp_path: Path) -> None:
    with WorkerAgent(tmp_path / "agent.sock") as agent, Worker(tmp_path, "-c", LATE_STEPS) as worker:
        agent.wait(Hello)
        order = agent.order("sample")
        agent.wait(Counted, seq=order.seq)
        assert worker.process.stdin is not None
        worker.process.stdin.write("begin\n")
        worker.process.stdin.flush()
        agent.wait(Counted, seq=order.seq, last=True)
        agent.wait(Progress, step=lambda step: step > 3)
        agent.wait(Progress, seq=agent.order("trough").seq)  # at the end of a mini-batch
        assert len([line for line in agent.heard if isinstance(line, Counted)]) < 15
        agent.wait(
            Counted, seq=agent.order("sample").seq
        )  # of a script that tells its steps, its passes are looked for
