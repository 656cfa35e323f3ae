"""A whole site on a RabbitMQ of its own: every daemon a process, with its own broker user, that can be killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from app_agent.core.spec import AppSpec
from arbiter.core.state.model import ArbiterSettings
from launch.client import Client, open_client
from launch.faults import Fault
from launch.site.site import Site, as_toml, local_site, wait_ready
from launch.spec import environment
from protocol.messages import ARBITER, Party, Requirements
from tests.support.app_state import with_plain_ids
from tests.support.gpu_watch import GpuWatch
from tests.support.patience import PATIENCE_S
from tests.support.rabbitmq import PrivateRabbitMQ

OWNER, NODES, GPUS_PER_NODE = "me", 2, 2
PARTIES = (ARBITER, Party("app", OWNER), *(Party("node", f"n{number}") for number in range(1, NODES + 1)))
SCRIPT = Path(__file__).with_name("telling_digits.py")
LEASE_S = 6.0
SETTINGS = ArbiterSettings(
    lease_s=LEASE_S, renewal_lead_s=2.0, round_pause_s=0.3, probe_s=0.5, bid_s=0.5, beat_s=0.5, admission_wait_s=20.0
)
#: Mini-batches of an app, 40 ms each: enough to outlast an outage.
STEPS = 160
#: For what must come: the limit is for a broken build on a busy machine, not for timing.
POLL_S = 0.1


class DaemonProcess:
    """One daemon, which can be killed and started again on the same configuration."""

    def __init__(self, verb: str, config: Struct, folder: Path, name: str) -> None:
        self.log = folder / f"{name}.jsonl"
        self.environment: Mapping[str, str] = {}  #: beside that of this process
        self.within: Sequence[str] = ()  #: the command that enters its host
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        path = folder / f"{name}.toml"
        path.write_text(as_toml(config))
        self._command = [sys.executable, "-m", "launch.cli", verb, "--config", str(path)]

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
            )

    @property
    def command(self) -> Sequence[str]:
        """The command that starts it, on its host."""
        return [*self.within, *self._command]

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL this very process and nothing it started."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def wait(self) -> int:
        """Wait until it has ended by itself; return its exit code."""
        assert self._process is not None
        return self._process.wait(PATIENCE_S)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to this very process."""
        assert self._process is not None
        self._process.send_signal(number)

    def ended(self) -> bool:
        """Whether it has ended by itself."""
        assert self._process is not None
        return self._process.poll() is not None

    def check(self) -> None:
        assert self._process is not None
        code = self._process.poll()
        assert code is None, f"{self._name} ended with {code}: {self.log.read_text()[-2000:]}"

    def logged(self, event: str) -> list[dict[str, Any]]:
        """Every line that this daemon, in all its incarnations, wrote about `event`; it must be alive."""
        self.check()
        return self.lines(event)

    def lines(self, event: str) -> list[dict[str, Any]]:
        """The same of one that may be dead."""
        lines = [line for line in self.log.read_bytes().splitlines(keepends=True) if line.startswith(b"{")]
        found = [json.loads(line) for line in lines if line.endswith(b"\n")]
        return [line for line in found if line["event"] == event]


