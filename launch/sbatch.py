"""A batch script of Slurm and the flags of `sbatch`, read as Slurm reads them, as flags of `submit`.

Nothing here looks at the site, and nothing is guessed: each flag is carried out; or it has no effect on how the script
runs, and a note says so; or it is refused by its name.
"""

from __future__ import annotations

import re
import shlex
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from app_agent.core.spec import INHERITED, TENANT, array_of
from launch import slurm_shell
from launch.faults import usage
from launch.slurm_shell import Around, Script
from launch.spec import size, telling

PAGE = "docs/slurm.md, Slurm scripts as they are"


class Flag(Struct, frozen=True):
    """A flag of `sbatch`: `does` says what becomes of it, in a few words, or why it has no effect or is refused."""

    name: str
    does: str
    short: str = ""
    value: Literal["needed", "optional", "none"] = "needed"
    fate: Literal["used", "no effect", "refused"] = "used"

    @property
    def spelled(self) -> str:
        """Return it as users write it."""
        return f"-{self.short}, --{self.name}" if self.short else f"--{self.name}"


_USED = (
    Flag("account", "the tenant that pays", "A"),
    Flag("array", "one job for each index, such as 0-19%4", "a"),
    Flag("chdir", "the folder that the script starts in", "D"),
    Flag("constraint", "types of GPUs: a100, or a100|h100", "C"),
    Flag("cpus-per-gpu", "CPU cores, times the number of GPUs"),
    Flag("cpus-per-task", "CPU cores", "c"),
    Flag("dependency", "begin after other jobs: afterok:ID, afterany:ID", "d"),
    Flag("error", "also write the errors to this file", "e"),
    Flag("export", "variables: NAME=VALUE, NAME, ALL or NONE"),
    Flag("gpus", "GPUs, on one node, and their type: 2, h100:2", "G"),
    Flag("gpus-per-node", "GPUs, and their type"),
    Flag("gpus-per-task", "GPUs, and their type"),
    Flag("gres", "GPUs, and their type: gpu:2, gpu:h100:2"),
    Flag("hold", "keep it until it is released", "H", "none"),
    Flag("input", "the file that is its standard input", "i"),
    Flag("job-name", "its name; the script's otherwise", "J"),
    Flag("mem", "host memory, in megabytes or such as 8G"),
    Flag("mem-per-cpu", "host memory, times the number of CPU cores"),
    Flag("mem-per-gpu", "host memory, times the number of GPUs"),
    Flag("nice", "a lower priority", value="optional"),
    Flag("no-requeue", "as Slurm after a failure; it still begins again after a preemption", value="none"),
    Flag("nodes", "1", "N"),
    Flag("ntasks", "1", "n"),
    Flag("ntasks-per-node", "1"),
    Flag("open-mode", "append, or truncate: what becomes of files that are there"),
    Flag("output", "also write the output to this file", "o"),
    Flag("parsable", "print the id alone", value="none"),
    Flag("quiet", "print nothing", "Q", "none"),
    Flag("requeue", "as always", value="none"),
    Flag("signal", "the time between SIGTERM and SIGKILL, where it must leave its GPUs"),
    Flag("test-only", "submit nothing; say whether it would start now", value="none"),
    Flag("time", "how long it may have its GPUs", "t"),
    Flag("wait", "return when it is over, with its exit code", "W", "none"),
    Flag("wrap", "a command in place of a script"),
)
_CORES = "a job's cores are not bound"
_ONE_NODE = "a batch script runs on one node"
_NO_EFFECT = {
    "partition": ("p", "needed", "there are no partitions"),
    "qos": ("q", "needed", "there is no QOS"),
    "reservation": ("", "needed", "there are no reservations"),
    "exclusive": ("", "optional", "other jobs may run on the other GPUs of the node"),
    "oversubscribe": ("s", "none", "the site decides whether GPUs are shared"),
    "comment": ("", "needed", "nothing keeps it"),
    "wckey": ("", "needed", "nothing keeps it"),
    "mail-type": ("", "needed", "nothing sends mail"),
    "mail-user": ("", "needed", "nothing sends mail"),
    "verbose": ("v", "none", "there is no more to tell"),
    "ignore-pbs": ("", "none", "lines #PBS are never read"),
    "kill-on-invalid-dep": ("", "needed", "a job that can never begin is cancelled"),
    "time-min": ("", "needed", "no time limit is shortened"),
    "get-user-env": ("", "optional", "the environment is that of --export"),
    "propagate": ("", "optional", "the limits are those of the node"),
    "profile": ("", "needed", "the node measures what it can"),
    "acctg-freq": ("", "needed", "the node measures what it can"),
    "no-kill": ("k", "optional", _ONE_NODE),
    "contiguous": ("", "none", _ONE_NODE),
    "switches": ("", "needed", _ONE_NODE),
    "spread-job": ("", "none", _ONE_NODE),
    "use-min-nodes": ("", "none", _ONE_NODE),
    "wait-all-nodes": ("", "needed", _ONE_NODE),
    "overcommit": ("O", "none", _CORES),
    "hint": ("", "needed", _CORES),
    "distribution": ("m", "needed", _CORES),
    "threads-per-core": ("", "needed", _CORES),
    "mem-bind": ("", "needed", _CORES),
    "gpu-bind": ("", "needed", "the one task sees all GPUs of the job"),
}
_NO_NODE = "no flag chooses a node"
_NO_BEGIN = "no flag chooses a time; submit it then"
_REFUSED = {
    "begin": ("b", "needed", _NO_BEGIN),
    "deadline": ("", "needed", _NO_BEGIN),
    "nodelist": ("w", "needed", _NO_NODE),
    "nodefile": ("F", "needed", _NO_NODE),
    "exclude": ("x", "needed", _NO_NODE),
    "clusters": ("M", "needed", "there is one cluster"),
    "licenses": ("L", "needed", "there are no licenses"),
    "ntasks-per-gpu": ("", "needed", "one task runs; torchrun starts a process for each GPU"),
    "gpus-per-socket": ("", "needed", "write --gpus"),
    "container": ("", "needed", "write the command of the container into the script"),
    "tmp": ("", "needed", "nothing sets room on a disk aside"),
    "uid": ("", "needed", "a job is of the user who submits it"),
    "gid": ("", "needed", "a job is of the user who submits it"),
    "priority": ("", "needed", "write --nice"),
}
FLAGS: Mapping[str, Flag] = {flag.name: flag for flag in _USED} | {
    name: Flag(name, does, short, value, fate)  # type: ignore[arg-type]
    for fate, table in (("no effect", _NO_EFFECT), ("refused", _REFUSED))
    for name, (short, value, does) in table.items()
}
#: Of the command line only; they are flags of ours.
_OURS = {name: Flag(name, "", value="none") for name in ("explain", "json")}
_BY_LETTER = {flag.short: flag for flag in FLAGS.values() if flag.short}
#: Former names, and second ones.
_ALSO = {"tasks": "ntasks", "workdir": "chdir", "share": "oversubscribe", "cluster": "clusters"}

