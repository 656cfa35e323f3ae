"""The daemons of MPS over played programs of NVIDIA's: found again, started again, given up with a sentence."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.gpu.sections.pack import under_daemon
from launch.doctor import _nodes_here
from node_agent import procfs
from node_agent.config import ConfigError, parse
from node_agent.daemon import mps_gpus
from node_agent.devices.nvml import NvmlBackend
from node_agent.workers import mps
from node_agent.workers.manager import _socket_dir
from node_agent.workers.mps import CONTROL, PATH_BYTES_MAX, PIPE, PIPES, MpsClient, MpsDaemons
from protocol.messages import GpuId
from tests.support.patience import PATIENCE_S
from tests.support.stand_in import StandIn, cards

MIB = 2**20


class Bench:
    """A played driver of two GPUs, and the node agent's daemons."""

    def __init__(self, folder: Path, driver: StandIn, stack: ExitStack) -> None:
        self.driver, self._stack = driver, stack
        self.folder = folder
        self.gpu, self.other = (GpuId(card.uuid) for card in driver.cards)
        self.daemons = self.next()

    def next(self, *gpus: GpuId) -> MpsDaemons:
        """The daemons as the next node agent knows them."""
        return MpsDaemons(gpus or (self.gpu, self.other), _socket_dir(self.folder, PIPES), self.folder)

    def offer(self, gpu: GpuId | None = None, *, has_clients: bool = False) -> MpsClient:
        return self.daemons.client(gpu or self.gpu, has_clients=has_clients)

    def pid(self, offer: MpsClient) -> int:
        return int((Path(offer.env[PIPE]) / f"{CONTROL}.pid").read_text())

    def server(self, offer: MpsClient) -> int:
        return int(self.tell(offer, "get_server_list"))

    def tell(self, offer: MpsClient, words: str) -> str:
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(f"{offer.env[PIPE]}/control")
            link.sendall(words.encode())
            return link.recv(4096).decode().strip()

    def client(self, offer: MpsClient) -> subprocess.Popen[bytes]:
        """Start a process that is a client, as CUDA would make it one."""
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        process = self._stack.enter_context(subprocess.Popen(command, env={**os.environ, **offer.env}))
        self._stack.callback(process.kill)
        assert self.tell(offer, f"client {process.pid}") == "welcome"
        return process


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    driver = StandIn(tmp_path / "driver", *cards(2))
    driver.play_mps(monkeypatch)
    with ExitStack() as stack:
        found = Bench(tmp_path, driver, stack)
        yield found
    driver.flag()
    found.next().end((), all_of_them=True)


def wait(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.02)


def lives(pid: int) -> bool:
    return procfs.program(pid) != "" and (found := procfs.stat(pid)) is not None and found.state != "Z"


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


# --- the setting ----------------------------------------------------------------------------------------------------

UUID = "GPU-00000001-0000-4000-8000-000000000001"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        (
            {"mps": "some"},
            "mps is 'some'; write 'all' for each GPU of this node, [0, 2] for some of them, or [] for none",
        ),
        ({"mps": [0, 0]}, "mps names a GPU twice; write each GPU once, by its index or its UUID"),
        ({"mps": ["GPU-1"]}, "mps names 'GPU-1'; write each GPU once"),
        ({"mps": ["MIG-1"]}, "mps names 'MIG-1'; a MIG instance cannot be given to jobs; write each GPU once"),
    ],
)
def test_a_setting_that_cannot_be_is_one_error_with_the_mend(fields: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse({"node": "n1", "gpus": "nvml", **fields}, source="node.toml")
    assert str(caught.value).startswith("node.toml: mps ")
    assert told in str(caught.value)


@pytest.mark.parametrize("field", ["mps_memory_share", "mps_thread_share"])
@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, 50])
def test_a_limit_that_is_no_part_of_a_gpu_is_one_error_with_the_mend(field: str, share: float) -> None:
    with pytest.raises(ConfigError, match=rf"node.toml: {field} is {share}.*; write a part of the GPU from 0.01 to 1"):
        parse({"node": "n1", "gpus": "nvml", field: share}, source="node.toml")


def test_the_limits_of_a_client_are_the_variables_that_nvidia_documents() -> None:
    assert mps.limits(GpuId(UUID), 0, 1.0) == {}
    assert mps.limits(GpuId(UUID), 3 * MIB // 2, 0.255) == {
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"{UUID}=1M",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "26",
    }


