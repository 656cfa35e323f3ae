"""Every example but the grid of futures runs by hand, with nothing of ours around it.

Those of a framework do so in their own tests; the grid runs on a site of its own.

The search runs under a node agent too, the small one of `tests/support/worker_agent.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from protocol.worker import EXIT_REQUEUE, Finished, Progress, Resumed, Saved, Suspended
from tests.support.patience import PATIENCE_S
from tests.support.thread_site import thread_site
from tests.support.worker_agent import Worker, WorkerAgent

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SEARCH = (str(EXAMPLES / "optuna_search.py"), "--steps", "60", "--eval-every", "20", "--threads", "1")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
needs_optuna = pytest.mark.skipif(find_spec("optuna") is None, reason="optuna missing: pip install 'gpu-arbiter[dev]'")


def by_hand(*command: str, folder: Path) -> str:
    """What the script prints."""
    line, env = [sys.executable, *command], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[WorkerAgent]:
    with WorkerAgent(tmp_path / "agent.sock") as one:
        yield one


@pytest.fixture(scope="module")
def search_alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return by_hand(*SEARCH, folder=tmp_path_factory.mktemp("alone"))


@pytest.mark.full
def test_the_scripts_on_one_page_learn_what_they_say(tmp_path: Path) -> None:
    loss = by_hand(str(EXAMPLES / "plain.py"), folder=tmp_path)
    assert float(loss.removeprefix("loss ")) < 0.05
    assert by_hand(str(EXAMPLES / "checkpointed.py"), folder=tmp_path) == "y = 3.00 x + 1.00\n"
    assert not list(tmp_path.iterdir()), "a script run by hand leaves nothing behind"


@pytest.mark.full
def test_the_grid_of_futures_finds_on_nodes_the_figures_it_finds_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with thread_site(tmp_path / "site") as site:
        monkeypatch.setenv("GPU_ARBITER_URL", f"unix://{site.socket}")
        rows = by_hand(str(EXAMPLES / "futures_grid.py"), folder=tmp_path).splitlines()
    assert [row.rpartition(" accuracy")[0] for row in rows] == [
        f"hidden {hidden} lr {lr}" for hidden in (16, 64) for lr in (0.001, 0.01)
    ]
    here = by_hand("-c", "from futures_grid import accuracy; print(f'{accuracy(64, 0.01):.4f}')", folder=EXAMPLES)
    assert rows[-1] == f"hidden 64 lr 0.01 accuracy {here.strip()}"


@pytest.mark.full
@needs_optuna
def test_the_search_makes_its_trials_and_prunes_some(search_alone: str) -> None:
    rows = [line.split() for line in search_alone.splitlines()]
    assert [row[0] for row in rows] == [str(number) for number in range(8)]
    assert {row[1] for row in rows} == {"complete", "pruned"}


@needs_optuna
@pytest.mark.full
def test_a_search_suspended_in_one_trial_and_preempted_in_another_makes_the_trials_of_one_left_alone(
    agent: WorkerAgent, tmp_path: Path, search_alone: str
) -> None:
    options = (*SEARCH, "--step-ms", "10")
    with Worker(tmp_path, *options) as first:
        agent.wait(Progress, step=lambda step: step >= 10)
        suspended = agent.wait(Suspended, seq=agent.order("suspend").seq)
        agent.wait(Resumed, seq=agent.order("resume").seq, step=suspended.step)
        agent.wait(Progress, step=lambda step: step >= 70)
        saved = agent.wait(Saved, seq=agent.order("leave").seq, leaving=True)
        assert first.end()[0] == EXIT_REQUEUE
    heard = len(agent.heard)
    with Worker(tmp_path, *options, attempt=1) as second:
        agent.wait(Progress, since=heard, start_step=saved.step)
        code, said, errors = second.end()
    assert (code, said) == (0, search_alone), errors
    assert agent.wait(Finished, since=heard).metrics["best"] == pytest.approx(
        max(float(line.split()[-1]) for line in said.splitlines() if "complete" in line), abs=1e-4
    )


def test_the_page_about_the_examples_names_each_of_them() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in sorted(EXAMPLES.glob("*.py")) if f"]({path.name})" not in page] == []
