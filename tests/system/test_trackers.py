"""All attempts of a job are one run of an experiment tracker, unless the user says otherwise."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from node_agent.workers.trackers import RUN_ID, run_id
from tests.support.node_site import Site, node_site, task_order

PRINTING = "import json, os; print(json.dumps({n: v for n, v in os.environ.items() if n[:6] in ('WANDB_', 'MLFLOW')}))"


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with node_site(tmp_path) as made:
        yield made


async def variables(
    site: Site, task: str, run: str, env: dict[str, str] | None = None, secrets: dict[str, str] | None = None
) -> dict[str, str]:
    """The trackers' variables in a task's own environment."""
    order = task_order(site.folder, task, sys.executable, "-c", PRINTING, env=env)
    assert order.launch is not None
    await site.plan(replace(order, launch=replace(order.launch, run=run, secrets=secrets or {})))
    assert (await site.exited(task)).outcome == "finished"
    found: dict[str, str] = json.loads((await site.log(task)).data)
    return found


async def test_all_attempts_of_a_job_are_one_run_and_other_jobs_and_submissions_are_others(site: Site) -> None:
    first = await variables(site, "ada-1.0-a0", "ada-1-5f")
    assert (first["WANDB_RUN_ID"], first["WANDB_RESUME"]) == ("ada-1-5f-0", "allow")
    assert json.loads(first["MLFLOW_RUN_CONTEXT"]) == {"gpu_arbiter_run": "ada-1-5f", "gpu_arbiter_job": "ada-1.0"}
    assert await variables(site, "ada-1.0-a1", "ada-1-5f") == first
    others = [
        await variables(site, "ada-1.1-a0", "ada-1-5f"),
        await variables(site, "ada-1.0-a2", "ada-1-60"),
        await variables(site, "ada-2.0-a0", "ada-2-5f"),
    ]
    for name in ("WANDB_RUN_ID", "MLFLOW_RUN_CONTEXT"):
        assert len({each[name] for each in (first, *others)}) == 4


@pytest.mark.parametrize("name", ["WANDB_RUN_ID", "WANDB_RESUME", "MLFLOW_RUN_CONTEXT", "WANDB_MODE"])
async def test_what_the_user_sets_of_a_tracker_stays_as_it_is(site: Site, name: str) -> None:
    (site.folder / "secret").write_text("of-a-file")
    by_env = await variables(site, "ada-1.0-a0", "ada-1-5f", {name: "mine"})
    by_secret = await variables(site, "ada-1.0-a1", "ada-1-5f", secrets={name: str(site.folder / "secret")})
    assert (by_env[name], by_secret[name]) == ("mine", "of-a-file")


@pytest.mark.parametrize("resume", ["never", "must"])
async def test_a_user_who_forbids_resuming_gets_a_new_run_at_each_attempt(site: Site, resume: str) -> None:
    assert "WANDB_RUN_ID" not in await variables(site, "ada-1.0-a0", "ada-1-5f", {"WANDB_RESUME": resume})


def test_an_id_that_wandb_would_refuse_is_replaced_by_one_that_it_takes() -> None:
    runs = ["", "ada-1-5f", "a" * 60, "a" * 61, "a/b", "a#b", "\u00e4"]
    made = [run_id(run, job) for run in runs for job in ("ada-1.0", "ada-1.10", "ada-1.1")]
    assert all(RUN_ID.fullmatch(each) for each in made), made
    assert len(set(made)) == len(made)
