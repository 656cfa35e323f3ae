"""What makes the attempts of a job one run of an experiment tracker: variables that WandB and MLflow read.

WandB goes on with the run of a given id. MLflow goes on only with a run that exists, so its runs get tags by which a
script finds its former one (docs/training.md, "Trackers"). A variable that a user sets is left as it is.
"""

from __future__ import annotations

import re
from hashlib import blake2s

import msgspec

from node_agent.core.events import StartWorker

#: WandB takes up to 128 characters, also of other kinds; other tools that show the id take fewer.
RUN_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
#: The values of ``WANDB_RESUME`` with which one run id serves the first attempt and the later ones.
GOES_ON = ("allow", "auto")


def variables(effect: StartWorker) -> dict[str, str]:
    """Return the variables for a task that its user has not set, neither in `env` nor as secrets."""
    launch = effect.launch
    tags = {"gpu_arbiter_run": launch.run, "gpu_arbiter_job": effect.job}
    resume = launch.env.get("WANDB_RESUME", "allow")
    ours = {
        "WANDB_RUN_ID": run_id(launch.run, effect.job),
        "WANDB_RESUME": "allow",  # begin the run if it is new, else go on with it
        "MLFLOW_RUN_CONTEXT": msgspec.json.encode(tags).decode(),
    }
    if resume not in GOES_ON:
        del ours["WANDB_RUN_ID"]
    return {name: value for name, value in ours.items() if name not in launch.env and name not in launch.secrets}


def run_id(run: str, job: str) -> str:
    """Return the id of a job's run at WandB: the same in every attempt, and no other job's, also of another submission.

    `run` is the submission's id; an app that an earlier version submitted has none.
    """
    plain = f"{run}-{job.rpartition('.')[2]}" if run else job.replace(".", "-")
    if RUN_ID.fullmatch(plain):
        return plain
    readable = re.sub(r"[^A-Za-z0-9_-]+", "-", plain)[:40]
    return f"{readable}-{blake2s(f'{run} {job}'.encode(), digest_size=8).hexdigest()}"
