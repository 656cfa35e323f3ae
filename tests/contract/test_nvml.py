"""NVIDIA GPUs read through the real nvidia-ml-py over a played driver: links, events, odd answers, errors and hangs."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from node_agent.core.events import GpuSample, NodeFacts, Sampled, SampleFailed
from node_agent.core.proof import TOLERATED_S, Gpus
from node_agent.devices import Activity, DeviceBackend, DeviceError, Health, HungError, gpm, nvml, watched
from node_agent.devices.gpm import AGAIN_S
from node_agent.devices.nvml import LISTEN_AGAIN_S, LOST_S, NvmlBackend
from node_agent.devices.sampling import measure, open_backend
from node_agent.devices.topology import slots_of
from protocol.messages import GpuId, NodeId, TaskId
from tests.support import stand_in
from tests.support.patience import PATIENCE_S
from tests.support.stand_in import StandIn, cards

MIB = 2**20
#: All functions of the played library that are about one GPU, and those about all.
SOURCE = (Path(stand_in.__file__).parent / "nvml.c").read_text()
OF_A_GPU = re.findall(r"^int (nvml\w+)\(Handle \*", SOURCE, re.MULTILINE)
OF_ALL = sorted(set(re.findall(r"^int (nvml\w+)\(", SOURCE, re.MULTILINE)) - set(OF_A_GPU))
#: Those that are called as the library is opened, and not again.
AT_START = {
    "nvmlDeviceGetName",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetP2PStatus",
    "nvmlDeviceGetTopologyCommonAncestor",
    "nvmlDeviceGetSupportedEventTypes",
    "nvmlDeviceRegisterEvents",
    "nvmlGpmQueryDeviceSupport",
}
#: Without an answer to these, nothing is proven about a GPU; each with the codes that may be an answer.
NEEDED = dict.fromkeys(
    (
        "nvmlDeviceGetMemoryInfo_v2",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        "nvmlDeviceGetGraphicsRunningProcesses_v3",
    ),
    frozenset({3, 6, 13}),
) | {"nvmlDeviceGetMemoryInfo_v2": frozenset({3, 13, 25})}
#: Without an answer to these, a GPU is not given out.
SETTINGS = {
    "nvmlDeviceGetMigMode": {3, 13, 26},
    "nvmlDeviceGetComputeMode": {3, 13, 26},
    "nvmlDeviceGetFieldValues": {2, 3, 13, 26},
}
CODES = sorted(
    value for name, value in vars(pynvml).items() if name.startswith("NVML_ERROR_") and isinstance(value, int)
)


class Hands:
    """A driver of two GPUs, the library loaded in this process, and a clock."""

    def __init__(self, driver: StandIn, library: ctypes.CDLL) -> None:
        self.driver = driver
        self.library = library
        self.now_s = 100.0

    def gpu(self, index: int) -> GpuId:
        return GpuId(self.driver.cards[index].uuid)

    def backend(self, *only: str, look: str = "", timeout_s: float = PATIENCE_S) -> NvmlBackend:
        """Open the GPUs; a look for lost ones prints `look`."""
        command = [sys.executable, "-I", "-c", look or "pass"]
        return NvmlBackend(only, clock=lambda: self.now_s, look=command, timeout_s=timeout_s)

    def deal(self, count: int, **same: int) -> None:
        self.driver.cards = cards(count, **same)
        self.driver.write()


@pytest.fixture
def hands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hands:
    driver = StandIn(tmp_path / "driver", *cards(2))
    return Hands(driver, driver.load(monkeypatch))


def no_owner(pid: int) -> TaskId | None:
    """Every process is a stranger."""


def ask_all(backend: DeviceBackend) -> tuple[GpuSample, ...]:
    """Measure after all other questions that a node agent and `doctor` have about a GPU."""
    for device in backend.devices():
        backend.cpus([device.gpu])
        backend.persistent(device.gpu)
        backend.activity(device.gpu)
    return measure(backend, no_owner)


def answers(*gpus: str) -> str:
    return f"print({' '.join(gpus)!r})"


# --- what is there --------------------------------------------------------------------------------------------------


def test_without_a_driver_the_error_names_the_virtual_ones(hands: Hands) -> None:
    hands.driver.fault("error", "nvmlInitWithFlags", value=9)
    with pytest.raises(DeviceError, match=r"Driver Not Loaded.*simulated:4"):
        hands.backend()


@pytest.mark.skipif(Path("/sys/module/nvidia/version").exists(), reason="this host has an NVIDIA driver")
@pytest.mark.parametrize("library", stand_in.SOURCES)
def test_a_played_driver_that_is_loaded_is_not_found_by_the_drivers_name(hands: Hands, library: str) -> None:
    ctypes.CDLL(str(hands.driver.folder / library))
    with pytest.raises(OSError, match="cannot open shared object file"):
        ctypes.CDLL(library)


def test_a_driver_without_gpus_is_said(hands: Hands) -> None:
    hands.deal(0)
    with pytest.raises(DeviceError, match="shows no GPU"):
        hands.backend()


def test_gpus_stand_in_the_order_of_the_bus(hands: Hands) -> None:
    hands.driver.cards.reverse()
    hands.driver.write()
    backend = hands.backend()
    assert [device.bus_id for device in backend.devices()] == ["00000000:00:00.0", "00000000:01:00.0"]
    assert backend.driver == "580.95.05"
    backend.close()


def test_nvlink_makes_one_slot_in_spite_of_pcie(hands: Hands) -> None:
    hands.deal(4, nvlinks=18)
    backend = hands.backend()
    assert {device.slot for device in backend.devices()} == {"nvlink-0"}
    assert set(backend.topology().values()) == {"nvlink"}
    backend.close()


def test_without_nvlink_a_pcie_switch_makes_a_slot(hands: Hands) -> None:
    hands.driver.ancestors = {(0, 1): 10, (2, 3): 20, (0, 2): 30}
    hands.deal(4)
    backend = hands.backend()
    assert [device.slot for device in backend.devices()] == ["pcie-0", "pcie-0", "pcie-2", "pcie-2"]
    assert backend.topology()[hands.gpu(0), hands.gpu(2)] == "hostbridge"
    backend.close()


def test_a_gpu_with_nvlink_leaves_its_switch_to_the_others() -> None:
    a, b, c, d = (GpuId(name) for name in "abcd")
    links = {(a, b): "nvlink", (b, c): "single", (c, d): "single", (a, c): "system", (a, d): "system", (b, d): "node"}
    assert slots_of([a, b, c, d], links) == {a: "nvlink-0", b: "nvlink-0", c: "pcie-2", d: "pcie-2"}  # type: ignore[arg-type]


@pytest.mark.parametrize("flags", [(), ("used-counts-reserved",)])
def test_the_drivers_reserve_is_not_counted_as_used_whether_the_driver_does_so_or_not(
    hands: Hands, flags: tuple[str, ...]
) -> None:
    hands.driver.flag(*flags)
    backend = hands.backend()
    memory = backend.memory(hands.gpu(0))
    assert (memory.used_bytes, memory.reserved_bytes) == (100 * MIB, 500 * MIB)
    backend.close()


@pytest.mark.parametrize("code", [3, 13, 25], ids=["not supported", "function not found", "version mismatch"])
def test_a_driver_that_tells_no_reserve_counts_it_as_used(hands: Hands, code: int) -> None:
    hands.driver.fault("error", "nvmlDeviceGetMemoryInfo_v2", value=code)
    backend = hands.backend()
    assert backend.memory(hands.gpu(0)).used_bytes == 600 * MIB
    backend.close()


#: 470 lacks the newest form of most answers, 510 has no performance monitors. In 535.43 a listed process became larger,
#: 535.98 has no such list, and 535.104 has it as before.
OLDER = ["470.82.01", "510.39.01", "535.43.02", "535.54.03", "535.86.10", "535.98", "535.104.05", "580.95.05"]


@pytest.mark.parametrize("version", OLDER)
def test_memory_and_processes_are_right_with_the_functions_and_structs_of_an_older_driver(
    hands: Hands, version: str
) -> None:
    hands.deal(2, gpm=1)
    hands.driver.version = version
    listed = [
        (4711, 300, "compute"),
        (4712, 9, "compute"),
        (4713, None, "compute"),
        (4714, 7, "mps"),
        (4715, 5, "graphics"),
    ]
    hands.driver.change(0, processes=listed, lost=1)
    backend = NvmlBackend(clock=lambda: hands.now_s)  # with its own look at the GPU that does not answer
    assert backend.driver == version
    hands.driver.change(0, lost=0)
    assert healthy_in_time(backend, hands.gpu(0))
    found = [(one.pid, one.memory_bytes // MIB, one.compute) for one in backend.processes(hands.gpu(0))]
    assert found == [(4711, 300, True), (4712, 9, True), (4713, 0, True), (4714, 7, True), (4715, 5, False)]
    memory = backend.memory(hands.gpu(0))
    tells_reserve = version != "470.82.01"
    assert (memory.used_bytes, memory.reserved_bytes) == ((100 * MIB, 500 * MIB) if tells_reserve else (600 * MIB, 0))
    assert backend.monitored(hands.gpu(0)) == (version not in {"470.82.01", "510.39.01"})
    assert [(sample.healthy, sample.unmeasured) for sample in measure(backend, no_owner)] == [(True, "")] * 2
    backend.close()


def test_of_a_driver_that_lists_no_processes_a_sentence_says_that_it_is_too_old(hands: Hands) -> None:
    hands.driver.version = "440.33.01"
    hands.driver.write()
    backend = hands.backend()
    (sample, _) = measure(backend, no_owner)
    assert sample.unmeasured == (
        "NVML does not answer about its processes: Function Not Found; "
        "the driver 440.33.01 is too old for this node agent, install a newer one"
    )
    backend.close()


def test_a_process_whose_memory_the_driver_does_not_tell_still_counts(hands: Hands) -> None:
    hands.driver.change(0, processes=[(4711, None, "compute"), (4712, 9, "compute"), (4713, 7, "mps")])
    backend = hands.backend()
    found = [(one.pid, one.memory_bytes) for one in backend.processes(hands.gpu(0))]
    assert found == [(4711, 0), (4712, 9 * MIB), (4713, 7 * MIB)]
    backend.close()


def test_a_process_that_only_draws_is_told_from_one_that_computes(hands: Hands) -> None:
    listed = [(4711, 1, "compute"), (4712, 1, "mps"), (4712, 1, "graphics"), (4713, 1, "graphics")]
    hands.driver.change(0, processes=listed)
    backend = hands.backend()
    found = {process.pid: process.compute for process in backend.processes(hands.gpu(0))}
    assert found == {4711: True, 4712: True, 4713: False}
    backend.close()


def test_a_server_of_mps_is_no_stranger_and_what_it_holds_is_told_apart_from_its_clients(hands: Hands) -> None:
    hands.driver.change(0, processes=[(4711, 300, "compute"), (4712, 9, "mps"), (4713, 7, "compute")])
    backend = hands.backend()
    first, second = measure(backend, {4712: TaskId("t")}.get, {4711, 4712}.__contains__)
    assert [(process.pid, process.task) for process in first.processes] == [(4712, "t"), (4713, None)]
    assert (first.server_bytes, second.server_bytes) == (300 * MIB, None)
    backend.close()


def test_a_worker_runs_on_the_cores_near_its_gpus(hands: Hands, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4, 5})
    hands.driver.change(0, cores=0b000011)
    hands.driver.change(1, cores=0b001110)
    backend = hands.backend()
    assert backend.cpus([hands.gpu(0)]) == [0, 1]
    assert backend.cpus([hands.gpu(0), hands.gpu(1)]) == [1]
    hands.driver.change(0, cores=0b111111)
    assert backend.cpus([hands.gpu(0)]) is None  # all there are
    backend.close()


# --- some of them ---------------------------------------------------------------------------------------------------


def test_some_gpus_of_a_node_are_named_by_index_or_uuid(hands: Hands) -> None:
    hands.deal(4)
    backend = hands.backend("0", hands.gpu(2))
    assert [device.gpu for device in backend.devices()] == [hands.gpu(0), hands.gpu(2)]
    assert [device.number for device in backend.devices()] == [0, 2]
    assert set(backend.topology()) == {(hands.gpu(0), hands.gpu(2))}
    hands.driver.change(1, lost=1)
    assert [sample.healthy for sample in measure(backend, no_owner)] == [True, True]
    backend.close()
    opened = open_backend((3,), "n1", memory_bytes=0, pin=False)
    assert [device.gpu for device in opened.devices()] == [hands.gpu(3)]
    opened.close()


def test_a_named_gpu_that_does_not_answer_at_the_start_keeps_no_other_from_use_and_joins_them_when_it_does(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its UUID it could not be found, so the node agent did not start."""
    hands.deal(4)
    hands.driver.change(1, lost=1)
    for *names, told in ((hands.gpu(0), hands.gpu(1), "GPU-x", hands.gpu(1)), (hands.gpu(1), "7", "7")):
        with pytest.raises(DeviceError, match=f"'{told}', which is not here"):
            hands.backend(*names)
    monkeypatch.setattr(watched, "LOOK_EVERY_S", 0.0)
    backend = NvmlBackend([hands.gpu(0), hands.gpu(1)], clock=lambda: hands.now_s)
    well, dead = measure(backend, no_owner)
    assert (well.gpu, well.healthy) == (hands.gpu(0), True)
    assert (dead.gpu, dead.lost) == ("GPU-unreachable-1", True)
    deadline = time.monotonic() + PATIENCE_S
    while backend._look._next == 0.0:  # until a look has shown the GPUs of others, which answer
        assert time.monotonic() < deadline
        measure(backend, no_owner)
    assert hands.library.times_opened() == 3, "twice refused, and once since"
    hands.driver.change(1, lost=0)
    assert healthy_in_time(backend, hands.gpu(1))
    assert [device.gpu for device in backend.devices()] == [hands.gpu(0), hands.gpu(1)]
    backend.close()