Values = dict[str, str]  #: of flags, by name


class Batch(Struct, frozen=True):
    """What a script and its flags mean.

    Attributes
    ----------
    submit
        Flags of `submit`, by the names of its parameters.
    command, cwd
        The job's command, and its folder.
    notes
        Sentences for the user.
    hold, wait, parsable, quiet, test_only, explain
        What becomes of the command itself.
    """

    submit: Mapping[str, Any]
    command: tuple[str, ...]
    cwd: str
    notes: tuple[str, ...] = ()
    hold: bool = False
    wait: bool = False
    parsable: bool = False
    quiet: bool = False
    test_only: bool = False
    explain: bool = False

    def native(self, here: str) -> str:
        """Return the commands that do the same, for a shell in the folder `here`."""
        words = ["gpu-arbiter", "submit", *["--dry-run"] * self.test_only, *["--wait"] * (self.wait and not self.hold)]
        for name, value in self.submit.items():
            flag = {"gpus": "-g"}.get(name, f"--{name.replace('_', '-')}")
            for each in value if isinstance(value, list) else [value]:
                text = f"{each:g}" if isinstance(each, float) else str(each)
                words += [flag, text] if len(flag) == 2 else [f"{flag}={text}"]
        line = shlex.join([*words, "--", *self.command])
        if self.hold:
            line += " && gpu-arbiter hold last" + " && gpu-arbiter wait last" * self.wait
        return line if self.cwd == here else f"cd {shlex.quote(self.cwd)} && {line}"


