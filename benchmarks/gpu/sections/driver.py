"""The driver's checkpoint: through the helper program of the node agent, on processes that know nothing of it."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.gpu import training
from benchmarks.gpu.readings import Readings
from benchmarks.gpu.record import Figures, Section, Setting, Skip
from benchmarks.gpu.sections.park import ALLOCATORS, Undisturbed
from benchmarks.gpu.trainees import ROOT, Died, Failed, Trainee, trainee

#: By its path: whoever has no msgspec cannot import the package around it.
HELPER = ROOT / "node_agent" / "workers" / "driver_helper.py"
LIMIT_S, LOCK_S, PROBE_S = 120.0, 20.0, 90.0
CYCLES = 3
#: The user of node agents (launch/site/systemd), else one that every system has; and the right that the unit names.
SERVICE_USERS = ("gpu-train", "nobody")
RIGHT = "sys_ptrace"
SHELL = ("sh", "-c", 'exec "$@"', "sh")
#: Yama's setting: 0 lets a user touch all of its own processes; more takes `RIGHT`. Without Yama it is as 0.
PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
#: Of GPU memory, for a process that must be able to move to host memory and back within a turn.
SMALL_GB = 1.0


def run(setting: Setting, section: Section) -> None:
    """Try the driver out as a node agent does, then suspend trainings in all sorts of moments."""
    helper = helper_of(setting)
    verdict = ask(helper, {"do": "probe", "timeout_s": PROBE_S})
    section.note(verdict=verdict)
    _judge_root(section, verdict)
    _judge_service(section, helper)
    if not verdict["ok"]:
        raise Skip(f"the driver cannot checkpoint processes here: {verdict['reason']}")
    undisturbed = Undisturbed(setting, section, "the driver's checkpoint is exact to the bit")
    try:
        _at_rest(setting, section, helper, undisturbed)
        _amid_steps(setting, section, helper, undisturbed)
        for name, value in ALLOCATORS.items():
            _allocator(setting, section, helper, undisturbed, {name: value})
    finally:
        undisturbed.compare()


def helper_of(setting: Setting) -> tuple[str, ...]:
    """Return the command of the driver's helper program."""
    return setting.helper or (sys.executable, "-I", str(HELPER))


def _judge_root(section: Section, verdict: Figures) -> None:
    name = "root can use the driver's checkpoint"
    if os.getuid():
        section.untried(name, "the suite does not run as root")
    else:
        section.check(name, verdict["ok"], reason=verdict["reason"])


def _judge_service(section: Section, helper: tuple[str, ...]) -> None:
    """Try the driver out as the user of the shipped unit: as that is shipped, and with the right that it may need."""
    name = "the service's user can use the driver's checkpoint"
    user = service_user()
    if why := why_not_as(user, helper):
        section.untried(name, why)
        return
    scope = PTRACE_SCOPE.read_text().strip() if PTRACE_SCOPE.exists() else "0"
    verdicts = {
        which: ask((*as_user(user, right=right), *helper), {"do": "probe", "timeout_s": PROBE_S})
        for which, right in (("as_shipped", ""), ("with_right", RIGHT))
    }
    section.note(service=verdicts | {"user": user, "ptrace_scope": scope, "right": RIGHT})
    needed = verdicts["as_shipped" if scope == "0" else "with_right"]
    section.check(name, needed["ok"], gpu_only=True, reason=needed["reason"], user=user, ptrace_scope=scope)


def service_user() -> str:
    """Return the user of node agents where there is one, else a user without any right; empty if there is neither."""
    for name in SERVICE_USERS:
        with suppress(KeyError):
            return pwd.getpwnam(name).pw_name
    return ""


def as_user(user: str, *, right: str = "") -> tuple[str, ...]:
    """Return the words before a command that run it as another user, with one capability or none.

    The shell between begins the command without root's rights; `setpriv` itself would still find it by them.
    """
    entry = pwd.getpwnam(user)
    rights = (f"--inh-caps=-all,+{right}", f"--ambient-caps=+{right}") if right else ("--inh-caps=-all",)
    return ("setpriv", f"--reuid={entry.pw_uid}", f"--regid={entry.pw_gid}", "--clear-groups", *rights, *SHELL)


def why_not_as(user: str, helper: tuple[str, ...]) -> str:
    """Return why the helper program cannot be run as this user, with the right or without, empty if it can."""
    if os.getuid():
        return "only root can become the service's user"
    if not user:
        return f"there is no user {' or '.join(SERVICE_USERS)}"
    if shutil.which("setpriv") is None:
        return "setpriv is not installed (util-linux)"
    for right in ("", RIGHT):
        # The helper's Python, and its source as an argument.
        line = [*as_user(user, right=right), helper[0], "-I", "-c", "import sys; open(sys.argv[1])", helper[-1]]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{user} cannot run {helper[0]} on {helper[-1]}: {done.stderr.strip().rpartition(chr(10))[2]}"
    return ""


