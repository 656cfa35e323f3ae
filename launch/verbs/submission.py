"""`submit`, `run`: hand an app over. `wait`: wait for its end."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from app_agent.client import default_name
from app_agent.core.spec import INHERITED, AppSpec, SearchName
from launch import completion, preflight, selection, spec
from launch.client import Client, Until, ending, open_client
from launch.faults import Fault, usage
from launch.follow import follow_logs
from launch.surface import answering, emit, note, say, wants_json
from protocol import exit_codes

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
    str | None,
    typer.Option(
        envvar="GPU_ARBITER_TENANT",
        autocompletion=completion.tenant,
        help="the tenant that pays; the daemon's default otherwise",
    ),
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
    typer.Option(
        "--class",
        autocompletion=completion.classes,
        help="batch, or interactive: starts at once if it can, at the cost of one batch app (batch)",
    ),
]
Cpus = Annotated[float | None, typer.Option(min=0, help="CPU cores each job needs on its node (none asked for)")]
Memory = Annotated[str | None, typer.Option(help="host memory each job needs on its node, such as 8G (none asked for)")]
Spans = Annotated[
    bool | None,
    typer.Option("--spans", help="the GPUs of a job may lie on several nodes; its program is started on each (no)"),
]
GpuType = Annotated[
    str | None,
    typer.Option(
        "--gpu-type",
        metavar="TYPE[,TYPE...]",
        help="each GPU is of one of these types, such as H200; a word of the driver's name for it (any)",
    ),
]
MinMemory = Annotated[
    str | None, typer.Option("--min-memory", help="each GPU has at least so much memory of its own, such as 80G (any)")
]
Weight = Annotated[float | None, typer.Option(help="part of the GPU time among your tenant's apps, 1 being usual (1)")]
Utility = Annotated[
    str | None,
    typer.Option(help="its worth by the time of its end: deadline:6h, soft:6h, none or sigmoid:50,2/h,6h (undeclared)"),
]
StepTime = Annotated[
    str | None, typer.Option("--step-time", help="time of one mini-batch on one GPU, until it is measured")
]
PreemptBy = Annotated[
    str | None, typer.Option(autocompletion=completion.preempt_by, help="auto, checkpoint or suspend (auto)")
]
Env = Annotated[list[str] | None, typer.Option("--env", help="NAME=VALUE, or NAME to pass on your own; repeatable")]
Secret = Annotated[
    list[str] | None,
    typer.Option("--secret", metavar="NAME=FILE", help="a variable whose value the node reads from FILE; repeatable"),
]
Retry = Annotated[
    int | None,
    typer.Option(min=0, help="new starts of a job that fails (3, and not if it seems that it cannot start)"),
]
TimeLimit = Annotated[
    str | None,
    typer.Option("--time-limit", help="how long each job may have its GPUs, such as 2h; then it fails (no limit)"),
]
Pty = Annotated[
    bool | None, typer.Option("--pty", help="give the program a terminal, and come to it; Enter ~ . leaves it (no)")
]
Idle = Annotated[
    str | None,
    typer.Option(help="with --pty: end after so long without a key, output or work on its GPUs (as the node says)"),
]
After = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ID[:ok|any]",
        autocompletion=completion.apps_to_follow,
        help="begin once this app is over: if it has finished (ok), or however it ended (any); repeatable (ok)",
    ),
]
Array = Annotated[
    str | None,
    typer.Option(help="one job for each index, such as 0-19, or 0-19%4 for at most four at a time"),
]
TrialFile = Annotated[Path | None, typer.Option("--trials", help="search: a file of one line of arguments per trial")]
Trial = Annotated[list[str] | None, typer.Option("--trial", help="search: the arguments of one trial; repeatable")]
Metric = Annotated[str | None, typer.Option(help="search: the reported figure that trials are compared by")]
Mode = Annotated[
    str | None, typer.Option(autocompletion=completion.one_of(("max", "min")), help="search: max or min (max)")
]
Search = Annotated[
    str | None,
    typer.Option(
        autocompletion=completion.one_of(get_args(SearchName)),
        help="which trials go on: halving, hyperband, curve or all (halving)",
    ),
]
Eta = Annotated[int | None, typer.Option(min=2, help="hyperband: of so many trials one goes on (3)")]
StepsMin = Annotated[int | None, typer.Option(min=1, help="hyperband: mini-batches before a trial can be judged")]
Target = Annotated[
    float | None, typer.Option(help="curve: the metric at which a trial, or a lone job, has done enough")
]
NoCheck = Annotated[
    bool, typer.Option("--no-check", help="do not look for the program and its script here: they are only on the nodes")
]
SpecFile = Annotated[Path | None, typer.Option("-f", "--file", help="a TOML file with these as fields; flags win")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="submit nothing; say whether it would start now and where, or why not")
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]
Timeout = Annotated[str | None, typer.Option(help="give up after this long, with exit code 5")]

#: Flags whose values become fields in a way of their own.
READ_APART = frozenset({"checkpoint_dir", "utility", "trials", "env", "after", "array"})


def add(app: typer.Typer) -> None:
    """Add this group's verbs to `app`."""
    app.command(context_settings=PROGRAM)(submit)
    app.command(context_settings=PROGRAM)(run)
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
    spans: Spans = None,
    gpu_type: GpuType = None,
    min_memory: MinMemory = None,
    weight: Weight = None,
    utility: Utility = None,
    step_time: StepTime = None,
    env: Env = None,
    secret: Secret = None,
    retry: Retry = None,
    time_limit: TimeLimit = None,
    after: After = None,
    array: Array = None,
    trials: TrialFile = None,
    trial: Trial = None,
    metric: Metric = None,
    mode: Mode = None,
    search: Search = None,
    eta: Eta = None,
    steps_min: StepsMin = None,
    target: Target = None,
    file: SpecFile = None,
    no_check: NoCheck = False,
    dry_run: DryRun = False,
    wait_: Annotated[bool, typer.Option("--wait", help="return when it is over, with its exit code")] = False,
    json: Json = False,
) -> None:
    """Queue an app and print its id.

    gpu-arbiter submit -g 2 --env SEED=1 -- python train.py --lr 0.1

    gpu-arbiter submit --array 0-19%4 --after last -- python evaluate.py

    gpu-arbiter submit --dry-run -g 4 -- python train.py

    Exit code 6, with the id printed: it is queued, but no arbiter answers; do not submit it again. Exit code 10, of a
    dry run: the app would wait.
    """
    flags = dict(locals())
    as_json = wants_json(json)
    with answering(as_json=as_json):
        if dry_run and wait_:
            raise usage("--dry-run submits nothing, so there is nothing to wait for", "leave --dry-run or --wait out")
        app_spec = specified(flags)
        with open_client() as client:
            if dry_run:
                raise SystemExit(forecast(client, app_spec, checked=not no_check, as_json=as_json))
            app, notes, code = hand_over(client, app_spec, checked=not no_check)
            tell_submitted(app, notes, as_json=as_json)
            raise SystemExit(outcome(client, app, None) if wait_ else code)