# --- lines and flags ------------------------------------------------------------------------------------------------


def directives(text: str, name: str) -> list[tuple[int, list[str]]]:
    """Return the words of each line ``#SBATCH`` before the first command of a script, with the line's number.

    Raises
    ------
    Fault
        For a quote without an end.
    """
    found = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.startswith("#SBATCH"):
            try:
                found.append((number, shlex.split(line.removeprefix("#SBATCH"), comments=True)))
            except ValueError:
                raise usage(f"line {number} of {name} has a quote without an end: {line}", "close it") from None
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return found


class Refusals:
    """The flags that cannot be used; they are told together."""

    def __init__(self) -> None:
        self._told: list[str] = []

    def add(self, flag: str, why: str, where: str) -> None:
        """Remember a flag."""
        told = "; ".join(filter(None, (where, why)))
        self._told.append(f"{flag} ({told})" if told else flag)

    def check(self) -> None:
        """Raise a `Fault` that names all of them, if there are any."""
        if self._told:
            it = "them" if len(self._told) > 1 else "it"
            raise usage(
                f"nothing is submitted, as sbatch has no such flag here: {', '.join(self._told)}",
                f"leave {it} out; {PAGE}, has all flags",
            )


def read(words: Sequence[str], refusals: Refusals, where: str = "") -> tuple[Values, list[str]]:
    """Return the values of flags, and the words from the first on that is none.

    Raises
    ------
    Fault
        For a flag without the value that it needs, or with one that it cannot have.
    """
    values: Values = {}
    rest = deque(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.popleft()
        if word == "--":
            break
        name, equals, value = word.partition("=") if word.startswith("--") else (word[:2], word[2:], word[2:])
        flag = _long(name[2:]) if word.startswith("--") else _BY_LETTER.get(name[1:])
        flag = flag or (None if where else _OURS.get(name[2:]))
        if flag is None or flag.fate == "refused":
            refusals.add(name, flag.does if flag else "", where)
            has_value = flag.value == "needed" if flag else bool(where)
            if has_value and not equals and rest and not rest[0].startswith("-"):
                rest.popleft()  # its value
            continue
        if flag.value == "none" and equals and not word.startswith("--"):  # -HW: each letter is a flag
            rest.appendleft(f"-{equals}")
            value = ""
        elif flag.value == "none" and equals:
            raise usage(f"{name} takes no value, and has {value!r}{_place_clause(where)}", f"write {name} alone")
        elif flag.value == "needed" and not equals:
            if not rest:
                raise usage(f"{name} has no value{_place_clause(where)}", f"write one after it; {PAGE}, says which")
            value = rest.popleft()
        values[flag.name] = value
    return values, list(rest)


def _place_clause(where: str) -> str:
    return f", in {where}" if where else ""


def _long(name: str) -> Flag | None:
    """Return the flag of a name, or of its beginning if no other begins so."""
    name = _ALSO.get(name, name)
    if name in FLAGS:
        return FLAGS[name]
    begin = [flag for each, flag in FLAGS.items() if each.startswith(name)]
    return begin[0] if len(begin) == 1 and name else None


def read_script(script: str, name: str, refusals: Refusals) -> Values:
    """Return the values of the flags in the lines ``#SBATCH`` of a script."""
    values: Values = {}
    for number, words in directives(script, name):
        where = f"line {number}"
        found, rest = read(words, refusals, where)
        while rest:  # Slurm would read no flag after it, and say nothing
            refusals.add(rest[0], "a word that belongs to no flag", where)
            found_then, rest = read(rest[1:], refusals, where)
            found |= found_then
        values |= found
    return values


#: The variables that are not called as their flags are.
_CALLED = {"array-inx": "array", "timelimit": "time"}


def of_environment(environ: Mapping[str, str], refusals: Refusals) -> Values:
    """Return the values that variables such as ``SBATCH_ACCOUNT`` give to flags."""
    values: Values = {}
    for variable, value in sorted(environ.items()):
        name = variable.removeprefix("SBATCH_").lower().replace("_", "-")
        flag = FLAGS.get(_CALLED.get(name, name))
        if flag is None or not variable.startswith("SBATCH_"):
            continue
        if flag.fate == "refused":
            refusals.add(variable, flag.does, "a variable of your environment")
        elif flag.value != "none" or value.lower() in ("", "yes") or value.strip("0").isdigit():
            values[flag.name] = "" if flag.value == "none" else value
    return values


def overruled(*each: Values) -> Values:
    """Return the values of all, where later ones win."""
    values: Values = {}
    for found in each:
        if "requeue" in found:
            values.pop("no-requeue", None)
        values |= found
    return values


# --- what they mean -------------------------------------------------------------------------------------------------


def batch(
    values: Values, script: Script, arguments: Sequence[str], *, environ: Mapping[str, str], here: str, user: str
) -> Batch:
    """Return what flags and a script mean, submitted by `user` in the folder `here`.

    Raises
    ------
    Fault
        Naming the flag that cannot be used as it is.
    """
    notes = _without_effect(values)
    if "no-requeue" in values:
        notes.append("--no-requeue: a job that fails is not started again, but one that is preempted is")
    _one_task(values)
    gpus = _gpus(values, notes)
    cpus = _cpus(values, gpus)
    memory = _memory(values, gpus, cpus)
    name = values.get("job-name") or Path(script.path).name
    submit: dict[str, Any] = {"name": name[:128], "gpus": str(gpus), "retry": 0}
    submit |= {"cpus": cpus} if cpus is not None else {}
    submit |= {"memory": memory} if memory else {}
    submit |= _wishes(values, notes)
    indices, step = _array(values.get("array", ""))
    submit |= {"array": values["array"]} if indices else {}
    submit |= {"env": env} if (env := _env(values.get("export"), script, environ, notes)) else {}
    around = Around(
        name=name,
        user=user,
        submit_dir=here,
        array=indices,
        array_step=step,
        variables=_variables(values, gpus),
        stdin=_file(values, "input"),
        stdout=_file(values, "output"),
        stderr=_file(values, "error"),
        append=_open_mode(values),
    )
    _check_text(script, notes)
    return Batch(
        submit=submit,
        command=slurm_shell.command(script, arguments, around),
        cwd=str(Path(here, values.get("chdir", "."))),
        notes=tuple(notes),
        hold="hold" in values,
        wait="wait" in values,
        parsable="parsable" in values,
        quiet="quiet" in values,
        test_only="test-only" in values,
        explain="explain" in values,
    )


def _wishes(values: Values, notes: list[str]) -> dict[str, Any]:
    """Return what a job asks for beside its GPUs, CPU cores and memory, as flags of `submit`."""
    wishes: dict[str, Any] = {"tenant": _tenant(values["account"])} if "account" in values else {}
    wishes |= {"gpu_type": gpu_type} if (gpu_type := _gpu_type(values)) else {}
    wishes |= {"priority": -_nice(values["nice"])} if "nice" in values else {}
    wishes |= {"time_limit": limit} if (limit := _time(values.get("time", "0"))) else {}
    wishes |= {"grace": _grace(values["signal"], notes)} if "signal" in values else {}
    wishes |= {"after": after} if (after := _dependencies(values.get("dependency", ""))) else {}
    return wishes


def _check_text(script: Script, notes: list[str]) -> None:
    """Note it if a script is read only when its job starts, and refuse such a script if it has no file."""
    if not slurm_shell.travels(script):
        why = _why_not_along(script)
        if not script.has_file:
            raise usage(f"the script has no file, and {why}", "write it into a file, and give its name")
        notes.append(f"{script.path} is read when the job starts, as {why}; leave it as it is until then")


def _why_not_along(script: Script) -> str:
    """Say why the text of a script does not travel with the command."""
    if not script.in_shell:
        return f"{script.interpreter[0]} reads it itself"
    return "its text is too long for a command" if script.is_text else "it is no UTF-8 text"


def _without_effect(values: Values) -> list[str]:
    """Return a note for each reason why flags have no effect."""
    of: dict[str, list[str]] = {}
    for name in sorted(values.keys() - _OURS.keys()):
        if FLAGS[name].fate == "no effect":
            of.setdefault(FLAGS[name].does, []).append(f"--{name}")
    return [f"{', '.join(names)} {'has' if len(names) == 1 else 'have'} no effect: {why}" for why, names in of.items()]


def _tenant(account: str) -> str:
    if not TENANT.fullmatch(account):
        raise usage(
            f"--account is {account!r}, and names of tenants have lower-case letters, digits and dashes",
            "give the name of a tenant, which gpu-arbiter shares lists; or leave it out, for your own",
        )
    return account


def _one_task(values: Values) -> None:
    if "nodes" in values and values["nodes"] not in ("1", "1-1"):
        raise usage(
            f"--nodes is {values['nodes']}, and a batch script runs on one node",
            "write --nodes=1; or submit the program itself: gpu-arbiter submit -g 16 --spans -- torchrun train.py",
        )
    for name in ("ntasks", "ntasks-per-node"):
        if values.get(name, "1") != "1":
            raise usage(
                f"--{name} is {values[name]}, and one task runs in a job",
                f"write --{name}=1 and --gpus, and have torchrun (or Lightning) start a process for each GPU",
            )


def _gpus(values: Values, notes: list[str]) -> int:
    """Return the GPUs of a job."""
    asked: dict[str, int] = {}
    for name in ("gpus", "gpus-per-node", "gpus-per-task", "gres"):
        for part in values.get(name, "").split(",") if name in values else ():
            count = _count_of_gres(part, name) if name == "gres" else _count_of_gpus(part, name, part)
            if name in asked:
                raise usage(f"--{name} is {values[name]!r}, which names GPUs twice", f"write --{name} with one number")
            asked[name] = count
    if len(set(asked.values())) > 1:
        told = " and ".join(f"--{name}={values[name]}" for name in asked)
        raise usage(f"{told} ask for different numbers of GPUs", "leave one of them out")
    gpus = next(iter(asked.values()), 0)
    if not gpus:
        notes.append("the script asks for no GPU; it gets one, as every job has GPUs here")
    return gpus or 1


def _gpu_type(values: Values) -> str:
    """Return the types of GPUs that a job may have, as `submit` takes them; empty if it may have any."""
    told: dict[str, str] = {}
    for name in ("gpus", "gpus-per-node", "gpus-per-task", "gres"):
        part = values.get(name, "")
        kind = part.removeprefix("gres/").removeprefix("gpu:").rpartition(":")[0] or _kind(part)
        if kind:
            told[name] = kind
    if "constraint" in values:
        told["constraint"] = _features(values["constraint"])
    if len({types.lower() for types in told.values()}) > 1:
        both = " and ".join(f"--{name}={values[name]}" for name in told)
        raise usage(f"{both} ask for different types of GPUs", "leave one of them out")
    return next(iter(told.values()), "")


def _features(text: str) -> str:
    """Return the types of GPUs that a constraint names: one, or several of which any will do."""
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    types = [each.strip() for each in inner.split("|")]
    if not all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9 ._+-]*", each) for each in types):
        raise usage(
            f"--constraint is {text!r}, and a constraint can name types of GPUs only",
            "write --constraint=a100, or a100|h100 where any of them will do",
        )
    return ",".join(types)


