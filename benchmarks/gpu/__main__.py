"""The command: see the package."""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # started from elsewhere, the repository is not on the path

from benchmarks.gpu.record import Section, Setting, Skip, document, missing, write
from benchmarks.gpu.sections import SECTIONS, Entry

ROOT = Path(__file__).resolve().parents[2]
#: PyPI's names, where they differ from the modules'.
PYPI = {"pynvml": "nvidia-ml-py", "cuda.bindings": "cuda-bindings"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections; return the exit code."""
    options = parse(arguments)
    gb = options.gb or (0.05 if options.rehearse else 4.0)
    setting = Setting("cpu" if options.rehearse else "cuda", options.out.resolve(), gb)
    setting.out.mkdir(parents=True, exist_ok=True)
    path = setting.out / "gpu.json"
    absent = why_not(setting)
    if absent:
        write(path, document(setting, {}, absent))
        print(f"nothing was measured: {absent}")
        return 0
    sections = {name: Section(setting.rehearsal) for name in options.only}
    for name, section in sections.items():
        run_section(SECTIONS[name], setting, section)
        write(path, document(setting, sections, ""))
        print(line(name, section), flush=True)
    print(f"figures: {path}")
    return int(any(section.status in ("failed", "error") for section in sections.values()))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(sys.modules[__name__].__doc__ or ""))
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench" / "gpu", help="folder for gpu.json")
    parser.add_argument("--only", type=chosen, default=tuple(SECTIONS), help=f"some of {','.join(SECTIONS)}")
    parser.add_argument("--gb", type=positive, help="GPU memory of the largest training, in GiB (4)")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, small: to see that the suite works")
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
    if setting.rehearsal:
        return ""
    try:
        ctypes.CDLL("libcuda.so.1")  # cheap, and without it PyTorch has no CUDA either
    except OSError:
        return "there is no CUDA device here (the NVIDIA driver's library libcuda.so.1 cannot be loaded)"
    from benchmarks.gpu.trainees import Died, describe, trainee

    try:
        with trainee("cpu") as one:
            return str(one.ask(describe)["without_cuda"])
    except Died as error:
        return f"PyTorch cannot be started ({error})"


def run_section(entry: Entry, setting: Setting, section: Section) -> None:
    """Run one section; whatever goes wrong in it stays in it."""
    begun = time.monotonic()
    try:
        refuse(entry, setting)
        entry.run(setting, section)
        section.status = "failed" if section.failures else "passed"
    except Skip as reason:
        # What was checked before counts.
        section.status, section.reason = "failed" if section.failures else "skipped", str(reason)
    except Exception as error:  # noqa: BLE001 - one section's fate; the others go on, and the exit code tells
        section.status, section.reason = "error", f"{type(error).__name__}: {error}"
    section.seconds = time.monotonic() - begun


def refuse(entry: Entry, setting: Setting) -> None:
    """Raise `Skip` where the section cannot run."""
    if setting.rehearsal and not entry.rehearsed:
        raise Skip("it needs a CUDA device, and this is a rehearsal on the CPU")
    absent = missing(entry.rehearsal_needs if setting.rehearsal else entry.needs)
    if absent:
        raise Skip(f"not installed: {', '.join(absent)} (pip install {' '.join(PYPI.get(one, one) for one in absent)})")


def line(name: str, section: Section) -> str:
    """Return a section's outcome for people."""
    judged = [check for check in section.checks if check.judged]
    told = f"{name}: {section.status}, {len(judged) - len(section.failures)} of {len(judged)} checks held"
    told += f", {section.seconds:.0f} s" + (f" ({section.reason})" if section.reason else "")
    return "\n".join([told, *(f"  FAILED: {check.name} {check.seen}" for check in section.failures)])


if __name__ == "__main__":
    sys.exit(main())
