"""Real training on one virtual GPU in turns: exact to the bit, one at a time, also if the node agent is killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from launch import training
from launch.site.site import bootstrap_dir
from protocol.messages import NodeReport, TaskOrder
from tests.support.gpu_watch import GpuWatch
from tests.support.node_site import NodeProcess, find_task, node_process, node_site, plan_of, task_order
from tests.support.patience import PATIENCE_S

SCRIPTS = Path(training.__file__).parent
STEPS = ("--steps", "300", "--step-ms", "15", "--hidden", "512")
QUANTUM_S = 0.4

pytestmark = [pytest.mark.clock, pytest.mark.slow, pytest.mark.timeout(300)]


def order(folder: Path, name: str, script: str, seed: int, seat_number: int) -> TaskOrder:
    out = folder / f"{name}.sha256"
    command = (sys.executable, str(SCRIPTS / script), *STEPS, "--seed", str(seed), "--out", str(out))
    env = {"PYTHONPATH": str(bootstrap_dir())}
    return task_order(folder, f"{name}-1.0-a0", *command, grace_s=30.0, seat_number=seat_number, env=env)


def pair(folder: Path) -> tuple[TaskOrder, TaskOrder]:
    """A script that knows of us and one that does not, on two seats of one GPU."""
    return order(folder, "ana", "digits.py", 3, 0), order(folder, "bob", "plain.py", 5, 1)


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The SHA-256 of the weights of each script run by hand, one after the other."""
    folder = tmp_path_factory.mktemp("alone")
    digests = {}
    for name, script, seed in (("ana", "digits.py", 3), ("bob", "plain.py", 5)):
        out = folder / name
        line = [sys.executable, str(SCRIPTS / script), *STEPS, "--seed", str(seed), "--out", str(out)]
        subprocess.run(line, check=True, timeout=PATIENCE_S)
        digests[name] = out.read_text()
    return digests


def digests(folder: Path) -> dict[str, str]:
    return {name: (folder / f"{name}.sha256").read_text() for name in ("ana", "bob")}


def both_ended(report: NodeReport) -> bool:
    found = [find_task(report, f"{name}-1.0-a0") for name in ("ana", "bob")]
    return all(task is not None and task.phase == "exited" for task in found)


async def test_two_jobs_in_turns_end_with_the_weights_of_runs_alone_and_never_meet_on_the_gpu(
    tmp_path: Path, alone: dict[str, str]
) -> None:
    async with node_site(tmp_path, bootstrap_dir=str(bootstrap_dir())) as site:
        site.sharing, site.quantum_s = "timeslice", QUANTUM_S
        used: list[tuple[int, int]] = []
        with GpuWatch(tmp_path) as watch:
            await site.plan(*pair(tmp_path))
            while True:
                report = await site.report()
                used += [(seat.used_bytes, seat.memory_bytes) for seat in report.gpus]
                if both_ended(report):
                    break
    tasks = [find_task(report, f"{name}-1.0-a0") for name in ("ana", "bob")]
    assert [task.outcome for task in tasks if task] == ["finished", "finished"]
    assert sum(task.suspensions for task in tasks if task) >= 4, "they hardly took turns"
    assert watch.conflicts == []
    assert watch.hand_overs >= 4
    assert all(bytes_used <= total for bytes_used, total in used)
    assert digests(tmp_path) == alone


async def run_until_dead(node: NodeProcess, plan: object, patience_s: float) -> bool:
    """Let a node agent run until it is killed at its point; False if it never came there."""
    await node.plan(plan)  # type: ignore[arg-type]
    try:
        async with asyncio.timeout(patience_s):
            await node.process.wait()
    except TimeoutError:
        return False
    return True


#: Where the next incarnation finds a worker that was just parked.
LABEL = "after NoteWorker"
#: Each where it finds something else: an order under way, a worker about to resume.
MORE_LABELS = (
    "after OrderWorker:suspend",
    "before OrderWorker:resume",
    "before OrderWorker:suspend",
    "hearing WorkerSaid:Suspended",
    "before StartWorker",
    "after StartWorker",
    "after OrderWorker:resume",
    "hearing WorkerSaid:Resumed",
    "hearing WorkerGone",
)


@pytest.mark.parametrize("label", [LABEL, *(pytest.param(label, marks=pytest.mark.full) for label in MORE_LABELS)])
async def test_a_node_agent_killed_at_any_point_of_a_turn_costs_no_step_and_no_bit(
    tmp_path: Path, alone: dict[str, str], label: str
) -> None:
    orders = pair(tmp_path)
    with GpuWatch(tmp_path) as watch:
        async with node_process(tmp_path, dies_at=label) as node:
            plan = plan_of(orders, epoch=1, seq=1, sharing="timeslice", quantum_s=QUANTUM_S)
            assert await run_until_dead(node, plan, 60.0), "it was never killed: the label names no point it passed"
        async with node_process(tmp_path) as node:
            await node.plan(plan_of(orders, epoch=1, seq=2, sharing="timeslice", quantum_s=QUANTUM_S))
            report = await node.report(both_ended, patience_s=100.0)
    outcomes = [task.outcome for name in ("ana", "bob") if (task := find_task(report, f"{name}-1.0-a0"))]
    assert outcomes == ["finished", "finished"]
    assert watch.conflicts == []
    assert digests(tmp_path) == alone


#: Training whose GPU memory does not go when it is parked: an array of NumPy's, the buckets in which DDP reduces
#: gradients, or what another of its processes holds, as one that has opened its memory by CUDA IPC; and training that
#: has taken its objects from the garbage collector, whose memory does go.
KEEPING = """
import gc, subprocess, sys, time
import numpy, torch
kind, folder = sys.argv[1:]
model = torch.nn.Linear(8192, 7000) if kind == "ddp" else torch.nn.Linear(64, 64)
size = model.in_features
held = numpy.ones(40_000_000) if kind == "numpy" else torch.ones(60_000_000) if kind == "frozen" else None
if kind == "ddp":
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
if kind == "frozen":
    gc.freeze()
if kind == "ipc":
    holds = "import sys; held = bytearray(b'1') * 640_000_000; print(flush=True); sys.stdin.read()"
    other = subprocess.Popen([sys.executable, "-I", "-c", holds], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    other.stdout.readline()
for step in range(60):
    model(torch.ones(1, size)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
"""


@pytest.mark.full
@pytest.mark.parametrize(("kind", "suspended"), [("numpy", False), ("ddp", False), ("ipc", False), ("frozen", True)])
async def test_a_job_that_keeps_memory_when_it_is_parked_does_not_leave_the_gpu_idle(
    tmp_path: Path, kind: str, suspended: bool
) -> None:
    command = (sys.executable, "-c", KEEPING, kind, str(tmp_path))
    env = {"PYTHONPATH": str(bootstrap_dir())}
    keeper = task_order(tmp_path, "ana-1.0-a0", *command, grace_s=30.0, seat_number=0, env=env)
    async with node_site(tmp_path, bootstrap_dir=str(bootstrap_dir())) as site:
        site.sharing, site.quantum_s = "timeslice", QUANTUM_S
        await site.plan(keeper, order(tmp_path, "bob", "plain.py", 5, 1))
        report = await site.report(both_ended, patience_s=150.0)
    ana, bob = (find_task(report, f"{name}-1.0-a0") for name in ("ana", "bob"))
    assert ana is not None
    assert bob is not None
    assert (ana.outcome, bob.outcome) == ("finished", "finished"), (ana.reason, bob.reason)
    assert ana.suspensions > 1 if suspended else ana.suspensions == 1