def _kind(part: str) -> str:
    """Return the type of GPU where no number follows it."""
    last = part.removeprefix("gres/").removeprefix("gpu:")
    return "" if last.isdigit() or last.lower() in ("", "gpu", "none") else last


def _count_of_gres(part: str, name: str) -> int:
    resource = part.removeprefix("gres/")
    if resource.lower() in ("", "none"):
        return 0
    first, _, rest = resource.partition(":")
    if first != "gpu":
        raise usage(f"--{name} names {first!r}, and nodes have no such resource", "write --gres=gpu:1, or leave it out")
    return _count_of_gpus(rest, name, part) if rest and rest.rpartition(":")[2].isdigit() else 1


def _count_of_gpus(text: str, name: str, written: str) -> int:
    number = text.rpartition(":")[2]
    if not (number.isascii() and number.isdigit() and int(number) <= 2**16):
        raise usage(f"--{name} is {written!r}, which is no number of GPUs", f"write --{name}=2")
    return int(number)


def _whole(values: Values, name: str) -> int | None:
    """Return the number that a flag gives, 1 or more; None without the flag."""
    if name not in values:
        return None
    text = values[name]
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 2**16):
        raise usage(f"--{name} is {text!r}, which is no number from 1 on", f"write --{name}=4")
    return int(text)


