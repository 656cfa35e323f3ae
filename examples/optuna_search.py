"""An Optuna search inside one job: preempted in the middle of a trial, it goes on with that trial elsewhere.

python examples/optuna_search.py                                # by hand
gpu-arbiter submit -- python examples/optuna_search.py          # under the arbiter

To let the arbiter run the trials side by side as jobs of their own, use ``gpu-arbiter submit --trials`` instead.
"""

import sys
import time

import optuna
import torch

from app_agent import session
from app_agent.integrations import random_states
from app_agent.integrations.optuna import Search, storage
from launch.training import plain

options = plain.parse_arguments("Search for a learning rate; --steps are those of one trial.")
digits, _, _ = plain.prepare(options)
study = optuna.create_study(
    storage=storage(),
    study_name="digits",
    load_if_exists=True,
    direction="maximize",
    sampler=optuna.samplers.TPESampler(seed=options.seed),
    pruner=optuna.pruners.HyperbandPruner(min_resource=options.eval_every, max_resource=options.steps),
)
search = Search(study, trials=8, steps=options.steps)


def objective(trial: optuna.Trial) -> float:
    torch.manual_seed(options.seed)
    model = plain.build_model(trial.suggest_categorical("hidden", [16, 64, 256]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True))

    def save(folder: str) -> None:
        torch.save([model.state_dict(), optimizer.state_dict()], f"{folder}/state.pt")
        random_states.save(f"{folder}/random.pt")

    def load(folder: str) -> None:
        weights, moments = torch.load(f"{folder}/state.pt")
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        random_states.load(f"{folder}/random.pt")

    for step in range(search.restore(load), options.steps):
        begun = time.perf_counter()
        plain.train_step(model, optimizer, digits.batch(step, options.batch, options.seed))
        plain.pace(begun, options.step_ms)
        if (step + 1) % options.eval_every == 0 and search.report(plain.measure_accuracy(model, digits), step):
            raise optuna.TrialPruned
        if search.step_end(step, save=save):
            sys.exit(session.EXIT_REQUEUE)
    return plain.measure_accuracy(model, digits)


search.optimize(objective)
for done in study.trials:
    print(f"{done.number} {done.state.name.lower()} {done.params} {done.value:.4f}")