@pytest.mark.parametrize(
    ("setting", "which"), [((), []), ([], []), ("all", [0, 1]), ([1], [1]), ([UUID], [1]), ([0, UUID], [0, 1])]
)
def test_the_gpus_of_the_setting_are_named_by_index_or_uuid(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, setting: object, which: list[int]
) -> None:
    bench.driver.load(monkeypatch)
    backend = NvmlBackend()
    config = parse({"node": "n1", "gpus": "nvml", "mps": setting}, source="node.toml")
    assert mps_gpus(config, backend) == {GpuId(bench.driver.cards[index].uuid) for index in which}
    backend.close()


# --- its life -------------------------------------------------------------------------------------------------------


def test_each_gpu_has_a_daemon_of_its_own_in_folders_of_its_own(bench: Bench) -> None:
    one, other = bench.offer(), bench.offer(bench.other)
    assert one.trouble == other.trouble == ""
    assert bench.pid(one) != bench.pid(other)
    for offer, gpu in ((one, bench.gpu), (other, bench.other)):
        assert procfs.variable(bench.pid(offer), "CUDA_VISIBLE_DEVICES") == gpu
        assert procfs.variable(bench.server(offer), "CUDA_VISIBLE_DEVICES") == gpu
        assert Path(offer.env[PIPE]).stat().st_mode & 0o777 == 0o700
        assert Path(offer.env[mps.LOGS]).stat().st_mode & 0o777 == 0o700


def test_the_next_node_agent_finds_the_daemon_and_its_clients_again(bench: Bench) -> None:
    first = bench.offer()
    client = bench.client(first)
    bench.daemons = bench.next()
    again = bench.offer(has_clients=True)
    assert (again.env, bench.pid(again)) == (first.env, bench.pid(first))
    assert bench.tell(again, f"get_client_list {bench.server(again)}") == str(client.pid)


def test_a_daemon_that_died_is_started_again(bench: Bench) -> None:
    before = bench.pid(bench.offer())
    os.kill(before, signal.SIGKILL)
    wait(lambda: not lives(before))
    offer = bench.offer(has_clients=True)
    assert offer.trouble == ""
    assert bench.pid(offer) != before


@pytest.mark.parametrize("has_clients", [True, False])
def test_a_server_that_outlives_its_daemon_is_left_to_its_clients_if_it_has_any(
    bench: Bench, has_clients: bool
) -> None:
    first = bench.offer()
    server = bench.server(first)
    bench.driver.flag("mps-stays")
    os.kill(bench.pid(first), signal.SIGKILL)
    wait(lambda: not lives(bench.pid(first)))
    assert bench.offer(has_clients=has_clients).trouble == ""
    assert lives(server) is has_clients