def _cpus(values: Values, gpus: int) -> float | None:
    per_task, per_gpu = _whole(values, "cpus-per-task"), _whole(values, "cpus-per-gpu")
    if per_task is not None and per_gpu is not None:
        raise usage("--cpus-per-task and --cpus-per-gpu are both given", "leave one of them out")
    count = per_task if per_gpu is None else per_gpu * gpus
    return None if count is None else float(count)


def _memory(values: Values, gpus: int, cpus: float | None) -> str:
    """Return the memory of a job as `submit` reads it; empty if none is asked for."""
    given = [name for name in ("mem", "mem-per-cpu", "mem-per-gpu") if name in values]
    if len(given) > 1:
        raise usage(f"{' and '.join(f'--{name}' for name in given)} are both given", "leave one of them out")
    if not given:
        return ""
    (name,) = given
    written = values[name].upper().removesuffix("B")
    times = {"mem": 1, "mem-per-cpu": int(cpus or 1), "mem-per-gpu": gpus}[name]
    asked = times * size(written if written[-1:].isalpha() else f"{written}M", f"--{name}")
    unit, of = next(
        (unit, of) for unit, of in (("G", 2**30), ("M", 2**20), ("K", 1024)) if asked % of == 0 or of == 1024
    )
    return f"{asked // of}{unit}" if asked else ""


