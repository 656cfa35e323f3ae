"""The promises of `node_agent.devices`, on virtual GPUs always and on NVIDIA GPUs where there is a driver.

NVML itself is also read through a small recorded stand-in of the module `pynvml`, so that the reading of links, events
and odd answers is tested where there is no GPU.
"""

# The stand-in bears the names of pynvml.
# ruff: noqa: N801, N802, N815, N818

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from node_agent import procfs
from node_agent.devices import Activity, DeviceBackend, DeviceError, Health
from node_agent.devices.gpm import Gpm
from node_agent.devices.nvml import NvmlBackend, slots_of
from node_agent.devices.sampling import measure, open_backend
from node_agent.devices.simulated import SimulatedBackend
from node_agent.devices.xid import BUCKETS, CATALOGUE, judge
from protocol.messages import GpuId, TaskId

MIB = 2**20


# --- a recorded stand-in for the module pynvml ----------------------------------------------------------------------


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value
        super().__init__(f"error {value}")


class NVMLError_NotSupported(NVMLError): ...


class NVMLError_NotFound(NVMLError): ...


class NVMLError_FunctionNotFound(NVMLError): ...


class NVMLError_Timeout(NVMLError): ...


@dataclass
class Card:
    """One GPU as the driver would describe it; `nvlinks` is how many of its links are up."""

    uuid: str
    bus: str
    nvlinks: int = 0
    processes: list[tuple[int, int | None]] = field(default_factory=list)
    used: int = 600 * MIB
    reserved: int = 500 * MIB
    recovery: int = 0
    lost: bool = False
    cores: int = 0xFFFF_FFFF_FFFF_FFFF


class RecordedNvml:
    """The functions of pynvml 13.580 that are used, with answers in the shape that a node of 8 GPUs gave."""

    NVMLError = NVMLError
    NVMLError_NotSupported = NVMLError_NotSupported
    NVMLError_NotFound = NVMLError_NotFound
    NVMLError_FunctionNotFound = NVMLError_FunctionNotFound
    NVMLError_Timeout = NVMLError_Timeout
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_NVLINK_MAX_LINKS = 18
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    nvmlMemory_v2 = 0x2000028

    def __init__(self, *cards: Card, ancestors: dict[tuple[str, str], int] | None = None) -> None:
        self.cards = list(cards)
        self.ancestors = ancestors or {}
        self.pending: list[SimpleNamespace] = []
        self.hang: threading.Event | None = None
        self.field_supported = True
        self.opened = 0
        self.drawing: list[int] = []

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        return self.cards[index]

    def nvmlDeviceGetUUID(self, card: Card) -> str:
        return card.uuid

    def nvmlDeviceGetName(self, card: Card) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetPciInfo(self, card: Card) -> SimpleNamespace:
        return SimpleNamespace(busId=card.bus)

    def nvmlDeviceGetMemoryInfo(self, card: Card, version: int | None = None) -> SimpleNamespace:
        if self.hang is not None:
            self.hang.wait(30)
        if card.lost:
            raise NVMLError(15)
        return SimpleNamespace(total=143771 * MIB, used=card.used, reserved=card.reserved)

    def _listing(self, card: Card) -> list[SimpleNamespace]:
        if card.lost:
            raise NVMLError(15)
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in card.processes]

    nvmlDeviceGetComputeRunningProcesses = _listing

    def nvmlDeviceGetMPSComputeRunningProcesses(self, card: Card) -> list[SimpleNamespace]:
        raise NVMLError_NotSupported(3)

    def nvmlDeviceGetGraphicsRunningProcesses(self, card: Card) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=MIB) for pid in self.drawing]

    def nvmlDeviceGetCpuAffinity(self, card: Card, words: int) -> list[int]:
        return [card.cores] + [0] * (words - 1)

    def nvmlDeviceGetUtilizationRates(self, card: Card) -> SimpleNamespace:
        return SimpleNamespace(gpu=37)

    def nvmlGpmQueryDeviceSupport(self, card: Card) -> SimpleNamespace:
        raise NVMLError_NotSupported(3)

    def nvmlDeviceGetNvLinkState(self, card: Card, link: int) -> int:
        if card.nvlinks == 0:
            raise NVMLError_NotSupported(3)
        return int(link < card.nvlinks)

    def nvmlDeviceGetP2PStatus(self, one: Card, other: Card, index: int) -> int:
        return 0 if one.nvlinks and other.nvlinks else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, one: Card, other: Card) -> int:
        return self.ancestors.get((one.uuid, other.uuid), 50)

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceGetSupportedEventTypes(self, card: Card) -> int:
        return 0xFFFF

    def nvmlDeviceRegisterEvents(self, card: Card, mask: int, events: object) -> None:
        assert mask == 0xC00A

    def nvmlEventSetWait_v2(self, events: object, timeout: int) -> SimpleNamespace:
        if not self.pending:
            raise NVMLError_Timeout(10)
        return self.pending.pop(0)

    def nvmlDeviceGetFieldValues(self, card: Card, fields: list[int]) -> list[SimpleNamespace]:
        value = SimpleNamespace(uiVal=card.recovery)
        return [SimpleNamespace(value=value, nvmlReturn=0 if self.field_supported else 3)]

    def xid(self, card: Card, number: int) -> None:
        self.pending.append(SimpleNamespace(device=card, eventType=0x8, eventData=number))


