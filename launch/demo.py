"""The demo: a small site, six apps that want more GPUs than there are, real training, and the result.

Nothing here is privileged: the apps are submitted and watched through the same control socket as any user's.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

from msgspec import Struct

from app_agent.core.spec import AppSpec
from app_agent.streams import OVER
from arbiter.core.state.model import ArbiterSettings
from arbiter.ledger import Ledger
from launch import log_lines, timeline, training
from launch.client import Client, open_client
from launch.faults import Fault, usage
from launch.live import Display, display
from launch.site.site import (
    Site,
    Watch,
    as_processes,
    end_everything,
    in_process,
    local_site,
    memory_bus,
    on_broker,
    wait_ready,
)
from launch.spec import environment
from launch.surface import Document, note, number, table
from protocol.bus import BusError
from protocol.messages import Party, Requirements
from protocol.topology import Topology

SCRIPTS = Path(training.__file__).resolve().parent
TRIALS = ("--lr 0.0003", "--lr 0.003", "--lr 0.03", "--lr 0.3")
NODES, GPUS_PER_NODE = 2, 4
REFRESH_S = 0.5
_ACCURACY = re.compile(r"test accuracy ([0-9.]+)")


class Options(Struct, frozen=True):
    """The demo's options. `step_ms` paces each mini-batch, `steps` is one whole training."""

    bus: str = "memory"
    out: Path = Path("out/demo")
    steps: int = 500
    step_ms: float = 25.0
    lease_s: float = 6.0
    timeout_s: float = 240.0
    quiet: bool = False


class Result(Struct, frozen=True):
    """The demo's result: the ``demo/v1`` document, the unfinished apps, and each app's last lines of output."""

    summary: dict[str, Any]
    unfinished: tuple[str, ...]
    outputs: dict[str, str]


def settings(lease_s: float) -> ArbiterSettings:
    """Return settings of a fast arbiter: leases of seconds, not minutes, so that a viewer sees GPUs change hands."""
    return ArbiterSettings(
        lease_s=lease_s, renewal_lead_s=lease_s / 3, round_pause_s=0.3, probe_s=0.5, bid_s=0.5, beat_s=0.5
    )


def apps(options: Options, root: Path, cwd: Path) -> tuple[AppSpec, ...]:
    """Return the six apps: eleven GPUs wanted, eight there."""
    digits = (sys.executable, str(SCRIPTS / "digits.py"), *_pace(options))
    plain = (sys.executable, str(SCRIPTS / "plain.py"), *_pace(options))

    def app(name: str, tenant: str, *trials: tuple[str, ...], gang: int = 1, metric: str = "") -> AppSpec:
        return AppSpec(
            trials=trials,
            cwd=str(cwd),
            checkpoint_root=str(root),
            tenant=tenant,
            name=name,
            env=environment((), {}),
            requirements=Requirements(grace_s=20.0),
            gang=gang,
            steps_total=options.steps,
            step_serial_s=options.step_ms / 1000 * gang,  # paced alike on any number of GPUs
            restart_s=3.0,
            metric=metric,
        )

    return (
        app("search", "vision", *((*digits, *trial.split()) for trial in TRIALS), metric="accuracy"),
        app("pair", "speech", (*digits, "--hidden", "128"), gang=2),
        app("single", "speech", (*digits, "--seed", "1")),
        app("unchanged", "vision", (*plain, "--seed", "2")),
        app("pair-2", "vision", (*digits, "--hidden", "96"), gang=2),
        app("late", "speech", (*digits, "--seed", "3")),
    )


def _pace(options: Options) -> tuple[str, ...]:
    # One thread each: PyTorch's threads spin while they wait, and here all share a few cores.
    return ("--steps", str(options.steps), "--step-ms", str(options.step_ms), "--threads", "1")


def run(options: Options) -> Result:
    """Run the demo and leave its figures in `options.out`.

    Raises
    ------
    Fault
        If the site does not start or fails.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-arbiter-demo-")))
        site, check = stack.enter_context(_site(options, scratch))
        wait_ready(site, check)
        client = stack.enter_context(open_client(site.socket))
        try:
            ids = [client.submit(spec) for spec in apps(options, scratch / "checkpoints", scratch)]
            with display(quiet=options.quiet) as screen:
                _watch(client, check, screen, deadline=began + options.timeout_s)
            wall_s = time.monotonic() - began
            document = client.query("apps")
            rounds = client.query("rounds") | {"spans": client.query("leases")["leases"]}
            outputs = {app: _output(client, app) for app in ids}
        finally:
            end_everything(client)
        _keep_ledger(site, options.out)
    summary = summarise(options.bus, wall_s, document, rounds, outputs)
    _leave(options.out, summary, rounds, document)
    unfinished = tuple(app["id"] for app in document["apps"] if app["state"] != "finished")
    return Result(summary, unfinished, outputs)


@contextmanager
def _site(options: Options, scratch: Path) -> Iterator[tuple[Site, Watch]]:
    """Start the site on the requested bus."""
    logs = options.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    site = local_site(
        scratch, nodes=NODES, gpus=f"simulated:{GPUS_PER_NODE}", owner="demo", settings=settings(options.lease_s)
    )
    if options.bus == "memory":
        with (logs / "daemons.jsonl").open("w") as log, _logging_to(log), in_process(site, memory_bus()) as check:
            yield site, check
        return
    user = urlsplit(options.bus).username
    if urlsplit(options.bus).scheme not in ("amqp", "amqps") or not user:
        raise usage("--bus is neither `memory` nor a broker's URL", "write it like amqp://guest:guest@localhost/")
    prefix = f"demo-{secrets.token_hex(4)}."  # queues of earlier runs on the broker are not ours
    site = on_broker(site, options.bus, user=user, prefix=prefix)
    try:
        with as_processes(site, scratch / "config", logs) as check:
            yield site, check
    finally:
        asyncio.run(_sweep(options.bus, prefix, site))


async def _sweep(url: str, prefix: str, site: Site) -> None:
    """Remove this run's queues from the broker."""
    from protocol.bus.amqp import AmqpBus  # on the memory bus the demo needs no client of RabbitMQ

    parties = (Party("app", site.app.owner), *(Party("node", node.node) for node in site.nodes))
    try:
        await AmqpBus(url, topology=Topology(prefix=prefix)).dismantle(parties)
    except BusError as error:
        note(f"queues named {prefix}* are left on the broker: {error}")


