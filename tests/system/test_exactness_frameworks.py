"""With every framework of `examples/` a job that is disturbed ends with the weights of the same script run by hand.

Suspended and resumed, its node agent killed while it stands and while it runs, preempted by checkpoint and moved to
another GPU. Real PyTorch, real processes, a real node agent in a process of its own; the arbiter is the test.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from launch.site.site import bootstrap_dir
from node_agent import procfs
from protocol.messages import TaskOrder, TaskStatus
from tests.support.node_site import NodeProcess, find_task, node_process, plan_of, task_order
from tests.support.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
FAST = ("--steps", "300", "--seed", "3", "--threads", "1")
OPTIONS = (*FAST, "--step-ms", "15")
#: Lightning and transformers take some ten seconds to be imported on an idle core.

#: `make check` disturbs a plain script in test_exactness.py, DDP in test_several_nodes.py, and the callbacks in
#: tests/core/test_integrations.py.
pytestmark = [pytest.mark.full, pytest.mark.slow, pytest.mark.timeout(300)]


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [module for module in modules if find_spec(module) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} missing: pip install 'gpu-arbiter[dev]'")


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone")
FRAMEWORKS = {
    "plain PyTorch": ((sys.executable, str(ROOT / "launch" / "training" / "digits.py")), 1, ("torch",)),
    "Lightning": ((sys.executable, str(EXAMPLES / "lightning_digits.py")), 1, ("lightning",)),
    "Hugging Face": ((sys.executable, str(EXAMPLES / "hf_trainer.py")), 1, ("transformers", "accelerate")),
    "DDP": ((*TORCHRUN, str(EXAMPLES / "ddp.py")), 2, ("torch",)),
    "FSDP2": ((*TORCHRUN, str(EXAMPLES / "fsdp.py")), 2, ("torch",)),
}
every_framework = pytest.mark.parametrize(
    "framework", [pytest.param(name, marks=needs(*FRAMEWORKS[name][2]), id=name) for name in FRAMEWORKS]
)

#: What a framework is left with that was never told of us: the example's callback is replaced by one that does nothing.
WITHOUT_CALLBACK = {
    "Lightning": """
import runpy, sys
from lightning.pytorch import Callback
from app_agent.integrations import lightning
class Nothing(Callback):
    def latest(self): return None
lightning.GpuArbiter = Nothing
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
""",
    "Hugging Face": """
import runpy, sys
from app_agent.integrations import huggingface
class Nothing:
    def __init__(self, trainer): pass
    def latest(self): return None
huggingface.GpuArbiter = Nothing
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
""",
}


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tmp_path: Path) -> Iterator[None]:
    """Kill what a failed test has left running."""
    yield
    for path in tmp_path.glob("state/workers/*/started.json"):
        started = msgspec.json.decode(path.read_bytes())
        if procfs.is_running(started["shim"], started["shim_ticks"]):
            os.kill(started["shim"], signal.SIGKILL)  # its task dies with it


class Alone:
    """The script run by hand, without anything of ours around it, while the test goes on."""

    def __init__(self, folder: Path, framework: str) -> None:
        command, gpus, _ = FRAMEWORKS[framework]
        if gpus > 1:
            command = (*TORCHRUN, "--nproc-per-node", str(gpus), command[-1])
        self._out, self._log = folder / "weights.sha256", folder / "log"
        options = (*command, *FAST, "--out", str(self._out))
        with self._log.open("w") as log:
            self._process = subprocess.Popen(options, cwd=folder, stdout=log, stderr=log)

    def weights(self) -> str:
        """Their SHA-256. They are written before PyTorch ends its threads, which at times aborts a process (gloo)."""
        self._process.wait(PATIENCE_S)
        assert self._out.exists(), self._log.read_text()
        return self._out.read_text()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Alone]]:
    """Start the framework's script, once for all tests."""
    started: dict[str, Alone] = {}

    def start(framework: str) -> Alone:
        if framework not in started:
            started[framework] = Alone(tmp_path_factory.mktemp("alone"), framework)
        return started[framework]

    yield start
    for one in started.values():
        one.end()


