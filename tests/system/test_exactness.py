"""A job that is suspended, resumed, preempted and migrated ends with the weights of the same script run alone.

Real PyTorch, real processes, the real node agent; the arbiter is the test, so that every move happens for certain.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from launch import training
from launch.site.site import bootstrap_dir
from protocol.messages import PreemptBy, TaskOrder
from tests.support.node_site import Site, node_site, task_order
from tests.support.patience import PATIENCE_S

SCRIPTS = Path(training.__file__).parent
ARGUMENTS = ("--steps", "160", "--step-ms", "15", "--seed", "3")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def alone(script: str, folder: Path) -> str:
    """The SHA-256 of the weights of `script` run by hand, without anything of ours around it."""
    out = folder / "alone.sha256"
    subprocess.run(
        [sys.executable, str(SCRIPTS / script), *ARGUMENTS, "--out", str(out)], check=True, timeout=PATIENCE_S
    )
    return out.read_text()


def order(folder: Path, script: str, attempt: int, gpu: int, by: PreemptBy = "auto") -> TaskOrder:
    command = (sys.executable, str(SCRIPTS / script), *ARGUMENTS, "--out", str(folder / "shared.sha256"))
    made = task_order(folder, f"ana-1.0-a{attempt}", *command, gpus=(gpu,), grace_s=30.0)
    return replace(made, preempt_by=by)


async def suspend_and_resume(site: Site, running: TaskOrder, *, at: int) -> int:
    """Park the task once it has made step `at`, resume it, and return the step it was parked at."""
    task = running.task
    await site.status(task, lambda status: status.step >= at)
    await site.plan(replace(running, want="vacate", preempt_by="suspend"))
    parked = await site.phase(task, "suspended")
    await site.plan(running)
    again = await site.status(task, lambda status: status.phase == "running" and status.step > parked.step)
    assert again.suspensions > 0
    return parked.step


async def test_suspended_preempted_and_migrated_the_weights_are_those_of_the_same_script_alone(tmp_path: Path) -> None:
    async with node_site(tmp_path, bootstrap_dir=str(bootstrap_dir())) as site:
        first = order(tmp_path, "digits.py", 0, gpu=0)
        await site.plan(first)
        await suspend_and_resume(site, first, at=10)
        await suspend_and_resume(site, first, at=30)
        await site.status(first.task, lambda status: status.step >= 60)
        await site.plan(replace(first, want="vacate"))
        left = await site.exited(first.task)
        assert (left.outcome, left.exit_code, left.saved_step) == ("preempted", 75, left.step)

        second = order(tmp_path, "digits.py", 1, gpu=1)
        await site.plan(second)
        again = await site.status(second.task, lambda status: status.phase == "running" and status.step >= 0)
        assert again.start_step == left.step, "a step was lost or made twice"
        await suspend_and_resume(site, second, at=100)
        done = await site.exited(second.task)
        assert (done.outcome, done.step) == ("finished", 159)
    assert (tmp_path / "shared.sha256").read_text() == alone("digits.py", tmp_path)


@pytest.mark.full
async def test_an_unchanged_script_suspended_and_resumed_ends_with_the_weights_of_a_run_alone(tmp_path: Path) -> None:
    async with node_site(tmp_path, bootstrap_dir=str(bootstrap_dir())) as site:
        only = order(tmp_path, "plain.py", 0, gpu=0)
        await site.plan(only)
        await suspend_and_resume(site, only, at=20)
        await suspend_and_resume(site, only, at=60)
        done = await site.exited(only.task)
        assert (done.outcome, done.suspensions) == ("finished", 2)
    assert (tmp_path / "shared.sha256").read_text() == alone("plain.py", tmp_path)
