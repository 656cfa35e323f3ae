"""The command: see the package."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # started from elsewhere, the repository is not on the path

from benchmarks.gpu import goals
from benchmarks.gpu.apart import OVER_TIME, Ended, leave, run_apart
from benchmarks.gpu.record import (
    Document,
    DocumentError,
    Figures,
    Section,
    Setting,
    Skip,
    host,
    merged,
    missing,
    origin_of,
)
from benchmarks.gpu.sections import PART_S, SECTIONS, Entry, parts

ROOT = Path(__file__).resolve().parents[2]
#: PyPI's names, where they differ from the modules'.
PYPI = {"pynvml": "nvidia-ml-py", "cuda.bindings": "cuda-bindings"}
#: Less than this much of a part's time is no use to a section.
BEGIN_S = 20.0
#: A section of a rehearsal may take so many times its limit: on a few busy cores PyTorch starts slowly, some ten times.
REHEARSAL_SLACK = 2.0

#: One call on a GPU host that reaches no package registry; docs/developer.md says what goes before and after.
COMMAND = """\
python3 -m pip install -q --no-index --no-deps --no-compile --upgrade --target out/gpu-site out/gpu-wheels/*.whl &&
    PYTHONPATH="$PWD/out/gpu-site" python3 -m benchmarks.gpu --part 1 \\
    --with out/bench/gpu/gpu.json --out "${OUT:-out/bench/gpu}"
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections that are not done; return the exit code."""
    begun = time.monotonic()
    options = parse(arguments)
    gb = options.gb or (0.05 if options.rehearse else 4.0)
    played = options.rehearse == "played"
    setting = Setting("cpu" if options.rehearse else "cuda", options.out.resolve(), gb, played=played)
    setting.out.mkdir(parents=True, exist_ok=True)
    try:
        document = merged(setting, options.documents)
    except DocumentError as error:
        print(f"python -m benchmarks.gpu: {error}", file=sys.stderr)
        return 2
    document.write()
    if options.merge_only:
        print(*conclusion(document), sep="\n")
        return 0
    names = options.only or parts().get(options.part) or tuple(SECTIONS)
    kept = [] if options.again else [name for name in names if document.done(name, setting)]
    for name in kept:
        told = document.sections[name]
        print(f"{line(name, told)}\n  kept, of {told['date']}; --again measures anew")
    left = [name for name in names if name not in kept]
    absent = why_not(setting) if left else ""
    if absent:
        leave_out(left, document, setting, absent)
        return 0
    if setting.played:
        os.environ["CUDA_VISIBLE_DEVICES"] = first_gpu()  # by which the played driver knows who is on its GPU
    for name in left:
        left_s = PART_S - (time.monotonic() - begun) if options.part else math.inf
        if left_s < BEGIN_S:
            print(f"{name}: not begun, since the part's {PART_S:.0f} s are over; give the same command again")
            continue
        limit_s = SECTIONS[name].limit_s * (REHEARSAL_SLACK if setting.rehearsal else 1.0)
        run_section(name, SECTIONS[name], setting, document, min(limit_s, left_s))
        print(line(name, document.sections[name]))
    print(*conclusion(document), sep="\n")
    ends = {document.sections[name]["status"] if name in document.sections else "not begun" for name in names}
    return int(not ends <= {"passed", "skipped"})


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=sys.modules["benchmarks.gpu"].__doc__,
        epilog=f"on a host without a package registry, from the repository:\n\n{COMMAND}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", type=chosen, default=(), metavar="NAMES", help=f"some of {','.join(SECTIONS)}")
    told = "; ".join(f"{number}: {', '.join(names)}" for number, names in parts().items())
    which.add_argument(
        "--part", type=int, choices=parts(), default=0, help=f"what fits into {PART_S / 60:g} minutes ({told})"
    )
    which.add_argument("--merge-only", action="store_true", help="measure nothing, only merge documents")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench" / "gpu", help="folder for gpu.json")
    parser.add_argument(
        *("--with", "-w"),
        type=Path,
        action="append",
        default=[],
        dest="documents",
        metavar="FILE",
        help="a document of an earlier call, if it is there: its sections are taken over",
    )
    parser.add_argument("--again", action="store_true", help="also measure what is done")
    parser.add_argument("--gb", type=positive, help="GPU memory of the largest training, in GiB (4)")
    parser.add_argument(
        "--rehearse",
        nargs="?",
        const="simulated",
        choices=("simulated", "played"),
        help="on the CPU, small: to see that the suite works; `played`: NVIDIA's libraries are those of tests/support",
    )
    return parser.parse_args(arguments)


def chosen(text: str) -> tuple[str, ...]:
    """Return the sections named in `text`."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in SECTIONS]
    if unknown or not names:
        raise argparse.ArgumentTypeError(f"there is no section {','.join(unknown)!r}; choose of {','.join(SECTIONS)}")
    return names


def positive(text: str) -> float:
    """Return a number of GiB."""
    value = float(text)
    if not 0 < value < 1024:
        raise argparse.ArgumentTypeError(f"{text} GiB are no memory of a GPU; give a number such as 4")
    return value


def why_not(setting: Setting) -> str:
    """Return why nothing can be measured here, empty if something can."""
    if missing(["torch"]):
        return "PyTorch is not installed (pip install torch)"
    if setting.rehearsal and not setting.played:
        return ""
    try:
        ctypes.CDLL("libcuda.so.1")  # cheap, and without it PyTorch has no CUDA either
    except OSError:
        return "no NVIDIA GPU (the driver's library libcuda.so.1 cannot be loaded)"
    if setting.played:
        return "" if first_gpu() else "no GPU is played (NVML shows none; LD_LIBRARY_PATH must lead to a stand-in)"
    from benchmarks.gpu.trainees import Died, describe, trainee

    try:
        with trainee("cpu") as one:
            without = str(one.ask(describe)["without_cuda"])
    except Died as error:
        return f"PyTorch cannot be started ({error})"
    return without and f"no NVIDIA GPU ({without})"


def first_gpu() -> str:
    """Return the UUID of the first GPU that NVML shows, empty if it shows none."""
    with contextlib.suppress(Exception):  # no library, no GPU
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0)))
    return ""


def leave_out(names: Sequence[str], document: Document, setting: Setting, absent: str) -> None:
    """Say of each section why it was not run; what was found before stays."""
    origin = origin_of(setting) | {"host": host()}
    for name in names:
        if name not in document.sections or document.sections[name]["status"] == "skipped":
            document.put(name, Section(setting.rehearsal, reason=f"not run: {absent}", origin=origin))
    print(f"nothing was measured: {absent}")


def run_section(name: str, entry: Entry, setting: Setting, document: Document, limit_s: float) -> None:
    """Run one section in a process of its own, which writes into the document what it finds, as it finds it."""
    begun = time.monotonic()
    section = Section(setting.rehearsal, status="running", origin=origin_of(setting))
    document.put(name, section)
    code = run_apart(lambda: _measure(name, entry, setting, document, section), limit_s)
    document.read_again()
    told = document.sections[name]
    if told["status"] == "running":  # it had no time, or no life, to say more itself
        over = code == OVER_TIME
        told["status"] = "unfinished" if over else "error"
        told["reason"] = f"killed after {limit_s:.0f} s" if over else f"its process ended with code {code}"
        told["seconds"] = round(time.monotonic() - begun, 1)
        document.write()


def _measure(name: str, entry: Entry, setting: Setting, document: Document, section: Section) -> None:
    """Run one section, in its own process; whatever goes wrong in it stays in it."""
    begun = time.monotonic()

    def keep() -> None:
        section.seconds = time.monotonic() - begun
        document.put(name, section)

    section.changed = keep
    try:
        section.origin["host"] = host()
        refuse(entry, setting)
        entry.run(setting, section)
        section.status = "failed" if section.failures else "passed"
    except Skip as reason:
        # What was checked before counts.
        section.status, section.reason = "failed" if section.failures else "skipped", str(reason)
    except Ended:
        section.status, section.reason = "unfinished", f"ended after {time.monotonic() - begun:.0f} s"
    except Exception as error:  # noqa: BLE001 - one section's fate; the others go on, and the exit code tells
        section.status, section.reason = "error", f"{type(error).__name__}: {error}"
    keep()


def refuse(entry: Entry, setting: Setting) -> None:
    """Raise `Skip` where the section cannot run."""
    if setting.rehearsal and entry.cuda:
        raise Skip("not run: no NVIDIA GPU (this is a rehearsal on the CPU, and the section needs CUDA in PyTorch)")
    if setting.gpus != "nvml" and entry.driver:
        raise Skip("not run: no NVIDIA GPU (this is a rehearsal without a driver; --rehearse played has one)")
    absent = missing(entry.needs if setting.gpus == "nvml" else entry.simulated_needs)
    if absent:
        raise Skip(f"not installed: {', '.join(absent)} (pip install {' '.join(PYPI.get(one, one) for one in absent)})")


def line(name: str, told: Figures) -> str:
    """Return a section's outcome for people."""
    judged = [check for check in told["checks"] if check["judged"]]
    failures = [check for check in judged if not check["ok"]]
    said = f"{name}: {told['status']}, {len(judged) - len(failures)} of {len(judged)} checks held"
    said += f", {told['seconds']:.0f} s" + (f" ({told['reason']})" if told["reason"] else "")
    return "\n".join([said, *(f"  FAILED: {check['name']} {check['seen']}" for check in failures)])


def conclusion(document: Document) -> list[str]:
    """Return what has become of the goals, for people, and where the figures are."""
    tried = [goal for goal in document.goals() if goal["section"] in document.sections]
    return ["goals:", *goals.lines(tried), f"figures: {document.path}"]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, leave)  # of `timeout`: the section that runs is ended first, and keeps what it has
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())