class Cluster:
    """Its daemons, its apps, and what can be known of them without asking a daemon."""

    script = SCRIPT  #: of every training
    owner = OWNER  #: of every app

    def __init__(
        self,
        folder: Path,
        broker: PrivateRabbitMQ,
        vhost: str,
        settings: ArbiterSettings = SETTINGS,
        ports: Mapping[Party, int] | None = None,
        *,
        gpus_per_node: int = GPUS_PER_NODE,
    ) -> None:
        self.folder = folder
        self.broker, self.vhost = broker, vhost
        self.site = _on_broker(
            local_site(folder, nodes=NODES, gpus=f"simulated:{gpus_per_node}", owner=OWNER, settings=settings),
            lambda party: broker.url(party.user, vhost, port=(ports or {}).get(party)),
        )
        with_plain_ids(self.site.app)  # a script is told its app's id before it is submitted
        self.arbiter = DaemonProcess("arbiter", self.site.arbiter, folder, "arbiter")
        self.nodes = {node.node: DaemonProcess("node-agent", node, folder, node.node) for node in self.site.nodes}
        self.app_agent = DaemonProcess("app-agent", self.site.app, folder, "app")
        self.watch = GpuWatch(folder)
        self.steps: dict[str, int] = {}  #: by app, the mini-batches it is to make

    @property
    def daemons(self) -> Sequence[DaemonProcess]:
        return (self.arbiter, *self.nodes.values(), self.app_agent)

    def check(self) -> None:
        """Fail if a daemon ended that nobody killed."""
        for daemon in self.daemons:
            daemon.check()

    @contextmanager
    def client(self) -> Iterator[Client]:
        with open_client(self.site.socket) as client:
            yield client

    def answers(self) -> bool:
        """Whether the app agent can be talked to."""
        with suppress(Fault), self.client():
            return True
        return False

    # --- apps -------------------------------------------------------------------------------------------------------

    def submit(self, steps: int, *, step_ms: float = 40.0, gang: int = 1) -> str:
        """Submit a training of `steps` mini-batches; return the app's id."""
        number = len(self.steps) + 1
        pace = ("--steps", str(steps), "--step-ms", str(step_ms), "--threads", "1", "--seed", str(number))
        spec = AppSpec(
            trials=((sys.executable, str(self.script), str(self._told(f"{self.owner}-{number}")), *pace),),
            cwd=str(self.folder),
            checkpoint_root=str(self.folder / "checkpoints"),
            env=environment((), os.environ),
            gang=gang,
            steps_total=steps,
            step_serial_s=step_ms / 1000 * gang,
            restart_s=3.0,
            requirements=Requirements(grace_s=20.0),
        )
        with self.client() as client:
            app = client.submit(spec)
        assert app == f"{self.owner}-{number}"
        self.steps[app] = steps
        return app

    def fill(self, steps: int = STEPS) -> None:
        """Submit two apps of two GPUs each, which nobody contests: one that stands still now was not told to."""
        self.submit(steps, gang=2)
        self.submit(steps, gang=2)
        self.wait_training(processes=2)

    def contest(self) -> None:
        """Submit one more app than fits, so that GPUs change hands."""
        self.submit(STEPS)

    def _told(self, app: str) -> Path:
        return self.folder / f"{app}.steps"

    def told(self, app: str) -> list[tuple[int, int]]:
        """Every mini-batch that was made for `app`, in order: (pid, step)."""
        with suppress(FileNotFoundError):
            lines = self._told(app).read_text().splitlines()
            return [(int(pid), int(step)) for pid, step in (line.split() for line in lines)]
        return []

    def progress(self) -> dict[int, int]:
        """By living training process, how many mini-batches it has made."""
        living = {worker.pid: 0 for worker in self.watch.now}
        for app in self.steps:
            for pid, _step in self.told(app):
                if pid in living:
                    living[pid] += 1
        return living

    def steps_made(self) -> int:
        """The mini-batches of all apps so far."""
        return sum(len(self.told(app)) for app in self.steps)

    def pids(self) -> set[int]:
        """All training processes."""
        return {worker.pid for worker in self.watch.now}

    def pids_on(self, node: str) -> set[int]:
        """The training processes on the GPUs of `node`."""
        return {worker.pid for worker in self.watch.now if worker.gpus[0].startswith(f"GPU-sim-{node}-")}

    def document(self) -> list[dict[str, Any]]:
        """What the arbiter says of all apps."""
        with self.client() as client:
            apps: list[dict[str, Any]] = client.query("apps")["apps"]
            return apps

    # --- waiting ----------------------------------------------------------------------------------------------------

    def wait_training(self, processes: int, steps: int = 5) -> None:
        """Wait until so many processes have made so many mini-batches."""
        until(
            lambda: sum(made >= steps for made in self.progress().values()) >= processes, "training began", self._words
        )

    def wait_progress(self, steps: int) -> None:
        """Wait until each process that trains now has made `steps` more mini-batches, or has come to its end."""
        before = self.progress()
        assert before, "nobody trains"

        def advanced() -> bool:
            now = self.progress()
            return all(pid not in now or now[pid] >= made + steps for pid, made in before.items())

        until(advanced, f"{steps} more steps of {sorted(before)}")

    def wait_finished(self) -> list[dict[str, Any]]:
        """Wait until arbiter and app agent agree that all apps are finished; return the arbiter's words."""

        def over() -> bool:
            self.check()
            with suppress(Fault), self.client() as client:
                records, apps = client.apps(), client.query("apps")["apps"]
                assert {record.app for record in records} == set(self.steps), "an app is lost"
                finished = {app["id"] for app in apps if app["state"] == "finished"}
                return finished == set(self.steps) and all(record.over for record in records)
            return False

        until(over, "all apps finished", self._words, within_s=2 * PATIENCE_S)
        return self.document()

    def finish_without_a_scratch(self) -> None:
        """Wait for the end; no mini-batch was lost or made twice, and no GPU was shared by two."""
        for app in self.wait_finished():
            steps = [step for _pid, step in self.told(app["id"])]
            assert steps == list(range(self.steps[app["id"]])), f"{app['id']} lost or repeated steps"
            assert (app["steps_lost"], app["metrics"]["accuracy"] > 0.5) == (0, True)
        assert self.watch.conflicts == []
        assert self.watch.hand_overs > 0, "no GPU changed hands, so nothing was shown"

    def _words(self) -> str:
        try:
            return json.dumps(self.document(), indent=1)
        except Fault as fault:
            return str(fault)

    # --- the end ----------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Kill every process of this cluster; training processes take their shims with them."""
        for daemon in self.daemons:
            with suppress(AssertionError):
                daemon.kill()
        for worker in self.watch.workers():
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)
        until(lambda: not self.watch.workers(), "no training process is left")