def test_a_daemon_that_does_not_answer_is_killed_unless_it_has_clients(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bench.pid(bench.offer())
    os.kill(before, signal.SIGSTOP)
    monkeypatch.setattr(mps, "ASK_S", 0.5)
    monkeypatch.setattr(mps, "QUIT_S", 0.5)
    monkeypatch.setattr(mps.MpsDaemon.ask, "__kwdefaults__", {"timeout_s": 0.5})
    assert "does not answer; it is started anew once" in bench.offer(has_clients=True).trouble
    assert lives(before)
    monkeypatch.setattr(mps.MpsDaemon.ask, "__kwdefaults__", {"timeout_s": PATIENCE_S})
    monkeypatch.setattr(mps.MpsDaemon, "answers", lambda self: self.pid() != before)
    offer = bench.offer()
    assert (offer.trouble, bench.pid(offer) == before) == ("", False)


def test_daemons_end_without_a_client_and_those_of_gpus_that_the_setting_left_out(bench: Bench) -> None:
    one, other = bench.offer(), bench.offer(bench.other)
    pids = bench.pid(one), bench.pid(other)
    only = bench.next(bench.gpu)
    only.end({bench.other})
    assert all(map(lives, pids))
    only.end(())
    assert [lives(pid) for pid in pids] == [True, False]
    only.end({bench.gpu}, all_of_them=True)
    assert lives(pids[0])
    only.end((), all_of_them=True)
    assert not lives(pids[0])


def test_a_daemon_that_does_not_obey_is_killed_with_its_server(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    offer = bench.offer()
    pid, server = bench.pid(offer), bench.server(offer)
    bench.driver.flag("mps-stays")
    monkeypatch.setattr(mps, "QUIT_S", 0.2)
    bench.daemons.end((), all_of_them=True)
    wait(lambda: not lives(pid) and not lives(server))


def test_the_path_of_its_socket_fits_however_deep_the_state_folder_is(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["folder-with-a-long-name"] * 6)
    folder = _socket_dir(deep, PIPES, longest=PATH_BYTES_MAX)
    assert len(os.fsencode(folder)) + PATH_BYTES_MAX <= 107
    assert folder == _socket_dir(deep, PIPES, longest=PATH_BYTES_MAX)
    folder.rmdir()


# --- what cannot be had ---------------------------------------------------------------------------------------------


def test_without_the_program_the_trouble_names_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    offer = bench.offer()
    assert (offer.env, offer.mark) == ({}, None)
    assert offer.trouble.startswith(f"{bench.gpu} has no MPS, and jobs there run without it: {CONTROL}, which comes")


def test_a_daemon_that_cannot_be_started_and_a_server_that_ends_at_once_are_told_with_their_last_line(
    bench: Bench,
) -> None:
    bench.driver.flag("mps-no-daemon")
    assert "ended with code 1 (An instance of this daemon may not run as this user)" in bench.offer().trouble
    bench.driver.flag("mps-no-server")
    assert "its server does not start (Server 95 exited with status 1)" in bench.offer().trouble
    assert list((bench.folder / PIPES).glob("*/control")) == []


def test_doctor_tells_of_a_gpu_without_mps_until_it_has_it(bench: Bench) -> None:
    bench.driver.flag("mps-no-daemon")
    bench.offer()
    (check,) = _nodes_here([bench.folder])
    assert (check.name, check.verdict) == ("MPS", "note")
    assert f"{bench.gpu} has no MPS" in check.found
    bench.driver.flag()
    assert bench.offer().trouble == ""
    assert list(_nodes_here([bench.folder])) == []


# --- a fatal fault --------------------------------------------------------------------------------------------------


def test_a_fatal_fault_shows_in_the_state_of_the_server_and_then_in_its_log(bench: Bench) -> None:
    offer = bench.offer()
    assert offer.mark is not None
    client = bench.client(offer)
    assert bench.daemons.evidence(offer.mark) == ""
    bench.tell(offer, f"fault {client.pid}")
    assert bench.daemons.evidence(offer.mark) == "its state is FAULT"
    end(client)
    assert bench.daemons.evidence(offer.mark) == "its log says: Server is handling a fatal GPU error of 1 clients"
    later = bench.offer().mark
    assert later is not None
    assert bench.daemons.evidence(later) == ""


def test_a_faulted_server_is_offered_to_nobody_until_its_clients_have_ended(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "CLEAR_S", 0.3)
    first = bench.offer()
    client = bench.client(first)
    bench.tell(first, f"fault {client.pid}")
    assert "takes no client until all that it has have ended" in bench.offer(has_clients=True).trouble
    end(client)
    again = bench.offer()
    assert again.trouble == ""
    assert bench.pid(again) == bench.pid(first)


def test_a_server_that_stays_faulted_without_a_client_is_started_anew(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps, "CLEAR_S", 0.3)
    first = bench.offer()
    before = bench.pid(first)
    bench.tell(first, f"fault {bench.client(first).pid}")
    again = bench.offer()  # the node agent knows of no client: it was left by a task that is over
    assert again.trouble == ""
    assert bench.pid(again) != before


def test_contexts_of_a_client_are_destroyed_before_it_is_killed(bench: Bench) -> None:
    offer = bench.offer()
    one, other = bench.client(offer), bench.client(offer)
    assert offer.mark is not None
    bench.daemons.release(offer.mark, [one.pid, os.getpid()])
    assert bench.tell(offer, f"get_client_list {bench.server(offer)}") == str(other.pid)


# --- on the GPU -----------------------------------------------------------------------------------------------------


def test_its_server_is_told_from_its_clients_and_from_the_servers_of_others(bench: Bench, tmp_path: Path) -> None:
    offer = bench.offer()
    server, client = bench.server(offer), bench.client(offer)
    elsewhere = MpsDaemons((bench.gpu,), _socket_dir(tmp_path / "other", PIPES), tmp_path / "other")
    theirs = elsewhere.client(bench.gpu, has_clients=False)
    assert [bench.daemons.serves(pid) for pid in (server, client.pid, bench.server(theirs), os.getpid())] == [
        True,
        False,
        False,
        False,
    ]
    elsewhere.end((), all_of_them=True)


# --- the benchmark --------------------------------------------------------------------------------------------------


def test_the_benchmark_runs_a_daemon_as_a_node_agent_does_and_ends_it(bench: Bench) -> None:
    with under_daemon(bench.gpu) as env:
        assert env["CUDA_VISIBLE_DEVICES"] == bench.gpu
        pid = int((Path(env[PIPE]) / f"{CONTROL}.pid").read_text())
        assert lives(pid)
    assert not lives(pid)
    bench.driver.flag("mps-no-server")
    with pytest.raises(mps.MpsError, match="its server does not start"), under_daemon(bench.gpu):
        pass
