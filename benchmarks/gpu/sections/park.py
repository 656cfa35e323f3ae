"""Parking: exact to the bit, as fast as the bus, and how little stays behind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu import training
from benchmarks.gpu.readings import Readings
from benchmarks.gpu.record import Figures, Section, Setting
from benchmarks.gpu.sections import pcie
from benchmarks.gpu.trainees import Failed, Trainee, trainee

#: Of the bus's speed to and from pinned memory.
GOAL = 0.7
#: Of the bytes of tensors.
RESIDUE_MAX = 0.02
CYCLES = 4
#: Allocators whose memory PyTorch does not manage as usual: parking may refuse them, or must be exact.
ALLOCATORS = {"expandable_segments": "expandable_segments:True", "cudaMallocAsync": "backend:cudaMallocAsync"}


def run(setting: Setting, section: Section) -> None:
    """Park trainings of several kinds again and again."""
    undisturbed = Undisturbed(setting, section, "parking is exact to the bit")
    _unprepared(setting, section, undisturbed)
    _prepared(setting, section, undisturbed)
    _mixed(setting, undisturbed)
    if not setting.rehearsal:
        _allocators(setting, section, undisturbed)
    undisturbed.compare()


class Undisturbed:
    """Compares trainings with the same ones that nobody disturbed, all of one kind in one process.

    `promise` is what the name of each check begins with.
    """

    def __init__(self, setting: Setting, section: Section, promise: str) -> None:
        self._setting, self._section, self._promise = setting, section, promise
        self._ended: dict[str, list[tuple[str, int, str]]] = {}  #: by the options, as JSON

    def end(self, name: str, one: Trainee, **options: Any) -> None:
        """Let a training that began with `options` make its last mini-batches, and keep its digest."""
        steps = one.ask(training.run, steps=3)["steps"]
        sha256 = one.ask(training.digest)["sha256"]
        self._ended.setdefault(json.dumps(options), []).append((name, steps, sha256))

    def compare(self) -> None:
        """Check all that has ended."""
        for options, alike in self._ended.items():
            alone = reference(self._setting, [steps for _, steps, _ in alike], **json.loads(options))
            for name, steps, sha256 in alike:
                ok = sha256 == alone[steps]
                self._section.check(f"{self._promise}: {name}", ok, got=sha256, alone=alone[steps], steps=steps)


def reference(setting: Setting, steps: Sequence[int], **options: Any) -> dict[int, str]:
    """Return the digests of a training that nobody disturbs, at these numbers of mini-batches."""
    found: dict[int, str] = {}
    with trainee(setting.device, "reference") as one:
        done = one.ask(training.begin, **options)["steps"]
        for target in sorted(set(steps)):
            one.ask(training.run, steps=target - done)
            done, found[target] = target, one.ask(training.digest)["sha256"]
    return found


def cycle(one: Trainee, readings: Readings) -> Figures:
    """Park and restore once."""
    out = one.ask(training.park)
    if out["refused"]:
        return out
    left = {"nvml_bytes": readings.process_bytes(one.pid), "nvml_used_bytes": readings.used_bytes()}
    back = one.ask(training.restore)
    return {
        **out,
        **left,
        "in_seconds": back["seconds"],
        "out_gb_s": out["bytes"] / out["seconds"] / 1e9,
        "copy_gb_s": out["bytes"] / out["phases"]["copy"] / 1e9,
        "in_gb_s": out["bytes"] / back["seconds"] / 1e9,
    }


def _unprepared(setting: Setting, section: Section, undisturbed: Undisturbed) -> None:
    """Park without an arena made ahead: the first time is cold, the others are warm."""
    options = {"gb": setting.gb}
    with trainee(setting.device, "unprepared") as one:
        one.ask(training.begin, **options)
        readings = Readings.of(one)
        before = one.ask(training.memory) | {"nvml_bytes": readings.process_bytes(one.pid)}
        cycles = [cycle(one, readings) for _ in range(CYCLES)]
        bus = one.ask(pcie.measure, size=setting.pick(2**30, 16 * 2**20))
        undisturbed.end("no arena made ahead, four times", one, **options)
        refused = one.ask(pcie.refused_registration)
    section.note(before=before, cold=cycles[0], warm=cycles[1:], bus=bus, refused_registration=refused)
    section.check("memory that CUDA refuses to register leaves PyTorch as it was", refused["goes_on"], **refused)
    _speed(section, "warm", cycles[1:], bus)
    residue = max(one["residue_bytes"] for one in cycles)
    section.check(
        "next to nothing of the tensors stays on the GPU",
        residue <= RESIDUE_MAX * before["allocated"],
        gpu_only=True,
        residue_bytes=residue,
        of_bytes=before["allocated"],
    )
    _context(section, cycles)


def _prepared(setting: Setting, section: Section, undisturbed: Undisturbed) -> None:
    """Park with the arena made beside the training, as a node agent orders it: the first time must be warm."""
    options = {"gb": setting.gb}
    with trainee(setting.device, "prepared") as one:
        one.ask(training.begin, **options)
        prepared = one.ask(training.prepare)
        first = cycle(one, Readings.of(one))
        bus = one.ask(pcie.measure, size=setting.pick(2**30, 16 * 2**20))
        undisturbed.end("arena made ahead", one, **options)
    section.note(prepared=prepared, first_prepared=first)
    section.check("the arena was whole before it was used", prepared["ready_bytes"] >= first["bytes"])
    _speed(section, "first with an arena made ahead", [first], bus)


def _mixed(setting: Setting, undisturbed: Undisturbed) -> None:
    options = {"gb": min(1.0, setting.gb), "mixed": True}
    with trainee(setting.device, "mixed") as one:
        one.ask(training.begin, **options)
        readings = Readings.of(one)
        for _ in range(2):
            cycle(one, readings)
            one.ask(training.run, steps=2)
        undisturbed.end("half precision, scaler, fused optimizer", one, **options)


def _speed(section: Section, which: str, cycles: Sequence[Figures], bus: Figures) -> None:
    """Compare the slower direction with the bus, which a rehearsal has none of.

    Before it copies, parking looks for all tensors, which takes as long for few bytes as for many: that is written down
    under `phases` and not judged.
    """
    name = f"parking reaches 0.7 of the bus: {which}"
    if bus["pinned_out_gb_s"] is None:
        section.check(name, ok=False, gpu_only=True)
        return
    ratios = [min(one["copy_gb_s"] / bus["pinned_out_gb_s"], one["in_gb_s"] / bus["pinned_in_gb_s"]) for one in cycles]
    section.check(name, min(ratios) >= GOAL, gpu_only=True, ratios=ratios)


def _context(section: Section, cycles: Sequence[Figures]) -> None:
    """Hold what is left on the GPU, the context above all, to what a node agent allows for."""
    left = [one["nvml_bytes"] for one in cycles if one["nvml_bytes"]]
    if not left:
        section.note(context="NVML does not show the process by its number")
        return
    try:
        from node_agent.devices.nvml import PARKED_BYTES_MAX
    except ImportError as absent:
        section.note(context=f"not compared: {absent}")
        return
    section.check(
        "a parked process keeps less of the GPU than a node agent allows for",
        max(left) <= PARKED_BYTES_MAX,
        left_bytes=left,
        allowed_bytes=PARKED_BYTES_MAX,
    )


def _allocators(setting: Setting, section: Section, undisturbed: Undisturbed) -> None:
    """Park under the other allocators: a proper refusal is as good as bytes in their places."""
    options = {"gb": min(0.5, setting.gb)}
    for name, value in ALLOCATORS.items():
        env = {"PYTORCH_CUDA_ALLOC_CONF": value, "PYTORCH_ALLOC_CONF": value}
        with trainee(setting.device, name, env) as one:
            one.ask(training.begin, **options)
            try:
                found = cycle(one, Readings.of(one))
            except Failed as error:
                section.check(f"parking is exact to the bit: or refused, under {name}", ok=False, error=str(error))
                continue
            section.note(**{name: found})
            undisturbed.end(f"or refused, under {name}", one, **options)