def cards(count: int, nvlinks: int = 0) -> list[Card]:
    return [Card(f"GPU-{index}", f"00000000:{index:02X}:00.0", nvlinks) for index in range(count)]


def no_owner(pid: int) -> None:
    """Every process is a stranger."""


# --- the promises, for all ------------------------------------------------------------------------------------------


@pytest.fixture(params=["simulated", "recorded", "nvml"])
def backend(request: pytest.FixtureRequest) -> Iterator[DeviceBackend]:
    made: DeviceBackend
    if request.param == "simulated":
        made = SimulatedBackend("n1", 4)
    elif request.param == "recorded":
        made = NvmlBackend(RecordedNvml(*cards(4)))
    else:
        try:
            made = NvmlBackend()
        except DeviceError as error:
            pytest.skip(f"no NVIDIA GPU here: {error}")
    yield made
    made.close()


def test_gpus_have_uuids_models_memory_and_slots(backend: DeviceBackend) -> None:
    devices = backend.devices()
    assert devices
    assert all(device.gpu.startswith("GPU-") and device.model and device.slot for device in devices)
    assert all(device.memory_bytes > 0 for device in devices)
    assert [device.index for device in devices] == list(range(len(devices)))
    assert backend.devices() == devices


def test_every_pair_of_gpus_has_one_link(backend: DeviceBackend) -> None:
    gpus = [device.gpu for device in backend.devices()]
    pairs = {(a, b) for index, a in enumerate(gpus) for b in gpus[index + 1 :]}
    assert set(backend.topology()) == pairs


def test_an_unused_gpu_shows_no_process_of_ours_and_little_memory(backend: DeviceBackend) -> None:
    gpu = backend.devices()[0].gpu
    memory = backend.memory(gpu)
    assert 0 <= memory.used_bytes <= memory.total_bytes
    assert os.getpid() not in [process.pid for process in backend.processes(gpu)]
    utilisation = backend.utilisation(gpu)
    assert utilisation is None or 0 <= utilisation <= 1


def test_a_reading_of_activity_is_a_share_or_unknown(backend: DeviceBackend) -> None:
    gpu = backend.devices()[0].gpu
    for _ in range(2):
        reading = backend.activity(gpu)
        assert reading is None or (0 <= reading.busy <= 1 and reading.source in {"gpm", "utilisation"})


def test_a_gpu_that_answers_is_healthy(backend: DeviceBackend) -> None:
    assert backend.health(backend.devices()[0].gpu) == Health()


