"""`drain`, `undrain`: an administrator empties nodes, and lets them be used again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from launch import completion, spec, views
from launch.client import Client, open_client
from launch.faults import Fault, usage
from launch.surface import answering, emit, note, plural, say, wants_json
from protocol import exit_codes

#: Between two looks at nodes that are waited for.
LOOK_S = 0.5

Nodes = Annotated[
    list[str],
    typer.Argument(metavar="NODE...", autocompletion=completion.nodes, help="names of nodes, as `nodes` lists them"),
]
Drained = Annotated[
    list[str],
    typer.Argument(metavar="NODE...", autocompletion=completion.drained_nodes, help="names of nodes that are drained"),
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]


def add(app: typer.Typer) -> None:
    """Add this group's verbs to `app`."""
    app.command()(drain)
    app.command()(undrain)


def drain(
    nodes: Nodes,
    reason: Annotated[str, typer.Option(help="why, for the owners of the apps there")] = "",
    wait: Annotated[bool, typer.Option("--wait", help="return once the nodes are proven to hold no task")] = False,
    timeout: Annotated[str | None, typer.Option(help="with --wait: give up after this long, with exit code 5")] = None,
    force: Annotated[bool, typer.Option("--force", help="also end the tasks that cannot save")] = False,
    json: Json = False,
) -> None:
    """Empty nodes: tasks save and leave, and no new one starts there until `undrain`. For administrators.

    gpu-arbiter drain n1 n2 --reason "new memory" --wait --timeout 30m

    A task that cannot save keeps its GPUs until it ends by itself, and is named; `--force` ends it.
    """
    as_json = wants_json(json)
    with answering(as_json=as_json), open_client() as client:
        if timeout and not wait:
            raise usage("--timeout is of no use without --wait", "gpu-arbiter drain n1 --wait --timeout 30m")
        deadline = time.monotonic() + spec.seconds(timeout, "--timeout") if timeout else None
        names = _known(client, nodes)
        answers: dict[str, Mapping[str, Any]] = {name: client.drain(name, reason=reason, force=force) for name in names}
        for name, told in answers.items():
            (note if as_json or wait else say)(views.drained(name, told["state"], told["tasks"]))
        if wait:
            answers = _wait(client, answers, deadline)
        if as_json:
            emit({"schema": "drained/v1", "nodes": _entries(answers)})


def undrain(nodes: Drained, json: Json = False) -> None:
    """Let drained nodes be used again, at once. For administrators.

    gpu-arbiter undrain n1 n2
    """
    as_json = wants_json(json)
    with answering(as_json=as_json), open_client() as client:
        answers = {name: client.undrain(name) for name in _known(client, nodes)}
        for name, told in answers.items():
            note(f"{name} is {told['state']}")
        if as_json:
            emit({"schema": "drained/v1", "nodes": _entries(answers)})


def _entries(answers: Mapping[str, Mapping[str, Any]]) -> list[dict[str, object]]:
    return [{"id": name, "state": told["state"], "tasks": told["tasks"]} for name, told in answers.items()]


def _known(client: Client, nodes: Sequence[str]) -> list[str]:
    """Return the named nodes, each once: nothing is done to any of them if one does not exist."""
    there = [str(node["id"]) for node in client.query("nodes")["nodes"]]
    wrong = [name for name in dict.fromkeys(nodes) if name not in there]
    if wrong:
        sentence = f"there is no node {', '.join(wrong)}; the nodes are {', '.join(there) or 'none yet'}"
        raise Fault(sentence, code=exit_codes.NOT_FOUND, next_step="gpu-arbiter nodes")
    return list(dict.fromkeys(nodes))


def _wait(
    client: Client, answers: Mapping[str, Mapping[str, Any]], deadline: float | None
) -> dict[str, Mapping[str, Any]]:
    """Return once no node holds a task, telling each change on stderr.

    Raises
    ------
    Fault
        With code 5 when time is over, and with code 8 when a node is used again meanwhile.
    """
    now = dict(answers)
    while any(told["state"] != "drained" for told in now.values()):
        if deadline is not None and time.monotonic() >= deadline:
            raise _late(now)
        time.sleep(LOOK_S)
        before, now = now, _look(client, now)
        for name, told in now.items():
            if _outline(told) != _outline(before[name]):
                note(views.drained(name, told["state"], told["tasks"]))
    return now


def _look(client: Client, before: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return how far nodes are now, or, while the arbiter is away, how far they were."""
    try:
        found = {str(node["id"]): node["drain"] for node in client.query("nodes")["nodes"]}
    except Fault as fault:
        if fault.code != exit_codes.UNREACHABLE:
            raise
        note(fault.sentence)
        return dict(before)
    back = [name for name in before if found.get(name) is None]
    if back:
        sentence = f"{', '.join(back)} was undrained meanwhile"
        raise Fault(sentence, code=exit_codes.CHANGED, next_step="gpu-arbiter nodes")
    return {name: found[name] for name in before}


def _outline(told: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the part of a node's tale that is worth telling anew: no figures that grow all the time."""
    return (told["state"], *((task["task"], task["phase"], task["text"]) for task in told["tasks"]))


def _late(now: Mapping[str, Mapping[str, Any]]) -> Fault:
    """Return the fault that tells which tasks nodes still hold when time is over."""
    left = {name: told for name, told in now.items() if told["state"] != "drained"}
    tasks = [str(task["task"]) for told in left.values() for task in told["tasks"]]
    holds = f"{plural(len(tasks), 'task')} ({', '.join(tasks)})" if tasks else "GPUs that are not proven empty"
    sentence = f"not drained in time: {', '.join(left)}, with {holds}; the drain goes on"
    return Fault(sentence, code=exit_codes.TIMED_OUT, next_step="gpu-arbiter nodes", done={"nodes": _entries(now)})