def test_a_named_gpu_that_is_not_there_is_an_error_with_those_that_are(hands: Hands) -> None:
    with pytest.raises(DeviceError, match=rf"'7', which is not here; there are 0 \({hands.gpu(0)}\), 1"):
        hands.backend("0", "7")


@pytest.mark.parametrize(
    ("change", "mend"),
    [({"mig": 1}, "-mig 0"), ({"mode": 3}, "EXCLUSIVE_PROCESS"), ({"mode": 2}, "-c DEFAULT")],
)
def test_a_gpu_in_a_mode_that_forbids_sharing_is_out_of_use_until_that_is_changed(
    hands: Hands, change: dict[str, int], mend: str
) -> None:
    backend = hands.backend()
    hands.driver.change(1, **change)
    assert backend.health(hands.gpu(0)) == Health()
    told = backend.health(hands.gpu(1))
    assert (told.healthy, told.lost) == (False, False)
    assert mend in told.detail
    assert hands.gpu(1) in told.detail
    hands.driver.change(1, mig=0, mode=0)
    assert backend.health(hands.gpu(1)) == Health()
    hands.driver.change(1, mig=-1)  # a GPU without such a mode
    assert backend.health(hands.gpu(1)) == Health()
    backend.close()


# --- health events --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "recovery", "healthy", "fault"),
    [
        (31, 0, True, True),  # a program's mistake, and the driver wants nothing
        (119, 0, True, True),  # the driver's own verdict is believed
        (31, 1, False, False),  # also against the catalogue
        (48, 1, False, False),
        (63, 0, True, False),
        (31, -1, True, True),  # an older driver gives no verdict: the catalogue speaks
        (94, -1, True, True),
        (43, -1, True, False),
        (45, -1, True, False),
        (48, -1, False, False),
        (54, -1, False, False),
        (79, -1, False, False),
        (154, -1, False, False),
        (163, -1, False, False),
        (999, -1, False, False),
    ],
)
def test_an_xid_drains_a_gpu_or_restarts_a_program_as_the_driver_or_else_the_catalogue_says(
    hands: Hands, number: int, recovery: int, healthy: bool, fault: bool
) -> None:
    backend = hands.backend()
    hands.driver.change(0, recovery=recovery)
    hands.driver.xid(0, number)
    health = backend.health(hands.gpu(0))
    assert (health.healthy, health.lost, bool(health.faults)) == (healthy, False, fault)
    assert healthy or f"Xid {number}" in health.detail
    assert backend.health(hands.gpu(0)).faults == ()  # told once
    assert backend.health(hands.gpu(1)) == Health()
    backend.close()