class Job:
    """The arbiter of one job on one node."""

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self.folder, self.command = folder, command
        self.out = folder / "shared.sha256"
        self._seq = 0
        self._node: NodeProcess
        self._stack = AsyncExitStack()

    async def start_node_agent(self) -> None:
        self._node = await self._stack.enter_async_context(node_process(self.folder))

    async def restart_node_agent(self) -> None:
        """As after a crash: it had no moment to write anything down."""
        await self._node.kill()
        await self.start_node_agent()

    def order(self, attempt: int, gpus: Sequence[int]) -> TaskOrder:
        env = {"PYTHONPATH": str(bootstrap_dir()), "TMPDIR": str(self.folder)}
        command = (*self.command, *OPTIONS, "--out", str(self.out))
        return task_order(self.folder, f"ana-1.0-a{attempt}", *command, gpus=gpus, grace_s=30.0, env=env)

    async def plan(self, *orders: TaskOrder) -> None:
        self._seq += 1
        await self._node.plan(plan_of(orders, epoch=1, seq=self._seq))

    async def status(self, order: TaskOrder, wanted: Callable[[TaskStatus], bool]) -> TaskStatus:
        """The next status that is `wanted`; an end that is not fails at once."""
        patience = time.monotonic() + PATIENCE_S
        last = None
        while time.monotonic() < patience:
            status = find_task(await self._node.report(), order.task)
            if status is not None and wanted(status):
                return status
            last = status or last
            assert last is None or last.phase != "exited", last.reason or last
        raise AssertionError(f"no such status; the last one was {last}")

    async def suspend(self, order: TaskOrder, *, at: int) -> TaskStatus:
        """Park the task once it has made step `at`."""
        await self.status(order, lambda status: status.step >= at)
        await self.plan(replace(order, want="vacate", preempt_by="suspend"))
        return await self.status(order, lambda status: status.phase == "suspended")

    async def resume(self, order: TaskOrder, parked: TaskStatus) -> None:
        await self.plan(order)
        await self.status(order, lambda status: status.phase == "running" and status.step > parked.step)

    async def ended(self, order: TaskOrder) -> TaskStatus:
        return await self.status(order, lambda status: status.phase == "exited")

    async def close(self) -> None:
        await self._stack.aclose()


@asynccontextmanager
async def job(folder: Path, command: Sequence[str]) -> AsyncIterator[Job]:
    made = Job(folder, command)
    await made.start_node_agent()
    try:
        yield made
    finally:
        await made.close()


@every_framework
async def test_suspended_orphaned_preempted_and_moved_the_weights_are_those_of_the_script_alone(
    tmp_path: Path, alone: Callable[[str], Alone], framework: str
) -> None:
    solo = alone(framework)
    command, gpus, _ = FRAMEWORKS[framework]
    here, there = ((0,), (1,)) if gpus == 1 else ((0, 1), (1, 0))
    async with job(tmp_path, command) as it:
        first = it.order(0, here)
        await it.plan(first)
        parked = await it.suspend(first, at=5)
        await it.restart_node_agent()
        await it.resume(first, parked)
        await it.resume(first, await it.suspend(first, at=30))
        await it.status(first, lambda status: status.step >= 60)
        await it.plan(replace(first, want="vacate", preempt_by="checkpoint"))
        left = await it.ended(first)
        assert left.outcome == "preempted", left.reason
        assert left.suspensions == 2

        second = it.order(1, there)
        await it.plan(second)
        again = await it.status(second, lambda status: status.phase == "running" and status.step > left.saved_step)
        assert again.start_step == left.saved_step, "a step was lost or made twice"
        await it.resume(second, await it.suspend(second, at=left.saved_step + 10))
        await it.restart_node_agent()
        done = await it.ended(second)
        assert done.outcome == "finished", done.reason
        assert done.suspensions == 1
    assert it.out.read_text() == solo.weights()


@pytest.mark.parametrize("framework", [pytest.param(f, marks=needs(*FRAMEWORKS[f][2])) for f in WITHOUT_CALLBACK])
async def test_a_framework_without_our_callback_is_suspended_at_its_optimizer_steps_and_ends_with_the_same_weights(
    tmp_path: Path, alone: Callable[[str], Alone], framework: str
) -> None:
    solo = alone(framework)
    (python, script), _, _ = FRAMEWORKS[framework]
    async with job(tmp_path, (python, "-c", WITHOUT_CALLBACK[framework], script)) as it:
        only = it.order(0, (0,))
        await it.plan(only)
        for at in (5, 30, 60):
            await it.resume(only, await it.suspend(only, at=at))
        done = await it.ended(only)
        assert done.outcome == "finished", done.reason
        assert (done.step, done.suspensions, done.saved_step) == (299, 3, -1)
    assert it.out.read_text() == solo.weights()
