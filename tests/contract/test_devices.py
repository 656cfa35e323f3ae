"""The promises of `node_agent.devices`: on virtual GPUs, on a played NVIDIA driver, and on a real one where it is.

`test_nvml.py` has the odd answers of the driver.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from node_agent import procfs
from node_agent.devices import Activity, DeviceBackend, DeviceError, Health
from node_agent.devices.nvml import NvmlBackend
from node_agent.devices.sampling import measure, open_backend
from node_agent.devices.simulated import SimulatedBackend
from node_agent.devices.xid import BUCKETS, CATALOGUE, judge
from protocol.messages import GpuId, TaskId
from tests.support.stand_in import StandIn, cards

MIB = 2**20


def no_owner(pid: int) -> None:
    """Every process is a stranger."""


# --- the promises, for all ------------------------------------------------------------------------------------------


@pytest.fixture(params=["simulated", "played", "nvml"])
def backend(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceBackend]:
    made: DeviceBackend
    if request.param == "simulated":
        made = SimulatedBackend("n1", 4)
    elif request.param == "played":
        StandIn(tmp_path / "driver", *cards(4)).load(monkeypatch)
        made = NvmlBackend()
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


def test_a_drained_gpu_says_what_happened_what_it_means_and_the_mend() -> None:
    assert judge(48, None).drain == (
        "Xid 48 (double-bit ECC error): NVIDIA's catalogue says WORKFLOW_XID_48; stop the node agent, reset it "
        "(nvidia-smi --gpu-reset), look at its ECC counters, then restart the node agent"
    )
    assert "has no action; look it up" in judge(12345, None).drain
    assert judge(79, 6).drain == "Xid 79 (it fell off the bus): it needs its PCIe bus reset"
    assert "99" in judge(48, 99).drain


def test_every_bucket_of_the_catalogue_has_a_course() -> None:
    assert {entry.bucket for entry in CATALOGUE.values()} <= set(BUCKETS)
    assert all(bucket.mend for bucket in BUCKETS.values() if bucket.course == "drain")