def tell_submitted(app: str, notes: Sequence[str], *, as_json: bool) -> None:
    """Print the id of a submitted app, and the notes for its owner."""
    if as_json:
        emit({"schema": "submitted/v1", "app": app, "notes": notes})
    else:
        say(app)
    for sentence in notes:
        note(sentence)


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
    spans: Spans = None,
    gpu_type: GpuType = None,
    min_memory: MinMemory = None,
    weight: Weight = None,
    utility: Utility = None,
    step_time: StepTime = None,
    env: Env = None,
    secret: Secret = None,
    retry: Retry = None,
    time_limit: TimeLimit = None,
    after: After = None,
    pty: Pty = None,
    idle: Idle = None,
    file: SpecFile = None,
    no_check: NoCheck = False,
) -> None:
    """Submit an app, show its output, and return its exit code. Ctrl-C cancels it.

    gpu-arbiter run -g 1 --pty -- bash

    With --pty you come to a terminal on the node; `attach` comes back to it.
    """
    flags = dict(locals())
    with answering(as_json=False):
        app_spec = specified(flags)
        if app_spec.pty:
            from launch import terminals  # which `submit` does without

            terminals.check_terminal()
        with open_client() as client:
            app, notes, _ = hand_over(client, app_spec, checked=not no_check)
            follows = "its terminal follows; Enter ~ . leaves it" if app_spec.pty else "its output follows"
            for sentence in (*notes, f"{app} is queued; {follows}"):
                note(sentence)
            try:
                if app_spec.pty:
                    raise SystemExit(terminals.stay(client.path, app))
                follow_logs(client, app, follow=True)
                raise SystemExit(outcome(client, app, None))
            except KeyboardInterrupt:
                client.cancel(app)
                note(f"{app} is cancelled")
                raise SystemExit(exit_codes.INTERRUPTED) from None


