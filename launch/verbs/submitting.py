"""`submit`, `run`: hand an app over. `cancel`, `wait`: what becomes of it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from app_agent.core.spec import AppSpec
from launch import exit_codes, spec
from launch.client import Client, Until, ending, open_client
from launch.faults import usage
from launch.follow import follow_logs
from launch.surface import answering, emit, note, say, wants_json

PROGRAM = {"allow_interspersed_args": False}  # everything after the first word belongs to the user's program

Command = Annotated[
    list[str] | None, typer.Argument(metavar="[--] COMMAND [ARGS]...", help="the program and its arguments")
]
Gpus = Annotated[
    str | None,
    typer.Option(
        "-g",
        "--gpus",
        metavar="N[,N...]",
        help="GPUs each job needs at once, on one node (1); several numbers, smallest first, if it can change its size",
    ),
]
Tenant = Annotated[
    str | None, typer.Option(envvar="GPU_ARBITER_TENANT", help="who pays; the daemon's default otherwise")
]
Name = Annotated[str | None, typer.Option(help="for people; the script's name otherwise")]
Steps = Annotated[
    int | None, typer.Option(min=1, help="mini-batches of one whole training, if the script does not say")
]
Checkpoints = Annotated[
    Path | None, typer.Option("--checkpoint-dir", help="folder that every node sees (./checkpoints)")
]
Grace = Annotated[str | None, typer.Option(help="time to save before a preemption turns to force (120s)")]
Priority = Annotated[
    int | None,
    typer.Option(min=-1000, max=1000, help="on a shared GPU: not suspended for an app of lower priority (0)"),
]
Kind = Annotated[
    str | None,
    typer.Option("--class", help="batch, or trial: starts at once if it can, at the cost of one batch app (batch)"),
]
Cpus = Annotated[float | None, typer.Option(min=0, help="CPU cores each job needs on its node (none asked for)")]
Memory = Annotated[str | None, typer.Option(help="host memory each job needs on its node, such as 8G (none asked for)")]
Weight = Annotated[float | None, typer.Option(help="part of the GPU time among your tenant's apps, 1 being usual (1)")]
Utility = Annotated[
    str | None,
    typer.Option(help="what it is worth by when it ends: deadline:6h, soft:6h, none or sigmoid:50,2/h,6h (unsaid)"),
]
StepTime = Annotated[
    str | None, typer.Option("--step-time", help="time of one mini-batch on one GPU, until it is measured")
]
PreemptBy = Annotated[str | None, typer.Option(help="auto, checkpoint or suspend (auto)")]
Env = Annotated[list[str] | None, typer.Option("--env", help="NAME=VALUE, or NAME to pass on your own; repeatable")]
Restarts = Annotated[int | None, typer.Option("--max-restarts", min=0, help="new starts after failures (3)")]
TrialFile = Annotated[Path | None, typer.Option("--trials", help="search: a file of one line of arguments per trial")]
Trial = Annotated[list[str] | None, typer.Option("--trial", help="search: the arguments of one trial; repeatable")]
Metric = Annotated[str | None, typer.Option(help="search: the reported figure that trials are compared by")]
Mode = Annotated[str | None, typer.Option(help="search: max or min (max)")]
Search = Annotated[str | None, typer.Option(help="which trials go on: halving, hyperband, curve or all (halving)")]
Eta = Annotated[int | None, typer.Option(min=2, help="hyperband: of so many trials one goes on (3)")]
StepsMin = Annotated[int | None, typer.Option(min=1, help="hyperband: mini-batches before a trial can be judged")]
Target = Annotated[
    float | None, typer.Option(help="curve: the metric at which a trial, or a lone job, has done enough")
]
SpecFile = Annotated[Path | None, typer.Option("-f", "--file", help="a TOML file with these as fields; flags win")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]
Timeout = Annotated[str | None, typer.Option(help="give up after this long, with exit code 5")]


def add(app: typer.Typer) -> None:
    """Add this group's verbs to `app`."""
    app.command(context_settings=PROGRAM)(submit)
    app.command(context_settings=PROGRAM)(run)
    app.command()(cancel)
    app.command()(wait)


def submit(
    command: Command = None,
    gpus: Gpus = None,
    tenant: Tenant = None,
    name: Name = None,
    steps: Steps = None,
    checkpoint_dir: Checkpoints = None,
    grace: Grace = None,
    preempt_by: PreemptBy = None,
    priority: Priority = None,
    kind: Kind = None,
    cpus: Cpus = None,
    memory: Memory = None,
    weight: Weight = None,
    utility: Utility = None,
    step_time: StepTime = None,
    env: Env = None,
    max_restarts: Restarts = None,
    trials: TrialFile = None,
    trial: Trial = None,
    metric: Metric = None,
    mode: Mode = None,
    search: Search = None,
    eta: Eta = None,
    steps_min: StepsMin = None,
    target: Target = None,
    file: SpecFile = None,
    wait_: Annotated[bool, typer.Option("--wait", help="return when it is over, with its exit code")] = False,
    json: Json = False,
) -> None:
    """Queue an app and print its id.

    gpu-arbiter submit -g 2 --env SEED=1 -- python train.py --lr 0.1
    """
    flags = dict(locals())
    as_json = wants_json(json)
    with answering(as_json=as_json):
        app_spec = _spec(flags)
        with open_client() as client:
            app = client.submit(app_spec)
            if as_json:
                emit({"schema": "submitted/v1", "app": app})
            else:
                say(app)
            if wait_:
                raise SystemExit(_outcome(client, app, None))