def test_the_environment_shows_exactly_the_gpus_given_by_uuid(backend: DeviceBackend) -> None:
    gpus = [device.gpu for device in backend.devices()][:2]
    env = backend.env(gpus)
    assert env["CUDA_VISIBLE_DEVICES"] == ",".join(gpus)
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_an_unknown_gpu_is_an_error_that_lists_the_known_ones(backend: DeviceBackend) -> None:
    with pytest.raises(DeviceError, match=backend.devices()[0].gpu):
        backend.memory(GpuId("GPU-elsewhere"))


def test_a_measurement_covers_all_gpus_and_tells_strangers_from_tasks(backend: DeviceBackend) -> None:
    samples = measure(backend, no_owner)
    assert [one.gpu for one in samples] == [device.gpu for device in backend.devices()]
    assert all(process.task is None for one in samples for process in one.processes)


# --- virtual GPUs ---------------------------------------------------------------------------------------------------

HOLDER = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", '''
import sys
block = bytearray(b"x") * (400 * 2**20)
print("holds", flush=True)
sys.stdin.readline()
del block
print("released", flush=True)
sys.stdin.readline()
'''])
child.wait()
"""


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """A process whose child holds 400 MiB until it reads a line."""
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072"}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def test_the_memory_of_a_virtual_gpu_is_that_of_the_processes_on_it(holder: subprocess.Popen[str]) -> None:
    backend = SimulatedBackend("n1", 2)
    one, other = [device.gpu for device in backend.devices()]
    backend.attach(holder.pid, [one])
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == "holds\n"
    assert 100 * MIB < backend.memory(one).used_bytes < 400 * MIB  # 400 less what stands for the context
    assert backend.memory(other).used_bytes == 0
    holder.stdin.write("\n")
    holder.stdin.flush()
    assert holder.stdout.readline() == "released\n"
    assert backend.memory(one).used_bytes == 0
    assert len(backend.processes(one)) == 1
    backend.detach(holder.pid)
    assert backend.processes(one) == []


SPINNER = """
import sys, time
for line in sys.stdin:
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    print("spun", flush=True)
"""


@pytest.fixture
def spinner() -> Iterator[subprocess.Popen[str]]:
    """A process that uses 0.2 s of a core for each line that it reads."""
    command = [sys.executable, "-c", SPINNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def spin(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "spun\n"


def test_a_virtual_gpu_was_busy_for_as_long_as_its_processes_used_a_core(
    spinner: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = SimulatedBackend("n1", 2)
    one, other = [device.gpu for device in backend.devices()]
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    backend.intrude(one, spinner.pid)
    spin(spinner)
    assert backend.activity(one) is None  # nothing is known of before
    assert backend.activity(other) is None
    spin(spinner)
    now_s += 0.4
    assert backend.activity(one) == Activity(pytest.approx(0.5, abs=0.1), "utilisation")
    assert backend.activity(other) == Activity(0.0, "utilisation")
    now_s += 0.4
    assert backend.activity(one) == Activity(pytest.approx(0.0, abs=0.05), "utilisation")


def test_the_utilisation_of_a_virtual_gpu_is_that_of_a_second_at_least(
    spinner: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = SimulatedBackend("n1", 1)
    gpu = backend.devices()[0].gpu
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    backend.intrude(gpu, spinner.pid)
    assert backend.utilisation(gpu) is None
    spin(spinner)
    now_s += 0.5
    assert backend.utilisation(gpu) is None
    now_s += 0.5
    assert measure(backend, no_owner)[0].utilisation == pytest.approx(0.2, abs=0.05)
    now_s += 0.5
    assert backend.utilisation(gpu) == pytest.approx(0.2, abs=0.05)
    now_s += 0.5
    assert backend.utilisation(gpu) == pytest.approx(0.0, abs=0.05)


def test_a_lost_virtual_gpu_stays_listed_and_answers_no_more() -> None:
    backend = SimulatedBackend("n1", 2)
    gpu = backend.devices()[0].gpu
    backend.lose(gpu)
    assert len(backend.devices()) == 2
    assert backend.health(gpu).lost
    with pytest.raises(DeviceError, match="lost"):
        backend.memory(gpu)
    assert measure(backend, no_owner)[0].lost
    backend.restore(gpu)
    assert backend.health(gpu) == Health()


def test_an_intruder_on_a_virtual_gpu_is_a_stranger() -> None:
    backend = SimulatedBackend("n1", 1)
    gpu = backend.devices()[0].gpu
    backend.intrude(gpu, os.getpid())
    assert measure(backend, no_owner)[0].processes[0].task is None
    assert measure(backend, lambda pid: TaskId("t"))[0].processes[0].task == "t"


def test_pinning_gives_each_virtual_gpu_a_core() -> None:
    backend = SimulatedBackend("n1", 2, pin=True)
    cores = [tuple(backend.cpus([device.gpu]) or ()) for device in backend.devices()]
    assert all(len(core) == 1 for core in cores)
    assert SimulatedBackend("n1", 2).cpus([backend.devices()[0].gpu]) is None


@pytest.mark.parametrize("gpus", ["simulated", "simulated:", "simulated:x", "cuda", "simulated:0", "simulated:65"])
def test_a_kind_of_gpu_that_does_not_exist_is_refused_with_the_mend(gpus: str) -> None:
    with pytest.raises(DeviceError, match=r"simulated:4|1 to 64"):
        open_backend(gpus, "n1", memory_bytes=MIB, pin=False)


# --- NVML -----------------------------------------------------------------------------------------------------------


def test_without_a_driver_the_error_names_the_virtual_ones() -> None:
    class Absent(RecordedNvml):
        def nvmlInit(self) -> None:
            raise NVMLError(12)

    with pytest.raises(DeviceError, match="simulated:4"):
        NvmlBackend(Absent())


def test_gpus_stand_in_the_order_of_the_bus() -> None:
    backend = NvmlBackend(RecordedNvml(*reversed(cards(3))))
    assert [device.gpu for device in backend.devices()] == ["GPU-0", "GPU-1", "GPU-2"]
    backend.close()


def test_nvlink_makes_one_slot_in_spite_of_pcie() -> None:
    backend = NvmlBackend(RecordedNvml(*cards(4, nvlinks=18)))
    assert {device.slot for device in backend.devices()} == {"nvlink-0"}
    assert set(backend.topology().values()) == {"nvlink"}
    backend.close()


def test_without_nvlink_a_pcie_switch_makes_a_slot() -> None:
    ancestors = {("GPU-0", "GPU-1"): 10, ("GPU-2", "GPU-3"): 20, ("GPU-0", "GPU-2"): 30}
    backend = NvmlBackend(RecordedNvml(*cards(4), ancestors=ancestors))
    assert [device.slot for device in backend.devices()] == ["pcie-0", "pcie-0", "pcie-2", "pcie-2"]
    assert backend.topology()[GpuId("GPU-0"), GpuId("GPU-2")] == "hostbridge"
    backend.close()


def test_a_gpu_with_nvlink_leaves_its_switch_to_the_others() -> None:
    a, b, c, d = (GpuId(name) for name in "abcd")
    links = {(a, b): "nvlink", (b, c): "single", (c, d): "single", (a, c): "system", (a, d): "system", (b, d): "node"}
    assert slots_of([a, b, c, d], links) == {a: "nvlink-0", b: "nvlink-0", c: "pcie-2", d: "pcie-2"}  # type: ignore[arg-type]


def test_the_drivers_reserve_is_not_counted_as_used() -> None:
    backend = NvmlBackend(RecordedNvml(*cards(1)))
    memory = backend.memory(GpuId("GPU-0"))
    assert (memory.used_bytes, memory.reserved_bytes) == (100 * MIB, 500 * MIB)
    backend.close()


def test_a_process_whose_memory_the_driver_does_not_tell_still_counts() -> None:
    card = cards(1)[0]
    card.processes = [(4711, None), (4712, 9 * MIB)]
    backend = NvmlBackend(RecordedNvml(card))
    assert [(one.pid, one.memory_bytes) for one in backend.processes(GpuId("GPU-0"))] == [(4711, 0), (4712, 9 * MIB)]
    backend.close()


def test_a_gpu_that_fell_off_the_bus_is_lost_and_the_others_are_not() -> None:
    one, other = cards(2)
    backend = NvmlBackend(RecordedNvml(one, other))
    one.lost = True
    assert backend.health(GpuId("GPU-0")).lost
    with pytest.raises(DeviceError, match="lost"):
        backend.processes(GpuId("GPU-0"))
    samples = measure(backend, no_owner)
    assert [sample.lost for sample in samples] == [True, False]
    backend.close()


@pytest.mark.parametrize(
    ("number", "recovery", "healthy", "fault"),
    [
        (31, 0, True, True),  # a program's mistake, and the driver wants nothing
        (119, 0, True, True),  # the driver's own verdict is believed
        (31, 1, False, False),  # also against the catalogue
        (48, 1, False, False),
        (63, 0, True, False),
        (31, None, True, True),  # an older driver gives no verdict: the catalogue speaks
        (94, None, True, True),
        (43, None, True, False),
        (45, None, True, False),
        (48, None, False, False),
        (54, None, False, False),
        (79, None, False, False),
        (154, None, False, False),
        (163, None, False, False),
        (999, None, False, False),
    ],
)
def test_an_xid_drains_a_gpu_or_restarts_a_program_as_the_driver_or_else_the_catalogue_says(
    number: int, recovery: int | None, healthy: bool, fault: bool
) -> None:
    card = cards(1)[0]
    nvml: Any = RecordedNvml(card)
    backend = NvmlBackend(nvml)
    card.recovery, nvml.field_supported = recovery or 0, recovery is not None
    nvml.xid(card, number)
    health = backend.health(GpuId("GPU-0"))
    assert (health.healthy, health.lost, bool(health.faults)) == (healthy, False, fault)
    assert healthy or f"Xid {number}" in health.detail
    assert backend.health(GpuId("GPU-0")).faults == ()  # told once
    backend.close()


def test_a_drained_gpu_says_what_happened_what_it_means_and_the_mend() -> None:
    assert judge(48, None).drain == (
        "Xid 48 (double-bit ECC error): NVIDIA's catalogue says WORKFLOW_XID_48; reset it (nvidia-smi --gpu-reset), "
        "then look at its ECC counters, then restart the node agent"
    )
    assert "has no action; look it up" in judge(12345, None).drain
    assert judge(79, 6).drain == "Xid 79 (it fell off the bus): it needs its PCIe bus reset"
    assert "99" in judge(48, 99).drain


def test_every_bucket_of_the_catalogue_has_a_course() -> None:
    assert {entry.bucket for entry in CATALOGUE.values()} <= set(BUCKETS)
    assert all(bucket.mend for bucket in BUCKETS.values() if bucket.course == "drain")


def test_a_gpu_is_used_again_once_the_driver_withdraws_its_demand() -> None:
    card = cards(1)[0]
    backend = NvmlBackend(RecordedNvml(card))
    card.recovery = 1
    assert "needs a GPU reset" in backend.health(GpuId("GPU-0")).detail
    card.recovery = 0
    assert backend.health(GpuId("GPU-0")) == Health()
    backend.close()


def test_a_gpu_drained_by_the_catalogue_stays_so_until_a_restart() -> None:
    card = cards(1)[0]
    nvml: Any = RecordedNvml(card)
    nvml.field_supported = False
    backend = NvmlBackend(nvml)
    nvml.xid(card, 48)
    assert not backend.health(GpuId("GPU-0")).healthy
    assert not backend.health(GpuId("GPU-0")).healthy
    backend.close()


def healthy_in_time(backend: DeviceBackend, gpu: GpuId) -> bool:
    """Ask until the GPU is healthy, for as long as a small program may take."""
    deadline = time.monotonic() + 10
    while not backend.health(gpu).healthy:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_a_lost_gpu_that_answers_another_process_is_found_again_by_opening_the_library_afresh() -> None:
    one, other = cards(2)
    nvml = RecordedNvml(one, other)
    backend = NvmlBackend(nvml, look=[sys.executable, "-I", "-c", "print('GPU-0')"])
    one.lost = True
    assert backend.health(GpuId("GPU-0")).lost
    one.lost = False  # it was reset
    assert healthy_in_time(backend, GpuId("GPU-0"))
    assert nvml.opened == 2
    assert backend.processes(GpuId("GPU-0")) == []
    backend.close()


def test_a_lost_gpu_that_does_not_answer_stays_lost_and_the_library_open() -> None:
    one, other = cards(2)
    nvml = RecordedNvml(one, other)
    backend = NvmlBackend(nvml, look=[sys.executable, "-I", "-c", "print('GPU-1')"])
    one.lost = True
    for _ in range(50):
        assert backend.health(GpuId("GPU-0")).lost
        assert backend.health(GpuId("GPU-1")).healthy
        time.sleep(0.01)
    assert nvml.opened == 1
    backend.close()


def test_a_look_at_a_gpu_that_hangs_keeps_no_caller_waiting() -> None:
    card = cards(1)[0]
    backend = NvmlBackend(RecordedNvml(card), look=[sys.executable, "-I", "-c", "import time; time.sleep(60)"])
    card.lost = True
    started = time.monotonic()
    for _ in range(5):
        assert backend.health(GpuId("GPU-0")).lost
    backend.close()
    assert time.monotonic() - started < 5


def test_a_process_that_only_draws_is_told_from_one_that_computes() -> None:
    card = cards(1)[0]
    nvml = RecordedNvml(card)
    card.processes, nvml.drawing = [(4711, MIB), (4712, MIB)], [4712, 4713]
    backend = NvmlBackend(nvml)
    found = {process.pid: process.compute for process in backend.processes(GpuId("GPU-0"))}
    assert found == {4711: True, 4712: True, 4713: False}
    backend.close()


def test_a_worker_runs_on_the_cores_near_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4, 5})
    one, other = cards(2)
    one.cores, other.cores = 0b000011, 0b001110
    backend = NvmlBackend(RecordedNvml(one, other))
    assert backend.cpus([GpuId("GPU-0")]) == [0, 1]
    assert backend.cpus([GpuId("GPU-0"), GpuId("GPU-1")]) == [1]
    one.cores = 0b111111
    assert backend.cpus([GpuId("GPU-0")]) is None  # all there are
    backend.close()


def test_what_a_stranger_is_allowed_to_keep_is_measured_with_it() -> None:
    backend = SimulatedBackend("n1", 1)
    gpu = backend.devices()[0].gpu
    backend.intrude(gpu, os.getpid())
    (process,) = measure(backend, no_owner)[0].processes
    me = procfs.stat(os.getpid())
    assert me is not None
    assert (process.uid, process.start_ticks, process.helper) == (os.getuid(), me.start_ticks, True)


def test_faults_injected_into_a_virtual_gpu_are_judged_like_real_ones() -> None:
    backend = SimulatedBackend("n1", 1)
    gpu = backend.devices()[0].gpu
    backend.fault(gpu, 31)
    (sample,) = measure(backend, no_owner)
    assert (sample.healthy, len(sample.faults)) == (True, 1)
    assert measure(backend, no_owner)[0].faults == ()
    backend.fault(gpu, 48)
    assert "Xid 48" in measure(backend, no_owner)[0].detail
    backend.restore(gpu)
    backend.require(gpu, 1)
    assert "needs a GPU reset" in measure(backend, no_owner)[0].detail
    backend.require(gpu, 0)
    assert backend.health(gpu) == Health()


# --- performance monitors -------------------------------------------------------------------------------------------


class MonitoredNvml(RecordedNvml):
    """With GPM, as on Hopper: a sample is the work done so far, in percent times seconds."""

    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self, *cards: Card) -> None:
        super().__init__(*cards)
        self.now_s = 100.0
        self.work = 0.0
        self.refuses: NVMLError | None = None
        self.held = 0

    def pass_time(self, seconds: float, percent: float) -> None:
        self.now_s += seconds
        self.work += seconds * percent

    def nvmlGpmQueryDeviceSupport(self, card: Card) -> SimpleNamespace:
        return SimpleNamespace(isSupportedDevice=1)

    def nvmlGpmSampleAlloc(self) -> SimpleNamespace:
        self.held += 1
        return SimpleNamespace(at_s=0.0, work=0.0)

    def nvmlGpmSampleFree(self, sample: SimpleNamespace) -> None:
        self.held -= 1

    def nvmlGpmSampleGet(self, card: Card, sample: SimpleNamespace) -> None:
        if self.refuses is not None:
            raise self.refuses
        sample.at_s, sample.work = self.now_s, self.work

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, value=0.0, nvmlReturn=0)])

    def nvmlGpmMetricsGet(self, asked: SimpleNamespace) -> None:
        assert (asked.version, asked.numMetrics, asked.metrics[0].metricId) == (1, 1, 2)
        elapsed_s = asked.sample2.at_s - asked.sample1.at_s
        assert elapsed_s > 0.1, "GPM wants more than 100 ms between samples"
        asked.metrics[0].value = (asked.sample2.work - asked.sample1.work) / elapsed_s


@pytest.fixture
def monitored(monkeypatch: pytest.MonkeyPatch) -> MonitoredNvml:
    nvml = MonitoredNvml(*cards(1))
    monkeypatch.setattr("node_agent.devices.nvml.Gpm", lambda module: Gpm(module, lambda: nvml.now_s))
    return nvml


def test_activity_is_what_the_performance_monitors_say_between_two_calls(monitored: MonitoredNvml) -> None:
    backend = NvmlBackend(monitored)
    assert backend.activity(GpuId("GPU-0")) is None
    monitored.pass_time(0.2, 80)
    assert backend.activity(GpuId("GPU-0")) == Activity(pytest.approx(0.8), "gpm")
    monitored.pass_time(0.2, 20)
    assert backend.activity(GpuId("GPU-0")) == Activity(pytest.approx(0.2), "gpm")
    assert monitored.held == 1  # the driver's memory for samples is given back
    backend.close()


def test_a_call_within_100_ms_says_nothing_and_the_next_covers_both_times(monitored: MonitoredNvml) -> None:
    backend = NvmlBackend(monitored)
    backend.activity(GpuId("GPU-0"))
    monitored.pass_time(0.08, 100)
    assert backend.activity(GpuId("GPU-0")) is None
    monitored.pass_time(0.08, 0)
    assert backend.activity(GpuId("GPU-0")) == Activity(pytest.approx(0.5), "gpm")
    backend.close()


def test_where_the_performance_monitors_refuse_utilisation_stands_in(monitored: MonitoredNvml) -> None:
    backend = NvmlBackend(monitored)
    monitored.refuses = NVMLError_NotSupported(3)  # as under MIG
    assert backend.activity(GpuId("GPU-0")) is None
    assert backend.activity(GpuId("GPU-0")) == Activity(0.37, "utilisation")
    assert monitored.held == 0
    backend.close()


def test_samples_of_a_library_that_was_opened_afresh_since_are_not_compared(monitored: MonitoredNvml) -> None:
    monitors = Gpm(monitored, lambda: monitored.now_s)
    assert monitors.busy(GpuId("GPU-0"), object()) is None
    monitored.pass_time(0.2, 80)
    assert monitors.busy(GpuId("GPU-0"), object()) is None


def test_a_call_that_hangs_is_given_up_and_the_next_fails_at_once() -> None:
    nvml = RecordedNvml(*cards(1))
    backend = NvmlBackend(nvml, timeout_s=0.05)
    nvml.hang = threading.Event()
    with pytest.raises(DeviceError, match="did not answer"):
        backend.memory(GpuId("GPU-0"))
    with pytest.raises(DeviceError, match="still hangs"):
        backend.memory(GpuId("GPU-0"))
    nvml.hang.set()
    backend.close()