def wait(
    apps: Annotated[
        list[str],
        typer.Argument(metavar="ID...", autocompletion=completion.apps_to_wait_for, help="app ids, or `last`"),
    ],
    timeout: Timeout = None,
    for_: Annotated[
        Until, typer.Option("--for", autocompletion=completion.one_of(get_args(Until)), help="done, or running")
    ] = "done",
    json: Json = False,
) -> None:
    """Return when apps are over, with the greatest of their exit codes; or when they run.

    An unknown id does not end the wait for the others; the exit code is 3 then.
    """
    as_json = wants_json(json)
    with answering(as_json=as_json), open_client() as client:
        deadline = time.monotonic() + spec.seconds(timeout, "--timeout") if timeout else None
        records, unknown = selection.known(client, apps)
        if unknown and records:
            note(f"{selection.not_found(unknown).sentence}; waiting for the rest")
        codes = {app: outcome(client, app, deadline, until=for_) for app in records}
        ended = {"apps": [{"id": app, "code": code} for app, code in codes.items()]}
        if unknown:
            raise selection.not_found(unknown, ended)
        if as_json:
            emit({"schema": "waited/v1", **ended})
        raise SystemExit(max(codes.values(), default=exit_codes.DONE))


def forecast(client: Client, app_spec: AppSpec, *, checked: bool, as_json: bool) -> int:
    """Print what would become of an app if it was submitted now, and return the exit code.

    Raises
    ------
    Fault
        As `hand_over` does; and if the arbiter would refuse the app, or is away.
    """
    from launch import views  # `submit` itself prints no document

    notes = _checked_notes(app_spec, checked=checked)
    notes += preflight.check_room(app_spec, client.query("capacity", patience_s=preflight.PATIENCE_S))
    document = client.dry_run(app_spec) | {"notes": notes}
    if as_json:
        emit(document)
    else:
        say(views.forecast(document))
    for sentence in notes:
        note(sentence)
    return exit_codes.DONE if document["starts"] else exit_codes.WOULD_WAIT


def _checked_notes(app_spec: AppSpec, *, checked: bool) -> list[str]:
    """Return notes on an app's variables and files; raise a `Fault` for a file that is not here, if it is `checked`."""
    notes = preflight.exposed(app_spec)
    if checked:
        preflight.check_files(app_spec)
        notes += preflight.absent_secrets(app_spec)
    return notes


def hand_over(client: Client, app_spec: AppSpec, *, checked: bool) -> tuple[str, list[str], int]:
    """Submit an app that may be able to run; return its id, notes for its owner, and the exit code.

    `checked`: its files must be on this host.

    Raises
    ------
    Fault
        If it can never run as it is; then it is not submitted.
    """
    notes, away = _checked_notes(app_spec, checked=checked), ""
    try:
        notes += preflight.check_room(app_spec, client.query("capacity", patience_s=preflight.PATIENCE_S))
    except Fault as fault:
        if fault.code != exit_codes.UNREACHABLE:
            raise
        away = fault.sentence
    app = client.submit(app_spec)
    if away:
        notes.append(f"{app} is queued, the arbiter is away: {away}; your app agent tells it of {app} when it is back")
    return app, notes, exit_codes.UNREACHABLE if away else exit_codes.DONE