ClusterT = TypeVar("ClusterT", bound=Cluster)


def _on_broker(site: Site, url: Callable[[Party], str]) -> Site:
    return Site(
        arbiter=replace(site.arbiter, bus=url(ARBITER)),
        nodes=tuple(replace(node, bus=url(Party("node", node.node))) for node in site.nodes),
        app=replace(site.app, bus=url(Party("app", site.app.owner))),
    )


@contextmanager
def running_cluster(
    folder: Path,
    broker: PrivateRabbitMQ,
    vhost: str,
    settings: ArbiterSettings = SETTINGS,
    ports: Mapping[Party, int] | None = None,
) -> Iterator[Cluster]:
    """A cluster that is ready, watched all the while; nothing of it is left behind.

    Parties in `ports` reach the broker by way of that port of this host.
    """
    with started(Cluster(folder, broker, vhost, settings, ports)) as cluster:
        yield cluster


@contextmanager
def started(cluster: ClusterT) -> Iterator[ClusterT]:
    """Start a cluster's daemons and watch it; in the end nothing of it is left behind."""
    with ExitStack() as stack:
        stack.callback(cluster.end)
        for daemon in cluster.daemons:
            daemon.start()
        stack.enter_context(cluster.watch)
        wait_ready(cluster.site, cluster.check, timeout_s=PATIENCE_S)
        yield cluster


def until(
    happened: Callable[[], bool], what: str, else_show: Callable[[], str] = str, *, within_s: float = PATIENCE_S
) -> None:
    """Look until `happened`; other processes offer no event to wait for."""
    deadline = time.monotonic() + within_s
    while not happened():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:g} s: {what} {else_show()}")
        time.sleep(POLL_S)