def _nice(text: str) -> int:
    """Return how nice: 100 if no number is given."""
    try:
        nice = int(text or "100")
    except ValueError:
        nice = 1001
    if abs(nice) > 1000:
        raise usage(f"--nice is {text!r}, and must be a number from -1000 to 1000", "write --nice=100")
    return nice


_CLOCK = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


def _time(text: str) -> str:
    """Return a time limit as `submit` reads it; empty without a limit.

    Minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes and days-hours:minutes:seconds.
    """
    if text.upper() in ("INFINITE", "UNLIMITED", "-1"):
        return ""
    found = _CLOCK.fullmatch(text)
    if not found or not text.isascii():
        raise usage(f"--time is {text!r}, which is no time limit", "write minutes, 2:00:00 or 1-12, or UNLIMITED")
    days, first, second, third = found.groups()
    if days is not None:
        parts = (int(days), int(first), int(second or 0), int(third or 0))
    elif third is not None:
        parts = (0, int(first), int(second), int(third))
    else:
        parts = (0, 0, int(first), int(second or 0))
    seconds = parts[0] * 86_400 + parts[1] * 3600 + parts[2] * 60 + parts[3]
    if not seconds:
        return ""
    unit, of = next((unit, of) for unit, of in (("h", 3600), ("m", 60), ("s", 1)) if seconds % of == 0)
    return f"{seconds // of}{unit}"


def _grace(text: str, notes: list[str]) -> str:
    """Return the time of grace that a signal's time is; note what is no signal that a job gets."""
    flags, colon, spec = text.rpartition(":")
    signal, at, seconds = spec.partition("@")
    name = signal.upper().removeprefix("SIG")
    if (colon and not set(flags) <= set("BR")) or not name.isalnum() or (at and not seconds.isdigit()):
        raise usage(f"--signal is {text!r}, which is no signal and time", "write --signal=TERM@120")
    told = "and no signal before its time limit"
    if name not in ("TERM", "15"):
        notes.append(f"a job gets SIGTERM, and no {signal}, when it must leave its GPUs, {told} ({PAGE})")
    return f"{seconds or 60}s"


_KINDS = {"afterok": "ok", "afterany": "any"}