@contextmanager
def _logging_to(log: TextIO) -> Iterator[None]:
    import structlog

    before = structlog.get_config()
    log_lines.configure(json=True, stream=log)
    try:
        yield
    finally:
        structlog.configure(**before)


def _watch(client: Client, check: Watch, screen: Display, *, deadline: float) -> None:
    """Show the apps until every one is over or time is up."""
    began = time.monotonic()
    while time.monotonic() < deadline:
        check()
        document = client.query("apps")
        screen.show(document, time.monotonic() - began)
        if document["apps"] and all(app["state"] in OVER for app in document["apps"]) and _all_told(client):
            return
        time.sleep(REFRESH_S)


def _all_told(client: Client) -> bool:
    """Return whether the app agent, too, knows every app to be over."""
    return all(record.over for record in client.apps())


def _output(client: Client, app: str) -> str:
    """Return the last lines that an app wrote, if they are still kept."""
    try:
        chunk = client.query("log", app)
    except Fault:
        return ""
    return base64.b64decode(chunk["data"]).decode(errors="replace")


# --- figures --------------------------------------------------------------------------------------------------------


def summarise(bus: str, wall_s: float, document: Document, rounds: Document, outputs: dict[str, str]) -> dict[str, Any]:
    """Return the ``demo/v1`` document."""
    return {
        "schema": "demo/v1",
        "bus": "memory" if bus == "memory" else urlsplit(bus).scheme,
        "wall_s": round(wall_s, 2),
        "rounds": rounds["count"],
        "apps": [_figures(app, outputs.get(app["id"], "")) for app in document["apps"]],
    }


def _figures(app: Document, output: str) -> dict[str, Any]:
    names = ("id", "tenant", "name", "state", "jct_s", "rho", "gpu_seconds", "grants", "renewals", "preemptions")
    figures = {name: app[name] for name in (*names, "migrations", "suspensions", "steps_lost")}
    return figures | {"final_accuracy": _accuracy(app, output)}


def _accuracy(app: Document, output: str) -> float | None:
    """Return the app's reported accuracy, or the printed one of a script that never heard of us."""
    if "accuracy" in app["metrics"]:
        return float(app["metrics"]["accuracy"])
    printed = _ACCURACY.findall(output)
    return float(printed[-1]) if printed else None


def _keep_ledger(site: Site, out: Path) -> None:
    """Leave a copy of the ledger, which `gpu-arbiter web` shows when the site is gone."""
    copy = out / "ledger.db"
    copy.unlink(missing_ok=True)
    with closing(Ledger.reader(Path(site.arbiter.state_dir) / "ledger.db")) as ledger:
        ledger.copy(copy)


def _leave(out: Path, summary: dict[str, Any], rounds: Document, document: Document) -> None:
    """Write summary, rounds and timeline to the output folder."""
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    (out / "rounds.json").write_text(json.dumps(rounds) + "\n")
    names = {app["id"]: f"{app['id']} {app['name']} ({app['tenant']})" for app in document["apps"]}
    timeline.draw(rounds["spans"], names, out / "timeline.png")


HEADERS = (
    "APP", "TENANT", "NAME", "JCT_S", "RHO", "GPU_S", "GRANTS", "RENEWED", "PREEMPTED", "MOVED", "PARKED", "LOST",
    "ACCURACY",
)  # fmt: skip


def last_words(summary: Document, out: Path) -> Sequence[str]:
    """Return what is said at the end: how long it took, and where to see more."""
    return (
        f"{summary['rounds']} rounds in {summary['wall_s']:.0f} s; see {out}/timeline.png",
        f"in a browser: gpu-arbiter web --ledger {shlex.quote(str(out / 'ledger.db'))}",
    )


def final_table(summary: Document) -> str:
    """Return one line per app."""
    return table(HEADERS, [_row(app) for app in summary["apps"]])


def _row(app: Document) -> Sequence[str]:
    return (
        app["id"],
        app["tenant"],
        app["name"],
        number(app["jct_s"], 1),
        number(app["rho"]),
        number(app["gpu_seconds"], 1),
        str(app["grants"]),
        str(app["renewals"]),
        str(app["preemptions"]),
        str(app["migrations"]),
        str(app["suspensions"]),
        str(app["steps_lost"]),
        number(app["final_accuracy"], 3),
    )