def test_a_gpu_is_used_again_once_the_driver_withdraws_its_demand(hands: Hands) -> None:
    backend = hands.backend()
    hands.driver.change(0, recovery=1)
    assert "needs a GPU reset (stop the node agent" in backend.health(hands.gpu(0)).detail
    hands.driver.change(0, recovery=0)
    assert backend.health(hands.gpu(0)) == Health()
    backend.close()


def test_a_gpu_drained_by_the_catalogue_stays_so_until_a_restart(hands: Hands) -> None:
    hands.driver.change(0, recovery=-1)
    backend = hands.backend()
    hands.driver.xid(0, 48)
    assert not backend.health(hands.gpu(0)).healthy
    assert not backend.health(hands.gpu(0)).healthy
    backend.close()


def test_a_gpu_that_refuses_to_tell_events_takes_them_from_no_other(hands: Hands) -> None:
    hands.driver.fault("error", "nvmlDeviceRegisterEvents", 0, 999)
    hands.driver.change(1, recovery=-1)
    backend = hands.backend()
    hands.driver.xid(1, 48)
    assert "Xid 48" in backend.health(hands.gpu(1)).detail
    backend.close()


def test_events_are_listened_for_again_after_the_driver_refused(hands: Hands) -> None:
    hands.driver.change(0, recovery=-1)
    backend = hands.backend()
    hands.driver.fault("error", "nvmlEventSetWait_v2", value=999)
    assert backend.health(hands.gpu(0)) == Health()
    hands.driver.heal()
    hands.now_s += LISTEN_AGAIN_S
    backend.health(hands.gpu(0))
    hands.driver.xid(0, 48)
    assert "Xid 48" in backend.health(hands.gpu(0)).detail
    backend.close()


