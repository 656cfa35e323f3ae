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
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from node_agent.devices import DeviceBackend, DeviceError, Health
from node_agent.devices.nvml import NvmlBackend, slots_of
from node_agent.devices.sampling import measure, open_backend
from node_agent.devices.simulated import SimulatedBackend
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


class RecordedNvml:
    """The functions of pynvml 13.580 that are used, with answers as an 8-GPU host gave them in shape."""

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

    def nvmlInit(self) -> None: ...
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
        return []

    def nvmlDeviceGetUtilizationRates(self, card: Card) -> SimpleNamespace:
        return SimpleNamespace(gpu=37)

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


def nobody(pid: int) -> None:
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
    samples = measure(backend, nobody)
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


def test_a_lost_virtual_gpu_stays_listed_and_answers_no_more() -> None:
    backend = SimulatedBackend("n1", 2)
    gpu = backend.devices()[0].gpu
    backend.lose(gpu)
    assert len(backend.devices()) == 2
    assert backend.health(gpu).lost
    with pytest.raises(DeviceError, match="lost"):
        backend.memory(gpu)
    assert measure(backend, nobody)[0].lost
    backend.restore(gpu)
    assert backend.health(gpu) == Health()


def test_an_intruder_on_a_virtual_gpu_is_a_stranger() -> None:
    backend = SimulatedBackend("n1", 1)
    gpu = backend.devices()[0].gpu
    backend.intrude(gpu, os.getpid())
    assert measure(backend, nobody)[0].processes[0].task is None
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


def test_nvlink_makes_one_slot_whatever_pcie_says() -> None:
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
    samples = measure(backend, nobody)
    assert [sample.lost for sample in samples] == [True, False]
    backend.close()


@pytest.mark.parametrize(
    ("number", "recovery", "field", "healthy"),
    [
        (31, 0, True, True),  # a program's mistake, and the driver wants nothing
        (119, 0, True, True),  # the driver's own verdict is believed
        (48, 1, True, False),
        (31, 0, False, True),  # an older driver gives no verdict
        (48, 0, False, False),
    ],
)
def test_an_xid_takes_a_gpu_out_of_use_when_the_driver_or_else_its_kind_says_so(
    number: int, recovery: int, field: bool, healthy: bool
) -> None:
    card = cards(1)[0]
    nvml: Any = RecordedNvml(card)
    backend = NvmlBackend(nvml)
    card.recovery, nvml.field_supported = recovery, field
    nvml.xid(card, number)
    health = backend.health(GpuId("GPU-0"))
    assert (health.healthy, health.lost) == (healthy, False)
    assert healthy or f"Xid {number}" in health.detail
    backend.close()


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
