"""Self-checks of this host: each reports its finding, and the mend of a fault."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from launch import escape, gpu_checks
from launch.buses import open_bus
from launch.client import open_client
from launch.faults import Fault
from launch.gpu_checks import Check, CheckVerdict
from node_agent import health_files
from node_agent.core.events import HealthLedger
from node_agent.workers import containment
from node_agent.workers.manager import STANDING
from node_agent.workers.mps import STANDING as MPS_STANDING
from node_agent.workers.mps import MpsStanding
from node_agent.workers.records import read_json
from protocol import certificates, exit_codes
from protocol.bus import BusError
from protocol.journal import JournalError
from protocol.journal.database import COMMIT, NAMES, Postgres, without_password
from protocol.journal.postgres import VERSION, PostgresJournal
from protocol.journal.sqlite import newest_event, tables_version
from protocol.messages import Party
from protocol.release import release

#: The mend where an error's own next step is to run `doctor`.
MENDS = {
    "app agent": "to try it here: gpu-arbiter up; on a site: systemctl start gpu-arbiter-app-agent@OWNER, and set "
    "GPU_ARBITER_URL to the socket in its configuration",
    "broker": "on the broker's host: systemctl status rabbitmq-server; see docs/operations.md, RabbitMQ",
    "arbiter": "on the arbiter's host: systemctl status gpu-arbiter; its log: journalctl -u gpu-arbiter",
    "store": "on the arbiter's host: gpu-arbiter doctor --journal-file FILE; see docs/operations.md, The store is away",
}
#: Where commits do not wait for a replica, by the setting that is to blame.
REPLICA_MENDS = {
    NAMES: "as postgres on the database's host: psql --command \"alter system set synchronous_standby_names = '{}'\" "
    '--command "select pg_reload_conf()"; see docs/operations.md, Level 2',
    COMMIT: "set synchronous_commit to on where it is set: for the server, the database or the role of the arbiter",
}
#: The journal of an arbiter that systemd runs on this host.
JOURNAL = Path("/var/lib/gpu-arbiter/journal.db")
#: The folder of a launcher that systemd runs on this host.
LAUNCHER = Path(escape.LAUNCHER).parent
#: An arbiter with nodes or apps writes events in each beat. One that has written none for so long decides nothing.
SILENT_S = 60.0
#: A certificate that expires sooner than that is worth a remark.
EXPIRES_SOON_DAYS = 30.0


def checks(bus: str = "", journal: Path | str | None = None) -> Iterator[Check]:
    """Check all needs of a command or a daemon on this host.

    Parameters
    ----------
    bus
        A broker to try as well.
    journal
        The arbiter's store to try: a file, or the address of a database; by default that of an arbiter on this host.
    """
    yield _python()
    yield _state_folder(Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"))
    yield _torch()
    yield from gpu_checks.checks(launched=os.path.exists(LAUNCHER))  # noqa: PTH110 - also where its folder is closed
    yield _containment()
    yield from _nodes_here(_state_folders())
    if bus:
        yield from _certificates(bus)
        yield _broker(bus)
    if journal is not None or os.access(JOURNAL, os.R_OK):
        yield _store(JOURNAL if journal is None else journal)
    if isinstance(journal, str):
        yield from _replicas(journal)
    yield from _running()


def _python() -> Check:
    found = f"Python {sys.version.split()[0]} at {sys.executable}"
    return Check("python", "ok" if sys.version_info >= (3, 11) else "fail", found, "install Python 3.11 or newer")


def _state_folder(folder: Path) -> Check:
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not os.access(nearest, os.W_OK):
        return Check("state folder", "fail", f"{nearest} cannot be written", "set XDG_STATE_HOME to a folder of yours")
    free_bytes = shutil.disk_usage(nearest).free
    if free_bytes < 2**30:
        return Check("state folder", "fail", f"{nearest} has {free_bytes >> 20} MiB left", "free some space")
    return Check("state folder", "ok", f"{folder}, {free_bytes >> 30} GiB free")


def _torch() -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check("torch", "note", "not in this environment", "for the demo: pip install 'gpu-arbiter[demo]'")
    return Check("torch", "ok", f"PyTorch {version('torch')}")


def _containment() -> Check:
    """Check the means of a node agent of this user to contain its tasks."""
    bounds = containment.choose("auto")
    found = f'containment = "auto" takes {bounds.kind!r} for this user'
    if not bounds.lacks:
        return Check("containment", "ok", found)
    mend = "for more, run the node agent by its systemd unit; see docs/operations.md"
    return Check("containment", "note", f"{found}; open: {'; '.join(bounds.lacks)}", mend)


def _state_folders() -> list[Path]:
    """Return the default state folders of this host's node agents, as far as this user may look."""
    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
    folders = [Path("/var/lib/gpu-arbiter-node"), *sorted((home / "gpu-arbiter/up").glob("node-*"))]
    return [folder for folder in folders if os.access(folder, os.R_OK | os.X_OK)]


def _nodes_here(folders: Sequence[Path]) -> Iterator[Check]:
    """Report the notes of each node agent: the containment in force, the GPUs that it bars, and those without MPS."""
    for folder in folders:
        standing = read_json(folder / STANDING, containment.Standing)
        if standing is not None:
            lacks = f"; open: {'; '.join(standing.lacks)}" if standing.lacks else ""
            yield Check(f"containment in {folder}", "note" if lacks else "ok", f"{standing.kind}{lacks}")
        ledger = read_json(folder / health_files.LEDGER, HealthLedger) or HealthLedger()
        for gpu, why in ledger.quarantined.items():
            mend = f"to use it again: echo {gpu} > {folder / health_files.LIFT}"
            yield Check("quarantine", "note", why, mend)
        for why in (read_json(folder / MPS_STANDING, MpsStanding) or MpsStanding()).troubles.values():
            yield Check("MPS", "note", why, "see docs/sharing.md, MPS")


