"""Variables whose values only the task may know: read on the node as it starts, and in no file or message of ours."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pytest
from msgspec.structs import replace

from app_agent.core.spec import AppSpec
from launch.site.site import end_everything
from protocol.messages import ARBITER, Party, TaskOrder, TaskStatus
from tests.support.cluster import running_cluster, until
from tests.support.node_site import Site, node_site, task_order
from tests.support.patience import PATIENCE_S
from tests.support.rabbitmq import PASSWORD, PrivateRabbitMQ

A = "ada-1.0-a0"
VALUE = "tr0ub4dor-and-3"
PRINTING = "import os; print(repr(os.environ['API_KEY']), end='')"


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with node_site(tmp_path) as made:
        yield made


def order(site: Site, secrets: dict[str, str], program: str = PRINTING) -> TaskOrder:
    plain = task_order(site.folder, A, sys.executable, "-c", program)
    assert plain.launch is not None
    return replace(plain, launch=replace(plain.launch, secrets=secrets))


async def ended(site: Site, secrets: dict[str, str], program: str = PRINTING) -> TaskStatus:
    await site.plan(order(site, secrets, program))
    return await site.exited(A)


# --- on the node ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "value"),
    [(b"a b\n", "a b"), (b"a", "a"), (b"a\n\n", "a\n"), (b"a\r\n", "a"), (b"", ""), ("\u00e9\n".encode(), "\u00e9")],
)
async def test_a_task_finds_the_content_of_the_file_less_the_newline_at_its_end(
    site: Site, content: bytes, value: str
) -> None:
    (site.folder / "key").write_bytes(content)
    assert (await ended(site, {"API_KEY": str(site.folder / "key")})).outcome == "finished"
    assert (await site.log(A)).data.decode() == repr(value)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda _: None, "No such file or directory"),
        (lambda path: path.mkdir(), "which is no regular file"),
        (os.mkfifo, "which is no regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "which is no regular file"),
        (lambda path: path.write_bytes(b"a\0b"), "holds a zero byte"),
        (lambda path: path.write_bytes(b"a" * 200_000), "holds more than 100000 bytes"),
    ],
    ids=["missing", "folder", "pipe", "device", "zero byte", "long"],
)
async def test_a_secret_that_cannot_be_read_is_one_sentence_with_variable_file_and_mend(
    site: Site, make: object, says: str
) -> None:
    path = site.folder / "key"
    make(path)  # type: ignore[operator]
    status = await ended(site, {"API_KEY": str(path)})
    assert status.outcome == "failed"
    for words in (
        "API_KEY",
        str(path),
        says,
        "give --secret a regular file of text that the node agent's user can read",
    ):
        assert words in status.reason
    assert "on node n1" in status.reason


async def test_what_the_node_agent_says_wins_over_a_secret_as_over_a_plain_variable(site: Site) -> None:
    (site.folder / "key").write_text("forged")
    files = dict.fromkeys(("GPU_ARBITER_TASK", "CUDA_VISIBLE_DEVICES", "API_KEY"), str(site.folder / "key"))
    program = (
        "import os; print(*(os.environ[name] for name in ('GPU_ARBITER_TASK', 'CUDA_VISIBLE_DEVICES', 'API_KEY')))"
    )
    assert (await ended(site, files, program)).outcome == "finished"
    assert (await site.log(A)).data.split() == [A.encode(), b"GPU-sim-n1-0", b"forged"]


# --- at a whole site ------------------------------------------------------------------------------------------------


@pytest.fixture
def broker() -> Iterator[PrivateRabbitMQ]:
    parties = (ARBITER, Party("app", "me"), Party("node", "n1"), Party("node", "n2"))
    with PrivateRabbitMQ(parties) as broker:
        yield broker


def holding(word: str, *folders: Path) -> set[str]:
    """The files below these folders that hold `word`, each by its name."""
    found = set()
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and word.encode() in path.read_bytes():
                found.add(path.name)
    return found


def telling(word: str, file: Literal["cmdline", "environ"]) -> set[int]:
    """The processes of this host whose command lines or variables hold `word`."""
    found = set()
    for path in Path("/proc").glob(f"[0-9]*/{file}"):
        with suppress(OSError):  # it has ended
            if word.encode() in path.read_bytes():
                found.add(int(path.parent.name))
    return found


def open_to_others(folder: Path) -> list[str]:
    """The files and folders of a site's state that others than its user may look into, sockets aside."""
    paths = [folder, *folder.rglob("*")]
    return [str(path) for path in paths if not path.is_socket() and path.lstat().st_mode & 0o077]