# --- errors and hangs -----------------------------------------------------------------------------------------------


def until_lost(hands: Hands, backend: NvmlBackend, index: int) -> None:
    """Measure for as long as it takes for a GPU to count as lost."""
    assert measure(backend, no_owner)[index].unmeasured
    hands.now_s += LOST_S
    assert measure(backend, no_owner)[index].lost


def healthy_in_time(backend: DeviceBackend, gpu: GpuId) -> bool:
    """Ask until the GPU is healthy, for as long as a small program may take."""
    deadline = time.monotonic() + PATIENCE_S
    while not any(
        sample.gpu == gpu and sample.healthy and not sample.unmeasured for sample in measure(backend, no_owner)
    ):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_gpu_that_fell_off_the_bus_is_lost_after_a_moment_and_the_others_are_not(hands: Hands) -> None:
    backend = hands.backend()
    hands.driver.change(0, lost=1)
    until_lost(hands, backend, 0)
    assert backend.health(hands.gpu(0)).lost
    with pytest.raises(DeviceError, match="lost"):
        backend.processes(hands.gpu(0))
    assert [sample.lost for sample in measure(backend, no_owner)] == [True, False]
    assert not measure(backend, no_owner)[1].unmeasured
    backend.close()


def test_a_lost_gpu_that_answers_another_process_is_found_again_by_opening_the_library_afresh(hands: Hands) -> None:
    backend = hands.backend(look=answers(hands.gpu(0)))
    hands.driver.change(0, lost=1)
    until_lost(hands, backend, 0)
    hands.driver.change(0, lost=0)  # it was reset
    assert healthy_in_time(backend, hands.gpu(0))
    assert hands.library.times_opened() == 2
    assert backend.processes(hands.gpu(0)) == []
    assert backend.processes(hands.gpu(1)) == []
    backend.close()


