"""Scripts that the driver alone can suspend are suspended at the trough of their mini-batches.

NVIDIA's libraries are played (`tests/support/stand_in`): a process that the driver has locked stands still, so the
memory that it has then is what the driver would move.
"""

from __future__ import annotations

import asyncio
import struct
import sys
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from launch.site.site import bootstrap_dir
from node_agent import daemon
from node_agent.core import measurements
from node_agent.devices import activity
from protocol.messages import GpuId, TaskOrder
from tests.support.node_site import Site, node_site, task_order
from tests.support.stand_in import StandIn, cards

TASK = "ana-1.0-a0"
STATE_MIB, ACTIVATIONS_MIB = 150, 64
#: Activations live for a share of each mini-batch, which begins by the clock under any other load.
PERIOD_S, HIGH = 1.0, 0.6
#: The bytes that the script has on the GPU are in the file of its first argument. As under PyTorch the driver shows no
#: cycle, but counters of an allocator do, which is played; or, without such counters, the driver does show it. The
#: library samples for a shorter time than it does otherwise.
SCRIPT = f"""
import mmap, struct, sys, time, types
from app_agent.training import memory_cycle
memory_cycle.WINDOW_S = 15.0

def block(mib):
    made = mmap.mmap(-1, mib << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    made.madvise(23)  # MADV_POPULATE_WRITE
    return made

told, by = open(sys.argv[1], "w+b", 0), sys.argv[2]
def tell(mib):
    global held
    held = mib
    told.seek(0)
    told.write(struct.pack("q", mib))

def stats(device):
    figures = {{"all": {{"current": held << 20, "peak": held << 20, "allocated": 0}}}}
    return {{"allocated_bytes": figures, "reserved_bytes": figures}}

state = block({STATE_MIB})
tell({STATE_MIB})
if by == "allocator":
    cuda = types.ModuleType("torch.cuda")
    cuda._initialized = True
    cuda.device_count = lambda: 1
    cuda.memory_stats_as_nested_dict = stats
    cuda.empty_cache = lambda: None
    cuda.reset_peak_memory_stats = lambda device: None
    sys.modules["torch.cuda"] = cuda

begun, number = time.monotonic(), 0
while True:
    number += 1
    activations = block({ACTIVATIONS_MIB}) if by == "memory" else None
    tell({STATE_MIB + ACTIVATIONS_MIB})
    time.sleep(max(0, begun + (number - 1 + {HIGH}) * {PERIOD_S} - time.monotonic()))
    if activations is not None:
        activations.close()
    tell({STATE_MIB})
    time.sleep(max(0, begun + number * {PERIOD_S} - time.monotonic()))
"""
SUSPENSIONS = 8

pytestmark = [pytest.mark.alone, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(400)]


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    played = StandIn(tmp_path / "driver", *cards(1))
    played.flag("real", "all-use-cuda")
    played.load(monkeypatch)
    return played


def on_gpu_mib(told: Path) -> int:
    (found,) = struct.unpack("q", told.read_bytes())
    return int(found)


async def moved_mib(site: Site, order: TaskOrder, told: Path) -> list[int]:
    """Have the driver suspend the task again and again; return what it had on the GPU each time."""
    found = []
    for number in range(SUSPENSIONS):
        await site.plan(replace(order, want="vacate", preempt_by="suspend"))
        await site.phase(TASK, "suspended")
        found.append(on_gpu_mib(told))
        await site.plan(order)
        await site.phase(TASK, "running")
        await asyncio.sleep(PERIOD_S * (number % 4) / 4)  # asked at any point of the mini-batch
    return found


@pytest.mark.parametrize("source", ["allocator", "memory"])
async def test_a_script_without_steps_is_suspended_at_the_trough_of_its_cycle_and_not_at_the_peak(
    tmp_path: Path, driver: StandIn, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(measurements, "SAMPLE_AFTER_S", 1.0)
    monkeypatch.setattr(daemon, "ActivityWatch", partial(activity.ActivityWatch, window_s=20.0, every_s=10.0))
    told = tmp_path / "told"
    order = task_order(tmp_path, TASK, sys.executable, "-c", SCRIPT, str(told), source)
    order = replace(order, gpus=(GpuId(driver.cards[0].uuid),))
    async with node_site(tmp_path, gpus="nvml", bootstrap_dir=str(bootstrap_dir())) as site:
        await site.plan(order)
        report = await site.report(lambda report: any(task.step_s > 0 for task in report.tasks), patience_s=150.0)
        (status,) = report.tasks
        assert status.measured.source == source
        assert status.step_s == pytest.approx(PERIOD_S, rel=0.055)
        moved = await moved_mib(site, order, told)
    assert set(moved) <= {STATE_MIB, STATE_MIB + ACTIVATIONS_MIB}
    assert moved == [STATE_MIB] * SUSPENSIONS
