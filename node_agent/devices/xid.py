"""Xids, the driver's errors: NVIDIA's own catalogue as a table, and the verdict on a GPU that raised one.

The driver's recovery action outranks the table: it knows the GPU, the table only the number. The table speaks where the
driver is silent, before release 570. An Xid that the catalogue does not classify takes the GPU out of use, and says so.

*Source:* NVIDIA, "Xid Errors", chapter "Analyzing Xid Errors with the Xid Catalog" for Ampere and newer GPUs
(docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html), column "Resolution Bucket (Immediate Action)", in the
edition that ends with Xid 172 and names drivers up to R575; recovery actions: nvml.h, `nvmlDeviceGpuRecoveryAction_t`.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

#: The reaction to an Xid: none, start the program again, or take the GPU out of use.
Course = Literal["ignore", "restart", "drain"]


class Bucket(Struct, frozen=True):
    """One of the catalogue's immediate actions; `mend` tells an administrator what to do."""

    course: Course
    mend: str = ""


#: The catalogue's buckets. Xid 45 follows any abort, our own SIGKILL too, so alone it says nothing against the GPU.
BUCKETS: dict[str, Bucket] = {
    "IGNORE": Bucket("ignore"),
    "WORKFLOW_XID_45": Bucket("ignore"),
    "RESTART_APP": Bucket("restart"),
    "RESET_GPU": Bucket("drain", "stop the node agent, end all processes on it and reset it (nvidia-smi --gpu-reset)"),
    "WORKFLOW_XID_48": Bucket(
        "drain", "stop the node agent, reset it (nvidia-smi --gpu-reset), look at its ECC counters"
    ),
    "WORKFLOW_NVLINK_ERR": Bucket("drain", "look at its links (nvidia-smi nvlink), then reset it"),
    "WORKFLOW_NVLINK5_ERR": Bucket("drain", "decode the Xid in the kernel's log with NVIDIA's catalogue"),
    "RESTART_BM": Bucket("drain", "restart the node"),
    "RESTART_VM": Bucket("drain", "restart the virtual machine"),
    "CHECK_MECHANICALS": Bucket("drain", "check its power cables and seating"),
    "CHECK_UVM": Bucket("drain", "look for UVM errors in the kernel's log"),
    "UPDATE_SWFW": Bucket("drain", "update the driver and firmware"),
    "CONTACT_SUPPORT": Bucket("drain", "contact the vendor's support"),
    "XID_154": Bucket("drain", "do what the kernel's log says after 'recovery action changed'"),
    "": Bucket("drain", "look it up in the newest catalogue of NVIDIA"),
}


class Entry(Struct, frozen=True):
    """One row of the catalogue."""

    meaning: str
    bucket: str


def _rows(bucket: str, meanings: dict[int, str]) -> dict[int, Entry]:
    return {number: Entry(meaning, bucket) for number, meaning in meanings.items()}