def _dependencies(text: str) -> list[str]:
    """Return the dependencies as `submit` reads them."""
    after = []
    if "?" in text:
        raise usage(
            f"--dependency is {text!r}, and `?` has no counterpart", "a job begins after all jobs: write a comma"
        )
    for part in filter(None, text.split(",")):
        kind, colon, ids = part.partition(":")
        if not colon and kind != "singleton":
            kind, ids = "afterany", part
        if kind not in _KINDS:
            raise usage(
                f"--dependency is {text!r}, and {kind!r} has no counterpart here",
                "write afterok:ID, which begins if ID has finished, or afterany:ID, however it ended",
            )
        named = ids.split(":")
        wrong = next((each for each in named if not each or "_" in each), None)
        if wrong is not None:
            raise usage(
                f"--dependency is {text!r}, and {wrong!r} is no id of a job or of a whole array",
                "write the id that sbatch printed, such as afterok:ana-kqz7",
            )
        after += [f"{each}:{_KINDS[kind]}" for each in named]
    return after


def _array(text: str) -> tuple[tuple[int, ...], int]:
    """Return the indices of an array, and the step between them as it is written."""
    if not text:
        return (), 1
    try:
        indices, _ = array_of(text)
    except ValueError as error:
        raise usage(f"--array: {error}", "write --array=0-19, or --array=0-19%4 for four at a time") from None
    found = re.search(r":(\d+)", text)
    return indices, int(found[1]) if found else 1


_NAMED = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)")
#: Variables that a shell or the node sets itself.
_OF_NODE = re.compile(
    r"(SLURM|SBATCH|GPU_ARBITER|BASH|PET)_\w+|BASH\w*|PWD|OLDPWD|SHLVL|_|HOSTNAME|HOSTTYPE|MACHTYPE|OSTYPE|RANDOM|"
    r"SECONDS|LINENO|U?E?U?ID|PPID|IFS|OPT(ARG|IND)|CUDA_VISIBLE_DEVICES"
)


def _env(export: str | None, script: Script, environ: Mapping[str, str], notes: list[str]) -> list[str]:
    """Return the variables that travel along, as `submit` reads them: those asked for, and those of the script."""
    wanted = [] if export is None else [each.strip() for each in export.split(",") if each.strip()]
    whole = [each for each in wanted if each.upper() in ("ALL", "NONE", "NIL")]
    asked = [each for each in wanted if each not in whole]
    if unset := [each for each in asked if "=" not in each and each not in environ]:
        raise usage(
            f"--export names {unset[0]}, and there is no such variable here", f"write --export={unset[0]}=VALUE"
        )
    if export is not None and "ALL" not in map(str.upper, whole):
        return asked
    given = {each.partition("=")[0] for each in asked} | set(INHERITED)
    named = sorted(set(_NAMED.findall(script.text)) & environ.keys() - given)
    named = [name for name in named if not _OF_NODE.fullmatch(name)]
    if secret := telling(named):
        notes.append(
            f"{', '.join(secret)} of your environment may be secret and stays here; to have messages and journals "
            f"hold the value, write --export=ALL,{','.join(secret)}"
        )
    named = [name for name in named if name not in secret]
    if named:
        notes.append(f"of your environment travels along what the script names: {', '.join(named)}")
    return [*asked, *named]


def _variables(values: Values, gpus: int) -> dict[str, str]:
    """Return the variables of the script that Slurm sets if a flag is given."""
    of = {
        "cpus-per-task": "SLURM_CPUS_PER_TASK",
        "cpus-per-gpu": "SLURM_CPUS_PER_GPU",
        "gpus-per-node": "SLURM_GPUS_PER_NODE",
        "gpus-per-task": "SLURM_GPUS_PER_TASK",
        "account": "SLURM_JOB_ACCOUNT",
        "partition": "SLURM_JOB_PARTITION",
        "qos": "SLURM_JOB_QOS",
    }
    found = {variable: values[name] for name, variable in of.items() if name in values}
    return found | ({"SLURM_GPUS": str(gpus)} if "gpus" in values else {})


def _file(values: Values, name: str) -> str:
    text = values.get(name, "")
    return "/dev/null" if text.lower() == "none" else text


def _open_mode(values: Values) -> str:
    if "open-mode" not in values:
        return "again"
    mode = next((mode for mode in ("append", "truncate") if mode.startswith(values["open-mode"].lower() or "?")), "")
    if not mode:
        raise usage(f"--open-mode is {values['open-mode']!r}", "write --open-mode=append, or --open-mode=truncate")
    return mode