def _certificates(url: str) -> Iterator[Check]:
    """Tell the days to expiry of each certificate that the address of a broker names."""
    for path in certificates.named_in(url):
        name, mend = f"certificate {path}", "renew it, and restart what uses it; a broker and its clients refuse others"
        try:
            days = (certificates.expiry(path) - datetime.now(UTC)).total_seconds() / 86_400.0
        except ImportError:
            yield Check(name, "note", "cannot be read", "pip install 'gpu-arbiter[users]'")
        except (OSError, ValueError) as error:
            yield Check(name, "fail", f"cannot be read: {error}", "name a file in PEM that this user may read")
        else:
            verdict: CheckVerdict = "fail" if days <= 0 else "note" if days < EXPIRES_SOON_DAYS else "ok"
            yield Check(
                name, verdict, f"expired {-days:.0f} days ago" if days <= 0 else f"expires in {days:.0f} days", mend
            )


def _broker(url: str) -> Check:
    try:
        asyncio.run(_greet(url))
    except Fault as fault:
        return Check("broker", "fail", fault.sentence, fault.next_step)
    except BusError as error:
        return Check("broker", "fail", str(error), "see docs/operations.md, RabbitMQ")
    return Check("broker", "ok", "answers and lets this user in")


def _store(journal: Path | str) -> Check:
    """Check that the store of an arbiter can be read, and is written to."""
    try:
        led, newest = _written(journal)
    except JournalError as error:
        return Check("store", "fail", str(error), MENDS["store"])
    found = f"{without_password(str(journal))} answers{led}"
    silent_s = time.time() - newest
    if newest == 0.0 or silent_s > SILENT_S:
        when = f"none of its events is newer than {silent_s / 60.0:.0f} min" if newest else "it has no event yet"
        return Check("store", "note", f"{found}; {when}: no arbiter decides, or nothing is enrolled", MENDS["arbiter"])
    return Check("store", "ok", found)


def _replicas(url: str) -> Iterator[Check]:
    """Check that commits wait for each replica of the database: what it has not heard of is lost if it takes over."""
    try:
        with closing(Postgres(url, read_only=True)) as database:
            found = database.replicas()
    except JournalError:
        return  # `store` has said why
    for name, setting in found.items():
        if not setting:
            yield Check("replica", "ok", f"commits wait for {name}")
            continue
        lost = f"no commit waits for {name} ({setting}): if it takes over, the newest events are lost"
        named = name if name.isidentifier() else "*"  # another name would need quotes of its own
        yield Check("replica", "note", lost, REPLICA_MENDS[setting].format(named))


def _written(journal: Path | str) -> tuple[str, float]:
    """Return who writes a store, in words, and when the newest event came, in seconds."""
    if isinstance(journal, Path):
        file = journal / JOURNAL.name if journal.is_dir() else journal
        return f"; tables of version {tables_version(file)}", newest_event(file)
    from arbiter.core.arbiter import Event  # heavy

    with PostgresJournal[Event].of(journal, Event, program=release(), read_only=True) as shared:
        leader, epoch = shared.leader()
        led = f"; {leader} has led last, in epoch {epoch}" if leader else "; no arbiter has led yet"
        return f"{led}; tables of version {VERSION}", shared.last_now


async def _greet(url: str) -> None:
    link = await open_bus(url).connect(Party("app", "doctor"))
    await link.close()


def _running() -> Iterator[Check]:
    """Check the app agent, and through it the broker and the arbiter; behind a failed one the rest is unknown."""
    try:
        with open_client() as client:
            met = client.ping()
            yield Check("app agent", "ok", f"answers at {client.path}")
            if not met["reached"]:
                yield Check("broker", "fail", f"the app agent cannot reach it at {met['bus']}", MENDS["broker"])
                return
            yield from _asked(lambda: client.query("nodes"), lambda: client.ping()["outage"])
    except Fault as fault:
        yield _failed("app agent", fault)


def _failed(name: str, fault: Fault) -> Check:
    mend = MENDS[name] if fault.code == exit_codes.UNREACHABLE else fault.next_step
    return Check(name, "fail", fault.sentence, mend)


def _asked(nodes: Callable[[], dict[str, object]], outage: Callable[[], str]) -> Iterator[Check]:
    try:
        document = nodes()
    except Fault as fault:
        yield _failed("store" if outage() else "arbiter", fault)
        return
    listed = document["nodes"]
    assert isinstance(listed, list)
    if not any(node["state"] == "up" for node in listed):
        yield Check("arbiter", "fail", "answers, but no node is up", "gpu-arbiter node-agent --config node.toml")
        return
    gpus = [gpu for node in listed for gpu in node["gpus"]]
    yield Check("arbiter", "ok", f"answers; {len(listed)} nodes, {len(gpus)} GPUs")
    yield from _sick(gpus)


def _sick(gpus: Iterable[dict[str, object]]) -> Iterator[Check]:
    """Say which GPUs get no work, and why."""
    for gpu in gpus:
        if gpu.get("quarantined"):
            yield Check("quarantine", "note", str(gpu["detail"]), "run gpu-arbiter doctor on its node for the mend")
        elif not gpu["healthy"]:
            yield Check("health", "note", f"{gpu['id']}: {gpu['detail']}", "see docs/operations.md, sick GPUs")
        if gpu.get("strangers"):
            found = f"{gpu['strangers']} processes under no lease use {gpu['id']}: {gpu['detail']}"
            yield Check("strangers", "note", found, "end them, or set their treatment: strangers in node.toml")