def run(
    command: Command = None,
    gpus: Gpus = None,
    tenant: Tenant = None,
    name: Name = None,
    steps: Steps = None,
    checkpoint_dir: Checkpoints = None,
    grace: Grace = None,
    preempt_by: PreemptBy = None,
    priority: Priority = None,
    kind: Kind = None,
    cpus: Cpus = None,
    memory: Memory = None,
    weight: Weight = None,
    utility: Utility = None,
    step_time: StepTime = None,
    env: Env = None,
    max_restarts: Restarts = None,
    file: SpecFile = None,
) -> None:
    """Submit an app, show its output, and return its exit code. Ctrl-C cancels it."""
    flags = dict(locals())
    with answering(as_json=False):
        app_spec = _spec(flags)
        with open_client() as client:
            app = client.submit(app_spec)
            note(f"{app} is queued; its output follows")
            try:
                follow_logs(client, app, follow=True)
                raise SystemExit(_outcome(client, app, None))
            except KeyboardInterrupt:
                client.cancel(app)
                note(f"{app} is cancelled")
                raise SystemExit(exit_codes.INTERRUPTED) from None


def cancel(
    apps: Annotated[list[str], typer.Argument(metavar="ID...", help="app ids, or `last`")],
    json: Json = False,
) -> None:
    """End apps for good; their tasks are stopped and their GPUs freed."""
    as_json = wants_json(json)
    with answering(as_json=as_json), open_client() as client:
        ended = [client.resolve(selector) for selector in apps]
        over = {str(record.app): record.state for record in client.apps() if record.over}
        for app in ended:
            client.cancel(app)
            note(f"{app} was already {over[app]}" if app in over else f"{app} is cancelled")
        if as_json:
            emit({"schema": "cancelled/v1", "apps": ended})


def wait(
    apps: Annotated[list[str], typer.Argument(metavar="ID...", help="app ids, or `last`")],
    timeout: Timeout = None,
    for_: Annotated[Until, typer.Option("--for", help="done, or running")] = "done",
    json: Json = False,
) -> None:
    """Return when apps are over, with the greatest of their exit codes; or when they run."""
    as_json = wants_json(json)
    with answering(as_json=as_json), open_client() as client:
        deadline = time.monotonic() + spec.seconds(timeout, "--timeout") if timeout else None
        codes = {}
        for app in [client.resolve(selector) for selector in apps]:
            codes[app] = _outcome(client, app, deadline, until=for_)
        if as_json:
            emit({"schema": "waited/v1", "apps": [{"id": app, "code": code} for app, code in codes.items()]})
        raise SystemExit(max(codes.values(), default=exit_codes.DONE))


def _outcome(client: Client, app: str, deadline: float | None, until: Until = "done") -> int:
    """Wait for `app` and return its exit code, having said why it failed."""
    left_s = None if deadline is None else max(0.0, round(deadline - time.monotonic(), 1))
    end = ending(client.wait(app, until=until, timeout_s=left_s))
    if end.sentence:
        note(end.sentence)
    return end.code


def _spec(flags: dict[str, Any]) -> AppSpec:
    """Return what to run: the file's fields, overruled by the flags."""
    fields: dict[str, Any] = spec.load(flags["file"]) if flags["file"] else {}
    command = flags["command"] or fields.pop("command", None)
    fields.pop("command", None)
    if isinstance(command, str) or (command is None and "trials" not in fields):
        raise usage("no command was given", "gpu-arbiter submit -- python train.py")
    if command:
        chosen = spec.trials(command, flags.get("trials"), flags.get("trial") or ())
        if len(chosen) > 1 or "trials" not in fields:
            fields["trials"] = chosen
        fields.setdefault("name", spec.default_name(command))
    fields |= _given(flags)
    fields["env"] = spec.environment(flags["env"] or (), os.environ) | dict(fields.get("env", {}))
    fields.setdefault("cwd", str(Path.cwd()))
    fields.setdefault("checkpoint_root", str(Path(fields["cwd"]) / "checkpoints"))
    return spec.build(fields)


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that flags were given for."""
    sizes = spec.gpu_sizes(flags["gpus"], "--gpus") if flags["gpus"] is not None else ()
    fields = {
        "gang": sizes[0] if sizes else None,
        "sizes": (sizes if len(sizes) > 1 else ()) if sizes else None,
        "tenant": flags["tenant"],
        "name": flags["name"],
        "steps_total": flags["steps"],
        "checkpoint_root": spec.absolute(flags["checkpoint_dir"]) if flags["checkpoint_dir"] else None,
        "grace_s": spec.seconds(flags["grace"], "--grace") if flags["grace"] is not None else None,
        "preempt_by": flags["preempt_by"],
        "priority": flags["priority"],
        "kind": flags["kind"],
        "cpus": flags["cpus"],
        "host_bytes": spec.size(flags["memory"], "--memory") if flags["memory"] is not None else None,
        "weight": flags["weight"],
        "utility": spec.utility(flags["utility"], "--utility") if flags["utility"] is not None else None,
        "step_serial_s": spec.some_seconds(flags["step_time"], "--step-time")
        if flags["step_time"] is not None
        else None,
        "max_restarts": flags["max_restarts"],
        "metric": flags.get("metric"),
        "mode": flags.get("mode"),
        "search": flags.get("search"),
        "eta": flags.get("eta"),
        "steps_min": flags.get("steps_min"),
        "target": flags.get("target"),
    }
    return {name: value for name, value in fields.items() if value is not None}
