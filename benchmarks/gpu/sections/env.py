"""What is here: GPU, driver, libraries, and which of NVML's functions answer."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.gpu.readings import Readings, attempt
from benchmarks.gpu.record import Section, Setting
from benchmarks.gpu.trainees import describe, trainee

FIELD_RECOVERY = 230
EVENTS = 0x2 | 0x8 | 0x4000 | 0x8000  #: double-bit ECC, Xid, unavailable, recovery action
WAIT_MS = 200
MEMORY = "reserved, free and used memory add up to the total"
#: NVML reads its figures one after another, and others may use the GPU meanwhile.
APART_BYTES = 2 * 2**20


def run(setting: Setting, section: Section) -> None:
    """Write down what the other figures depend on."""
    with trainee(setting.device) as one:
        section.note(**one.ask(describe))
        readings = Readings.of(one)
    if not readings:
        section.note(nvml="not there")
        section.untried(MEMORY, "NVML is not there")
        return
    section.note(**_facts(readings.nvml, readings.handle))
    _judge_memory(section)
    waited = attempt(_wait, readings.nvml, readings.handle)
    section.note(events=waited)
    section.check("a wait for health events without any ends in its time", isinstance(waited, float), waited=waited)


def _judge_memory(section: Section) -> None:
    """Hold NVML to its own header; where `used` counts the reserve, too, the sum is too large by just that."""
    memory = section.figures["memory"]
    if not isinstance(memory, dict):
        section.untried(MEMORY, str(memory))
        return
    surplus = memory["reserved"] + memory["free"] + memory["used"] - memory["total"]
    section.check(MEMORY, abs(surplus) <= APART_BYTES, surplus_bytes=surplus, **memory)


def _facts(nvml: Any, handle: Any) -> dict[str, Any]:
    asked = {
        "driver": (nvml.nvmlSystemGetDriverVersion,),
        "cuda_driver": (nvml.nvmlSystemGetCudaDriverVersion_v2,),
        "pcie_generation": (nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        "pcie_width": (nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        "persistence": (nvml.nvmlDeviceGetPersistenceMode, handle),
        "mig": (nvml.nvmlDeviceGetMigMode, handle),
        "compute_mode": (nvml.nvmlDeviceGetComputeMode, handle),
        "numa_node": (nvml.nvmlDeviceGetNumaNodeId, handle),
        "event_types": (nvml.nvmlDeviceGetSupportedEventTypes, handle),
        "gpm": (lambda: bool(nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice),),
        "memory": (_memory, nvml, handle),
        "recovery_action": (lambda: nvml.nvmlDeviceGetFieldValues(handle, [FIELD_RECOVERY])[0].value.uiVal,),
    }
    return {name: attempt(*question) for name, question in asked.items()}


def _memory(nvml: Any, handle: Any) -> dict[str, int]:
    found = nvml.nvmlDeviceGetMemoryInfo(handle, nvml.nvmlMemory_v2)
    return {name: int(getattr(found, name)) for name in ("total", "reserved", "used", "free")}


def _wait(nvml: Any, handle: Any) -> float:
    """Return how long a wait for events took, in seconds; raise if it did not end as it should."""
    events = nvml.nvmlEventSetCreate()
    try:
        nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlDeviceGetSupportedEventTypes(handle) & EVENTS, events)
        begun = time.monotonic()
        try:
            nvml.nvmlEventSetWait_v2(events, WAIT_MS)
        except nvml.NVMLError_Timeout:
            return time.monotonic() - begun
        raise RuntimeError("an event came; look into the kernel's log")
    finally:
        nvml.nvmlEventSetFree(events)