def test_a_lost_gpu_that_does_not_answer_stays_lost_and_the_library_open(hands: Hands) -> None:
    backend = hands.backend(look=answers(hands.gpu(1)))
    hands.driver.change(0, lost=1)
    until_lost(hands, backend, 0)
    for _ in range(50):
        assert backend.health(hands.gpu(0)).lost
        assert backend.health(hands.gpu(1)).healthy
        time.sleep(0.01)
    assert hands.library.times_opened() == 1
    backend.close()


def test_the_programs_own_look_prints_the_gpus_that_answer(hands: Hands) -> None:
    backend = NvmlBackend(clock=lambda: hands.now_s)
    hands.driver.change(0, lost=1)
    until_lost(hands, backend, 0)
    hands.driver.change(0, lost=0)
    assert healthy_in_time(backend, hands.gpu(0))
    backend.close()


def test_a_look_at_a_gpu_that_hangs_keeps_no_caller_waiting(hands: Hands) -> None:
    backend = hands.backend(look="import time; time.sleep(600)")
    hands.driver.change(0, lost=1)
    until_lost(hands, backend, 0)
    for _ in range(5):
        assert backend.health(hands.gpu(0)).lost
    backend.close()


def test_a_gpu_that_is_dead_from_the_start_leaves_the_others_in_use_and_joins_them_when_it_answers(
    hands: Hands,
) -> None:
    hands.deal(3)
    hands.driver.change(1, lost=1)
    backend = hands.backend(look=answers(*map(hands.gpu, range(3))))
    *well, dead = measure(backend, no_owner)
    assert [sample.gpu for sample in well] == [hands.gpu(0), hands.gpu(2)]
    assert all(sample.healthy and not sample.unmeasured for sample in well)
    assert (dead.gpu, dead.lost) == ("GPU-unreachable-1", True)
    assert "NVML cannot reach GPU 1 (GPU is lost)" in dead.detail
    slots = {device.gpu: device.slot for device in backend.devices()}
    hands.driver.change(1, lost=0)
    assert healthy_in_time(backend, hands.gpu(1))
    assert [device.gpu for device in backend.devices()] == [hands.gpu(index) for index in range(3)]
    assert {device.gpu: device.slot for device in backend.devices()}.items() >= {
        gpu: slot for gpu, slot in slots.items() if gpu in map(hands.gpu, range(3))
    }.items()
    assert len(backend.topology()) == 3
    backend.close()