CATALOGUE: dict[int, Entry] = {
    **_rows(
        "RESTART_APP",
        {
            8: "GPU stopped processing",
            11: "invalid or corrupted push buffer stream",
            13: "graphics engine exception",
            25: "invalid or illegal push buffer stream",
            31: "GPU memory page fault",
            32: "invalid or corrupted push buffer stream",
            39: "copy engine exception",
            40: "copy engine exception",
            41: "copy engine exception",
            60: "video processor exception",
            68: "NVDEC0 exception",
            69: "graphics engine class error",
            70: "copy engine 3 error",
            71: "copy engine 4 error",
            72: "copy engine 5 error",
            75: "copy engine 6 error",
            76: "copy engine 7 error",
            77: "copy engine 8 error",
            80: "corrupted data sent to the GPU",
            82: "NVJPG0 error",
            83: "NVDEC1 error",
            84: "NVDEC2 error",
            85: "copy engine 9 error",
            86: "OFA exception",
            88: "NVDEC3 error",
            89: "NVDEC4 error",
            94: "contained memory error",
            **{96 + index: f"NVDEC{5 + index} error" for index in range(3)},
            **{99 + index: f"NVJPG{1 + index} error" for index in range(7)},
            **{126 + index: f"copy engine {10 + index} error" for index in range(10)},
            139: "OFA1 error",
        },
    ),
    **_rows(
        "IGNORE",
        {
            14: "injected error",
            37: "driver firmware error",
            38: "driver firmware error",
            43: "a program's fault stopped it",
            44: "graphics engine fault during context switch",
            63: "GPU memory remapping event",
            66: "illegal access by the driver",
            67: "illegal access by the driver",
            92: "high rate of single-bit ECC errors",
            93: "InfoROM wear limit",
            106: "SMBPBI test message",
            107: "SMBPBI test message",
            108: "NVLink remote translation error",
            121: "corrected errors of the link to the CPU",
            137: "NVLink privilege error",
            141: "CUDA fast path error",
            152: "DLA SMMU error",
            153: "DLA timeout",
            157: "resource retirement failure",
            160: "channel retirement event",
            161: "channel retirement failure",
        },
    ),
    **_rows(
        "RESET_GPU",
        {
            46: "GPU stopped processing",
            62: "internal micro-controller halt",
            64: "GPU memory remapping failure",
            95: "uncontained memory error",
            109: "context switch timeout",
            110: "security fault",
            119: "GSP RPC timeout",
            120: "GSP error",
            136: "link training failed",
            140: "unrecovered ECC error",
            143: "GPU initialization error",
            155: "NVLink went down",
            156: "resource retirement event",
            158: "GPU fatal timeout",
        },
    ),
    **_rows(
        "WORKFLOW_NVLINK5_ERR",
        {
            144 + index: f"NVLink {unit} error"
            for index, unit in enumerate(("SAW", "RLW", "TLW", "TREX", "NVLPW_CTRL", "NETIR", "MSE"))
        },
    ),
    45: Entry("preemptive cleanup after an abort", "WORKFLOW_XID_45"),
    48: Entry("double-bit ECC error", "WORKFLOW_XID_48"),
    54: Entry("auxiliary power is not connected", "CHECK_MECHANICALS"),
    74: Entry("NVLink error", "WORKFLOW_NVLINK_ERR"),
    78: Entry("vGPU start error", "UPDATE_SWFW"),
    79: Entry("it fell off the bus", "RESTART_BM"),
    142: Entry("NVENC3 error", "CONTACT_SUPPORT"),
    151: Entry("key rotation error", "RESTART_VM"),
    154: Entry("its recovery action changed", "XID_154"),
    159: Entry("CHI non-data error", "CHECK_UVM"),
    # In the catalogue without an action; drained like any other that is not classified.
    **_rows(
        "",
        {
            162: "power smoothing re-engaged",
            163: "power smoothing disengaged",
            164: "power smoothing is near its end of life",
            165: "power smoothing is at its end of life",
            166: "unencrypted NVLink traffic in confidential computing",
            167: "PCIe fatal timeout",
            168: "reduced memory capacity",
            169: "SEC2 halt",
            170: "NVLink interrupt in confidential computing",
            171: "uncorrectable DRAM error",
            172: "uncorrectable SRAM error",
        },
    ),
}

#: The demands of the driver's own recovery actions (field 230). 5 is a bus reset by nvml.h of release 580 and the IMEX
#: domain by that of 615; in both cases the GPU is out of use until an administrator acts.
RECOVERY: dict[int, str] = {
    1: "needs a GPU reset (stop the node agent, then nvidia-smi --gpu-reset)",
    2: "needs a reboot of the node",
    3: "must be drained of peer-to-peer work",
    4: "must be drained of peer-to-peer work and reset",
    5: "needs its bus reset (driver 580) or its IMEX domain recovered (newer drivers)",
    6: "needs its PCIe bus reset",
    7: "needs a reboot of the system",
}


class XidVerdict(Struct, frozen=True):
    """The verdict on a GPU: `drain` says why it is out of use, `fault` which error a program on it met."""

    drain: str = ""
    fault: str = ""


def demand(action: int) -> str:
    """Return the demand of the driver's recovery action `action`, which is not 0."""
    return RECOVERY.get(action, f"needs recovery action {action}, which is unknown here: see nvidia-smi -q")


def judge(number: int, recovery: int | None) -> XidVerdict:
    """Judge Xid `number`, given the driver's recovery action: 0 for nothing to do, None if it gives none."""
    entry = CATALOGUE.get(number)
    what = f"Xid {number} ({entry.meaning})" if entry else f"Xid {number}"
    if recovery:
        return XidVerdict(drain=f"{what}: it {demand(recovery)}")
    bucket = BUCKETS[entry.bucket if entry else ""]
    if bucket.course == "ignore":
        return XidVerdict()
    if bucket.course == "restart":
        return XidVerdict(fault=f"{what}: the program that met it must be started again")
    if recovery == 0:
        return XidVerdict(fault=f"{what}: the driver asks for nothing, so the GPU stays in use")
    said = f"NVIDIA's catalogue says {entry.bucket}" if entry and entry.bucket else "NVIDIA's catalogue has no action"
    return XidVerdict(drain=f"{what}: {said}; {bucket.mend}, then restart the node agent")