@pytest.mark.slow
@pytest.mark.broker
def test_the_value_of_a_secret_is_in_no_file_of_a_site(broker: PrivateRabbitMQ, tmp_path: Path) -> None:
    site, home = tmp_path / "site", tmp_path / "home"
    site.mkdir()
    home.mkdir()
    (home / "key").write_text(f"{VALUE}\n")
    told = home / "told"
    program = f"""
import hashlib, os, pathlib, time
value = os.environ["API_KEY"]
pathlib.Path({str(home / "pid")!r}).write_text(str(os.getpid()))
pathlib.Path({str(told)!r}).write_text(hashlib.sha256(value.encode()).hexdigest())
while not os.path.exists({str(home / "gate")!r}):
    time.sleep(0.05)
"""
    spec = AppSpec(
        trials=((sys.executable, "-c", program),),
        cwd=str(home),
        checkpoint_root=str(home / "checkpoints"),
        env={"PLAIN": "correct-horse-battery"},
        secrets={"API_KEY": str(home / "key")},
    )

    def the_task_alone() -> bool:
        return telling(VALUE, "environ") == {int((home / "pid").read_text() or 0)}

    with running_cluster(site, broker, "/") as cluster, cluster.client() as client:
        for node in cluster.nodes.values():  # what is sent to them stays at the broker meanwhile, and in its files
            node.signal(signal.SIGSTOP)
        app = client.submit(spec)
        until(lambda: bool(holding("correct-horse-battery", broker.folder)), "the launch is in the broker's files")
        on_the_way = holding(VALUE, broker.folder)
        for node in cluster.nodes.values():
            node.signal(signal.SIGCONT)
        until(lambda: told.exists() and len(told.read_text()) == 64, "the task runs")
        while_running = holding(VALUE, site, broker.folder)
        listed = telling(VALUE, "cmdline")
        # On a slow machine the nodes stand still for so long that the task is started again.
        until(the_task_alone, "the task itself has the value, and no other process")
        plain = holding("correct-horse-battery", site)
        states = [site / "arbiter", site / "node-n1", site / "node-n2", site / "app"]
        opened = [path for folder in states for path in open_to_others(folder)]
        with_password = holding(f":{PASSWORD}@", site)
        processes = [Path(f"/proc/{daemon.pid}") for daemon in cluster.daemons]
        told_of_daemons = [(path / file).read_bytes() for path in processes for file in ("cmdline", "environ")]
        (home / "gate").touch()
        assert client.wait(app, until="done", timeout_s=PATIENCE_S).state == "finished"
        afterwards = holding(VALUE, site, broker.folder)
        end_everything(client)
    assert told.read_text() == hashlib.sha256(VALUE.encode()).hexdigest()
    assert {"app-me.db-wal", "journal.db-wal", "spec.json"} <= plain, "what is no secret is where it is looked for"
    assert (on_the_way, while_running, afterwards) == (set(), set(), set())
    assert listed == set()
    assert opened == []
    assert with_password == {"arbiter.toml", "n1.toml", "n2.toml", "app.toml"}, "the configurations, which name it"
    assert [told for told in told_of_daemons if f":{PASSWORD}@".encode() in told] == []