def ask(helper: tuple[str, ...], request: Figures) -> Figures:
    """Return the helper's answer, with the seconds that each call of the driver took under `phases`.

    `ok` false, and `at` what it was about, if it hung or crashed.
    """
    phases: dict[str, float] = {}
    at, begun = "start", time.monotonic()
    command = [*helper, json.dumps(request)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        # The helper ends itself by an alarm, so this loop ends too.
        for text in program.stdout:
            now = time.monotonic()
            phases[at] = phases.get(at, 0.0) + now - begun
            line = json.loads(text)
            if "ok" in line:
                return {"reason": "", **line, "phases": phases}
            at, begun = line["at"], now
    return {"ok": False, "reason": f"it hung or crashed in {at!r}", "at": at, "phases": phases}


def turn(helper: tuple[str, ...], one: Trainee, readings: Readings) -> Figures:
    """Suspend and resume a trainee; say how long each took and what the GPU and the host held meanwhile."""
    rss_before = resident_bytes(one.pid)
    held = readings.process_bytes(one.pid) or 0
    out = ask(helper, {"do": "suspend", "pids": [one.pid], "lock_s": LOCK_S, "timeout_s": LIMIT_S})
    if not out["ok"]:
        return {"ok": False, "reason": out["reason"], "suspend": out}
    off = {"on_gpu": one.pid in (readings.processes() or {}), "used_bytes": readings.used_bytes()}
    rss = resident_bytes(one.pid) - rss_before
    back = ask(helper, {"do": "resume", "pids": [one.pid], "moves": {}, "timeout_s": LIMIT_S})
    told = {"ok": back["ok"], "reason": back["reason"], "suspend": out["phases"], "resume": back["phases"]}
    speeds = {"out_gb_s": _rate(held, out, "checkpoint"), "in_gb_s": _rate(held, back, "restore")}
    return {**told, **speeds, "bytes": held, "while_off": off, "rss_growth_bytes": rss}


def resident_bytes(pid: int) -> int:
    """Return what the process holds in host memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _rate(size: int, answer: Figures, phase: str) -> float | None:
    seconds = answer["phases"].get(phase)
    return size / seconds / 1e9 if seconds and size else None


def _at_rest(setting: Setting, section: Section, helper: tuple[str, ...], undisturbed: Undisturbed) -> None:
    """Suspend a training between its mini-batches, three times."""
    options: Figures = {"gb": setting.gb}
    with trainee(setting.device, "at rest") as one:
        one.ask(training.begin, **options)
        readings, turns = Readings.of(one), []
        for _ in range(CYCLES):
            turns.append(turn(helper, one, readings))
            if not turns[-1]["ok"]:
                break
            one.ask(training.run, steps=2)
        section.note(at_rest=turns)
        if not held(section, "a training between mini-batches", turns[-1]):
            return
        _judge_speed(section, turns)
        off = [each["while_off"] for each in turns]
        section.check("a suspended process is not on the GPU", not any(each["on_gpu"] for each in off), while_off=off)
        undisturbed.end("between mini-batches", one, **options)


def _judge_speed(section: Section, turns: Sequence[Figures]) -> None:
    name = "the speed of the driver's checkpoint is known"
    if not all(each["bytes"] for each in turns):
        section.untried(name, "NVML does not show the process by its number, so its bytes are unknown")
        return
    speeds = [{key: each[key] for key in ("out_gb_s", "in_gb_s")} for each in turns]
    section.check(name, all(all(each.values()) for each in speeds), gpu_only=True, speeds=speeds)


def _amid_steps(setting: Setting, section: Section, helper: tuple[str, ...], undisturbed: Undisturbed) -> None:
    """Suspend a training that is busy: what no library at a boundary can do."""
    options: Figures = {"gb": min(SMALL_GB, setting.gb)}
    with trainee(setting.device, "amid steps") as one:
        one.ask(training.begin, **options)
        readings = Readings.of(one)
        pace_s = one.ask(training.run, steps=10)["seconds"] / 10
        one.send(training.run, steps=max(10, int(setting.pick(6.0, 2.0) / pace_s)))
        time.sleep(setting.pick(2.0, 0.5))
        found = turn(helper, one, readings)
        section.note(amid_steps=found)
        if held(section, "a training amid mini-batches", found):
            one.hear()
            undisturbed.end("amid mini-batches", one, **options)


def _allocator(
    setting: Setting, section: Section, helper: tuple[str, ...], undisturbed: Undisturbed, conf: dict[str, str]
) -> None:
    """Find out whether the driver can do it under another allocator; either answer is one."""
    ((name, value),) = conf.items()
    env = {"PYTORCH_CUDA_ALLOC_CONF": value, "PYTORCH_ALLOC_CONF": value}
    options: Figures = {"gb": min(SMALL_GB, setting.gb)}
    with trainee(setting.device, name, env) as one:
        try:
            one.ask(training.begin, **options)
            found = turn(helper, one, Readings.of(one))
            section.note(**{name: found})
            if found["ok"]:
                undisturbed.end(name, one, **options)
        except (Died, Failed) as error:
            section.note(**{name: {"ok": False, "reason": str(error)}})


def held(section: Section, what: str, found: Figures) -> bool:
    """Check that a turn went well; say whether it did."""
    section.check(f"the driver suspends and resumes {what}", found["ok"], reason=found["reason"])
    return bool(found["ok"])