@pytest.mark.parametrize("function", ["nvmlInitWithFlags", "nvmlDeviceGetCount_v2"])
def test_a_library_that_cannot_be_opened_again_is_tried_again(hands: Hands, function: str) -> None:
    backend = hands.backend(look=answers(hands.gpu(0)))
    hands.driver.change(0, lost=1)
    until_lost(hands, backend, 0)
    hands.driver.change(0, lost=0)
    hands.driver.fault("error", function, value=18)
    deadline = time.monotonic() + PATIENCE_S
    while not all(sample.unmeasured or sample.lost for sample in measure(backend, no_owner)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    hands.driver.heal()
    assert healthy_in_time(backend, hands.gpu(0))
    assert healthy_in_time(backend, hands.gpu(1))
    backend.close()


def test_a_call_that_hangs_is_given_up_and_the_next_fails_at_once(hands: Hands) -> None:
    backend = hands.backend(timeout_s=0.05)
    hands.driver.fault("hang", "nvmlDeviceGetMemoryInfo_v2", 0)
    with pytest.raises(HungError, match="did not answer"):
        measure(backend, no_owner)
    with pytest.raises(HungError, match="still hangs"):
        backend.memory(hands.gpu(1))
    hands.driver.heal()
    backend.close()


def in_use(samples: tuple[GpuSample, ...], gpus: Gpus, mark: int, now: float) -> dict[GpuId, tuple[bool, bool, str]]:
    """Return whether each GPU is healthy and proven empty after a measurement, with the sentence that says why not."""
    gpus.sampled(Sampled(mark, samples), now)
    return {status.gpu: (status.healthy, status.empty, status.detail) for status in gpus.statuses({})}


@pytest.mark.parametrize(
    ("change", "function"),
    [
        ({"mig": 1}, "nvmlDeviceGetMigMode"),
        ({"mode": 3}, "nvmlDeviceGetComputeMode"),
        ({"recovery": 1}, "nvmlDeviceGetFieldValues"),
        ({"recovery": -999}, ""),
    ],
)
def test_a_gpu_whose_settings_cannot_be_read_is_not_given_out(
    hands: Hands, change: dict[str, int], function: str
) -> None:
    """It was told healthy and empty: an error was taken for a driver without such a setting."""
    hands.driver.change(1, **change)
    if function:
        hands.driver.fault("error", function, 1, 999)
    backend, gpus = hands.backend(), Gpus(NodeFacts(NodeId("n1"), "rack-0", "boot", 1, idle_bytes_max=2**30))
    for now in (0.0, TOLERATED_S):
        told = in_use(measure(backend, no_owner), gpus, 0, now)
        assert told[hands.gpu(0)] == (True, True, "")
        healthy, empty, sentence = told[hands.gpu(1)]
        assert (healthy, empty) == (now < TOLERATED_S, False)
        assert f"({function or 'nvmlDeviceGetFieldValues'}): Unknown Error; look into the kernel's log" in sentence
    hands.driver.heal()
    hands.driver.change(1, recovery=max(0, hands.driver.cards[1].recovery))
    healthy, _, sentence = in_use(measure(backend, no_owner), gpus, 1, 9.0)[hands.gpu(1)]
    assert healthy == (not sentence) == (not function)
    backend.close()


@pytest.mark.parametrize("code", [3, 13, 26], ids=["not supported", "function not found", "deprecated"])
def test_a_gpu_without_such_settings_stays_in_use(hands: Hands, code: int) -> None:
    for function in ("nvmlDeviceGetMigMode", "nvmlDeviceGetComputeMode", "nvmlDeviceGetFieldValues"):
        hands.driver.fault("error", function, 1, code)
    hands.driver.change(0, recovery=-2)  # an older driver calls the field an invalid argument
    backend = hands.backend()
    assert [(sample.healthy, sample.unmeasured) for sample in measure(backend, no_owner)] == [(True, "")] * 2
    hands.driver.heal()
    hands.driver.fault("error", "nvmlDeviceGetComputeMode", 1, code)
    hands.driver.change(1, mig=1)
    assert "MIG divides it" in backend.health(hands.gpu(1)).detail
    backend.close()


LATER = [function for function in OF_A_GPU if function not in AT_START]
FEW = [(function, code, 1) for function in LATER for code in (3, 15, 16, 999)]
ALL = [(function, code, gpu) for function in LATER for code in CODES for gpu in range(3)]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cases", [FEW, pytest.param(ALL, marks=pytest.mark.full)], ids=["few", "all"])
def test_an_error_about_one_gpu_says_nothing_about_another(hands: Hands, cases: list[tuple[str, int, int]]) -> None:
    """Of every function, error code and GPU k: the others stay as they are, and k is out of use with a sentence.

    An error that is over before `TOLERATED_S` leaves k healthy; after that k is healthy again once it is over.
    """
    hands.deal(3, gpm=1)
    facts = NodeFacts(NodeId("n1"), "rack-0", "boot", 1, idle_bytes_max=2**30)
    for function, code, index in cases:
        case = f"{function} {code} {index}"
        backend, gpus = hands.backend(look=answers(*map(hands.gpu, range(3)))), Gpus(facts)
        well = in_use(measure(backend, no_owner), gpus, 0, hands.now_s)
        assert set(well.values()) == {(True, True, "")}, case
        erred = hands.library.times_erred()
        hands.driver.fault("error", function, index, code)
        hands.driver.xid(index, 43)  # the driver is asked for the UUID of its GPU
        for second in range(1, 13):
            hands.now_s += 1.0
            told = in_use(ask_all(backend), gpus, second, hands.now_s)
            others = {gpu: status for gpu, status in told.items() if gpu != hands.gpu(index)}
            assert set(others.values()) == {(True, True, "")}, case
            healthy, empty, sentence = told[hands.gpu(index)]
            lasted_s = second - 1
            if lasted_s < LOST_S:
                assert healthy, case
            assert empty == (not sentence), case
            if code not in (NEEDED | SETTINGS).get(function, CODES):
                assert not empty, case
                lost = function in NEEDED and code == 15
                assert healthy == (lasted_s < (LOST_S if lost else TOLERATED_S)), case
        assert hands.library.times_erred() > erred, case
        hands.driver.heal()
        deadline = time.monotonic() + PATIENCE_S
        while in_use(measure(backend, no_owner), gpus, 99, hands.now_s)[hands.gpu(index)] != (True, True, ""):
            assert time.monotonic() < deadline, case
        backend.close()


@pytest.mark.parametrize("function", OF_A_GPU)
def test_an_error_about_one_gpu_at_the_start_leaves_the_others_in_use(hands: Hands, function: str) -> None:
    hands.deal(3, gpm=1, nvlinks=int(function == "nvmlDeviceGetP2PStatus"))
    facts = NodeFacts(NodeId("n1"), "rack-0", "boot", 1, idle_bytes_max=2**30)
    for code in (3, 15, 18, 999):
        erred = hands.library.times_erred()
        hands.driver.fault("error", function, 1, code)
        backend, gpus = hands.backend(look=answers(hands.gpu(0), hands.gpu(2))), Gpus(facts)
        told = in_use(ask_all(backend), gpus, 0, hands.now_s)
        assert hands.library.times_erred() > erred, code
        assert len(told) == 3, code
        others = {gpu: status for gpu, status in told.items() if gpu in (hands.gpu(0), hands.gpu(2))}
        assert others == dict.fromkeys((hands.gpu(0), hands.gpu(2)), (True, True, "")), (code, told)
        (_, empty, sentence) = next(status for gpu, status in told.items() if gpu not in others)
        assert empty == (not sentence), code
        backend.close()
        hands.driver.heal()


#: All functions of pynvml that the backend calls about one GPU, by its handle or its index, and those of GPM.
CALLED = sorted(
    {
        name
        for module in (nvml, gpm)
        for name in re.findall(r"nvml\.(nvml\w+)\(", Path(module.__file__).read_text())
        if name.startswith(("nvmlDevice", "nvmlGpm")) and name not in {"nvmlDeviceGetCount", "nvmlGpmSampleFree"}
    }
)


def mismatched(monkeypatch: pytest.MonkeyPatch, function: str, index: int) -> None:
    """Have a function of pynvml find a library of another version, where it is asked about one GPU or about none."""
    right = getattr(pynvml, function)

    def of(asked: Any) -> int:
        return asked if isinstance(asked, int) else int(ctypes.cast(asked, ctypes.POINTER(ctypes.c_int))[0])

    def wrong(*arguments: Any) -> Any:
        if function in {"nvmlGpmSampleAlloc", "nvmlGpmMetricsGet"} or of(arguments[0]) == index:
            raise pynvml.NVMLLibraryMismatchError("the pyNVML version does not match the NVML lib version")
        return right(*arguments)

    monkeypatch.setattr(pynvml, function, wrong)


@pytest.mark.parametrize("function", CALLED)
def test_a_library_of_another_version_than_pynvml_is_an_error_about_the_gpu_asked_for(
    hands: Hands, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """`NVMLLibraryMismatchError` is no `NVMLError`; it ended the node agent."""
    hands.deal(3, gpm=1)
    monkeypatch.setattr(pynvml, "NVML_NVLINK_MAX_LINKS", 1)
    facts = NodeFacts(NodeId("n1"), "rack-0", "boot", 1, idle_bytes_max=2**30)
    mismatched(monkeypatch, function, 1)
    backend, gpus = hands.backend(look=answers(hands.gpu(0), hands.gpu(2))), Gpus(facts)
    for second in range(8):
        hands.now_s += 1.0
        told = in_use(measure(backend, no_owner), gpus, second, hands.now_s)
        for index in (0, 2):
            assert told.pop(hands.gpu(index)) == (True, True, "")
        ((healthy, empty, sentence),) = told.values()
        assert empty == (not sentence)
        assert healthy == (not sentence) or second < TOLERATED_S
        backend.activity(hands.gpu(0))
    backend.close()


def test_a_driver_that_does_not_tell_its_version_is_used_all_the_same(hands: Hands) -> None:
    hands.driver.fault("error", "nvmlSystemGetDriverVersion", value=999)
    backend = hands.backend()
    assert (backend.driver, len(backend.devices())) == ("", len(hands.driver.cards))
    backend.close()


@pytest.mark.parametrize("function", OF_ALL)
def test_an_error_of_the_library_itself_ends_nothing(hands: Hands, function: str) -> None:
    hands.driver.cards[0].gpm = 1
    hands.driver.write()
    backend = hands.backend(look=answers(hands.gpu(0), hands.gpu(1)))
    for code in (3, 15, 18, 999):
        hands.driver.fault("error", function, value=code)
        for _ in range(8):
            hands.now_s += 1.0
            samples = measure(backend, no_owner)
            assert all(sample.healthy or sample.detail or sample.unmeasured for sample in samples)
            reading = backend.activity(hands.gpu(0))
            assert reading is None or reading.source in {"gpm", "utilisation"}
        hands.driver.heal()
        assert healthy_in_time(backend, hands.gpu(0))
    backend.close()


def test_a_hang_that_passes_costs_no_gpu_its_health_and_one_that_lasts_all() -> None:
    gpus = Gpus(NodeFacts(NodeId("n1"), "rack-0", "boot", 1, idle_bytes_max=2**30))
    sample = GpuSample(GpuId("GPU-a"), "H200", 2**37, "slot-0", 0)
    gpus.sampled(Sampled(0, (sample,)), 0.0)
    hang = SampleFailed("NVML did not answer within 10 s; a GPU of this node hangs")
    for now, healthy in ((10.0, True), (11.0, True), (10.0 + TOLERATED_S, False)):
        gpus.failed(hang.reason, now)
        (status,) = gpus.statuses({})
        assert (status.healthy, status.empty) == (healthy, False)
        assert hang.reason in status.detail
    gpus.sampled(Sampled(1, (sample,)), 20.0)
    (status,) = gpus.statuses({})
    assert (status.healthy, status.empty) == (True, True)


# --- performance monitors -------------------------------------------------------------------------------------------


@pytest.fixture
def monitored(hands: Hands) -> Iterator[Hands]:
    """With GPM, as on Hopper."""
    hands.deal(1, gpm=1)
    yield hands
    assert hands.library.samples_held() <= 2  # the driver's memory is given back, but for one sample of each use


def passes(hands: Hands, seconds: float, percent: float) -> None:
    """Let a GPU work at this share of its SMs for a time."""
    hands.now_s += seconds
    card = hands.driver.cards[0]
    hands.driver.change(0, gpm_s=card.gpm_s + seconds, gpm_work=card.gpm_work + seconds * percent)


def test_activity_is_what_the_performance_monitors_say_between_two_calls(monitored: Hands) -> None:
    backend, gpu = monitored.backend(), monitored.gpu(0)
    assert backend.activity(gpu) is None
    passes(monitored, 0.2, 80)
    assert backend.activity(gpu) == Activity(pytest.approx(0.8), "gpm")
    passes(monitored, 0.2, 20)
    assert backend.activity(gpu) == Activity(pytest.approx(0.2), "gpm")
    assert monitored.library.samples_held() == 1
    backend.close()


def test_load_is_the_larger_of_warps_and_bandwidth_whatever_asks_for_activity(monitored: Hands) -> None:
    backend, gpu = monitored.backend(), monitored.gpu(0)
    assert backend.load(gpu) is None
    for warps, dram in ((30, 10), (20, 60)):
        card = monitored.driver.cards[0]
        monitored.driver.change(0, gpm_warps=card.gpm_warps + warps, gpm_dram=card.gpm_dram + dram)
        passes(monitored, 1.0, 90)
        backend.activity(gpu)
        assert backend.load(gpu) == pytest.approx(max(warps, dram) / 100)
    (sample,) = measure(backend, no_owner)
    assert (sample.utilisation, sample.load) == (0.37, None), "within 100 ms"
    monitored.driver.change(0, gpm=0)
    assert NvmlBackend().load(gpu) is None
    backend.close()


def test_a_call_within_100_ms_says_nothing_and_the_next_covers_both_times(monitored: Hands) -> None:
    backend, gpu = monitored.backend(), monitored.gpu(0)
    backend.activity(gpu)
    passes(monitored, 0.08, 100)
    assert backend.activity(gpu) is None
    passes(monitored, 0.08, 0)
    assert backend.activity(gpu) == Activity(pytest.approx(0.5), "gpm")
    backend.close()


def test_where_the_performance_monitors_refuse_utilisation_stands_in(monitored: Hands) -> None:
    backend, gpu = monitored.backend(), monitored.gpu(0)
    monitored.driver.fault("error", "nvmlGpmSampleGet", 0, 3)  # as under MIG
    assert backend.activity(gpu) is None
    assert backend.activity(gpu) == Activity(0.37, "utilisation")
    assert monitored.library.samples_held() == 0
    backend.close()


@pytest.mark.parametrize("function", ["nvmlGpmQueryDeviceSupport", "nvmlGpmSampleGet", "nvmlGpmMetricsGet"])
def test_monitors_that_err_are_asked_again_later_and_utilisation_stands_in_meanwhile(
    monitored: Hands, function: str
) -> None:
    backend, gpu = monitored.backend(), monitored.gpu(0)
    monitored.driver.fault("error", function, value=999)
    for _ in range(3):
        passes(monitored, 0.2, 80)
        found = backend.activity(gpu)
    assert found == Activity(0.37, "utilisation")
    monitored.driver.heal()
    passes(monitored, AGAIN_S, 80)
    backend.activity(gpu)
    passes(monitored, 0.2, 80)
    assert backend.activity(gpu) == Activity(pytest.approx(0.8), "gpm")
    backend.close()


def test_samples_of_a_library_that_was_opened_afresh_since_are_not_compared(monitored: Hands) -> None:
    backend, gpu = monitored.backend(look=answers(monitored.gpu(0))), monitored.gpu(0)
    backend.activity(gpu)
    monitored.driver.change(0, lost=1)
    until_lost(monitored, backend, 0)
    monitored.driver.change(0, lost=0)
    assert healthy_in_time(backend, gpu)
    passes(monitored, 0.2, 80)
    assert backend.activity(gpu) is None
    passes(monitored, 0.2, 80)
    assert backend.activity(gpu) == Activity(pytest.approx(0.8), "gpm")
    backend.close()