def outcome(client: Client, app: str, deadline: float | None, until: Until = "done") -> int:
    """Wait for `app`, print the reason if it failed, and return its exit code."""
    left_s = None if deadline is None else max(0.0, round(deadline - time.monotonic(), 1))
    end = ending(client.outlast(app, until, left_s))
    if end.sentence:
        note(end.sentence)
    return end.code


def specified(flags: dict[str, Any]) -> AppSpec:
    """Return the specification: the file's fields, overruled by the flags."""
    fields: dict[str, Any] = spec.load(flags["file"]) if flags["file"] else {}
    written = fields.pop("command", [])
    command = flags["command"] or spec.command_of(written)
    if not command and "trials" not in fields:
        raise usage("no command was given", "gpu-arbiter submit -- python train.py")
    if command:
        chosen = spec.trials(command, flags.get("trials"), flags.get("trial") or ())
        if len(chosen) > 1 or "trials" not in fields:
            fields["trials"] = chosen
        fields.setdefault("name", default_name(command))
    fields |= _given(flags)
    variables, written = spec.environment(flags["env"] or (), os.environ), fields.get("env", {})
    fields["env"] = variables | written if isinstance(written, dict) else written
    fields |= _secrets(fields, flags["secret"] or ())
    if fields.get("pty"):
        _prepare_terminal(fields)
    fields.setdefault("cwd", str(Path.cwd()))
    fields.setdefault("checkpoint_root", str(Path(str(fields["cwd"])) / "checkpoints"))
    return spec.build(fields)


def _prepare_terminal(fields: dict[str, Any]) -> None:
    """Let a program with a terminal start at once and end once, and know the person's own terminal."""
    fields.setdefault("kind", "interactive")
    fields.setdefault("max_restarts", 0)
    if isinstance(fields["env"], dict):
        fields["env"] = {"TERM": os.environ.get("TERM", "xterm")} | fields["env"]


def _secrets(fields: Mapping[str, Any], wanted: Sequence[str]) -> dict[str, Any]:
    """Return the fields ``secrets`` (of file and flags) and ``env``, the latter without inherited secrets."""
    written, files = fields.get("secrets", {}), spec.secret_files(wanted)
    if not isinstance(written, dict):
        return {}
    secrets = spec.whole_paths(written | files)
    env = fields["env"]
    if secrets and isinstance(env, dict):
        env = {name: value for name, value in env.items() if name not in secrets or name not in INHERITED}
    return {"secrets": secrets, "env": env}


def _given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that flags were given for: the names that a spec file knows mean the same as flags."""
    fields = {}
    for flag, value in flags.items():
        field, read = spec.WORDS.get(flag, (flag, None))
        if value is not None and field in spec.NAMES and flag not in READ_APART:
            fields[field] = read(value, f"--{flag.replace('_', '-')}") if read is not None else value
    if flags["gpus"] is not None:
        sizes = spec.gpu_sizes(flags["gpus"], "--gpus")
        fields |= {"gang": sizes[0], "sizes": sizes if len(sizes) > 1 else ()}
    if flags["checkpoint_dir"]:
        fields["checkpoint_root"] = spec.absolute(flags["checkpoint_dir"])
    if flags.get("after"):
        fields["after"] = [word for given in flags["after"] for word in given.split(",")]
    if flags.get("array") is not None:
        fields |= {"array": flags["array"], "array_at_most": 0}
    if flags["utility"] is not None:
        fields["utility"] = spec.utility(flags["utility"], "--utility")
    return fields
