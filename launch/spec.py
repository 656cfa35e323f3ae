"""From flags and a spec file to the specification for the app agent."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from app_agent.core.spec import INHERITED, AppSpec, as_held, nested
from launch.faults import usage
from protocol.config import in_words, kind_of
from protocol.messages import GpuType, Requirements, Utility
from protocol.utility_forms import FORMS, UNITS, parse

#: Fields for the simulator only.
SIMULATED_ONLY = ("gpus_max",)
#: Words of a variable's name that say that its value is secret.
_SECRET = re.compile(r"(API|ACCESS|AUTH|PRIVATE|SSH)?KEY|.*(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE)|CREDENTIALS?")
_SIZES = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def seconds(text: str, flag: str) -> float:
    """Return a length of time given as ``120``, ``120s``, ``2m``, ``1h`` or ``1d``.

    Raises
    ------
    Fault
        Naming `flag`, for anything else.
    """
    number, unit = (text[:-1], UNITS[text[-1]]) if text[-1:] in UNITS else (text, 1.0)
    try:
        value = float(number) * unit
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1e9:
        raise usage(f"{flag} is {text!r}, which is no length of time", "write 120, 120s, 2m, 1h or 1d")
    return value


def some_seconds(text: str, flag: str) -> float:
    """Return a length of time as `seconds` does; raises `Fault` for 0, too."""
    value = seconds(text, flag)
    if value <= 0.0:
        raise usage(f"{flag} is {text!r}; it must be more than 0", "write 0.2s, or leave it out where it is not known")
    return value


def _time(read: Callable[[str, str], float], value: Any, word: str) -> Any:
    """Return a time of a spec file: text as `read` takes it, a number as it is."""
    return read(value, word) if isinstance(value, str) else value


def gpu_sizes(text: str, flag: str) -> tuple[int, ...]:
    """Return the numbers of GPUs given as ``2``, or as ``1,2,4``.

    Raises
    ------
    Fault
        Naming `flag`, for anything else.
    """
    words = text.split(",")
    if not all(word.strip().isascii() and word.strip().isdigit() and 1 <= int(word) <= 2**16 for word in words):
        raise usage(
            f"{flag} is {text!r}, which is no number of GPUs",
            "write 2, or 1,2,4 for a job that can go on with each of these",
        )
    return tuple(map(int, words))


def size(text: str, flag: str) -> int:
    """Return a number of bytes given as ``8G``, ``8GiB`` or ``512M``; 0 needs no unit.

    Raises
    ------
    Fault
        Naming `flag`, for anything else.
    """
    short = text[:-2] if text[-2:].lower() == "ib" and text[-3:-2].upper() in _SIZES else text
    number, unit = (short[:-1], _SIZES[short[-1].upper()]) if short[-1:].upper() in _SIZES else (short, 0)
    try:
        value = float(number) * (unit or 1)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2**53:
        raise usage(f"{flag} is {text!r}, which is no amount of memory", "write 8G or 512M")
    if value and not unit:
        quote = "" if flag.startswith("--") else '"'
        mend = f"write {quote}{_with_unit(number, value)}{quote}"
        raise usage(f"{flag} {text} has no unit; {mend}", f"the units are {', '.join(_SIZES)}")
    return int(value)


def _with_unit(number: str, value: float) -> str:
    """Return the probable meaning of a number without a unit: gigabytes, then megabytes, then bytes."""
    if value < 2**20:
        return f"{number}{'G' if value < 512 else 'M'}"
    return f"{math.ceil(value / _SIZES['M'])}M"


def _memory(value: Any, word: str) -> int:
    """Return the bytes of a spec file: text as `size` reads it; 0 is the only number without a unit."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise usage(f'{word} must be text such as "8G", and is {kind_of(value)}', f'write {word} = "8G"')
    return size(str(value), word)


def gpu_types(value: Any, flag: str) -> Any:
    """Return the types of GPUs given as ``H200``, as ``H100,H200`` or, in a spec file, as a list of such.

    Raises
    ------
    Fault
        Naming `flag`, for a type without a letter or digit, or with signs that no name of a GPU has.
    """
    types = tuple(word.strip() for word in value.split(",")) if isinstance(value, str) else value
    try:
        return msgspec.convert(types, tuple[GpuType, ...])
    except msgspec.ValidationError:
        wanted = "write H200, or H100,H200 for a job that can have either"
        raise usage(f"{flag} is {value!r}, which is no type of GPU", wanted) from None


def utility(text: str, flag: str) -> Utility:
    """Return an app's worth as a function of its end, given as ``deadline:6h`` or ``sigmoid:50,2/h,6h``.

    Raises
    ------
    Fault
        Naming `flag`, for anything else.
    """
    try:
        return msgspec.convert(msgspec.to_builtins(parse(text)), Utility)
    except msgspec.ValidationError as error:
        raise usage(f"{flag} {text!r} is beyond all bounds: {in_words(error)}", FORMS) from None
    except ValueError as error:
        raise usage(f"{flag} cannot be used: {error}", FORMS) from None


def command_of(written: object) -> tuple[str, ...]:
    """Return the command that a spec file holds, which is a list of words.

    Raises
    ------
    Fault
        For anything else, with the list that was probably meant.
    """
    if not isinstance(written, list):
        is_, meant = f"is {kind_of(written)}", _split(written) if isinstance(written, str) else []
    elif odd := [word for word in written if not isinstance(word, str)]:
        is_, meant = f"holds {kind_of(odd[0])}", list(map(str, written))
    else:
        return tuple(written)
    shown = json.dumps(meant or ["python", "train.py"], ensure_ascii=False)
    raise usage(f"the spec cannot be used: command {is_}, and must be a list of words", f"write command = {shown}")


def _split(text: str) -> list[str]:
    """Return the words of a command line as a shell would; none if its quotes do not match."""
    try:
        return shlex.split(text)
    except ValueError:
        return []


def environment(wanted: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the task's variables: the inherited few, and each ``NAME=VALUE`` or ``NAME`` (from here) of `wanted`.

    Raises
    ------
    Fault
        For a name that is not set here.
    """
    variables = {name: environ[name] for name in INHERITED if name in environ}
    for item in wanted:
        name, given, value = item.partition("=")
        if not name:
            raise usage(f"--env {item!r} has no name", "write --env NAME=VALUE, or --env NAME to pass on your own")
        if not given and name not in environ:
            raise usage(f"--env {name}: no such variable here", f"write --env {name}=VALUE")
        variables[name] = value if given else environ[name]
    return variables


def secret_files(wanted: Sequence[str]) -> dict[str, str]:
    """Return the files that hold variables' values, each of `wanted` being ``NAME=FILE``.

    Raises
    ------
    Fault
        For one without a name or a file.
    """
    files = {}
    for item in wanted:
        name, _, file = item.partition("=")
        if not name or not file:
            raise usage(
                f"--secret {item!r} is no NAME=FILE", "write --secret NAME=FILE, with the file that holds the value"
            )
        files[name] = file
    return files


def whole_paths(files: Any) -> Any:
    """Return these files as every node should see them; a value that is no table of text stays as it is."""
    if not isinstance(files, dict):
        return files
    return {name: absolute(Path(file).expanduser()) if isinstance(file, str) else file for name, file in files.items()}


def telling(variables: Iterable[str]) -> list[str]:
    """Return the names that sound as if their values were secret: ``HF_TOKEN``, and not ``MAX_TOKENS``."""
    return [name for name in variables if any(_SECRET.fullmatch(word) for word in name.upper().split("_"))]


def trials(command: Sequence[str], files: Path | None, given: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return one command per trial: `command` followed by each trial's arguments; just `command` without trials.

    Raises
    ------
    Fault
        For a file that cannot be read or holds fewer than two trials.
    """
    lines: list[str] = []
    if files is not None:
        try:
            text = files.read_text()
        except OSError as error:
            raise usage(
                f"--trials {files} cannot be read: {error.strerror}", "give a file of one line per trial"
            ) from None
        lines += [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    lines += given
    if not lines:
        return (tuple(command),)
    if len(lines) == 1:
        raise usage(
            "a search needs at least two trials, one was given", "repeat --trial, or give --trials a longer file"
        )
    return tuple((*command, *shlex.split(line)) for line in lines)


#: Words of a spec file that are named as the flags: the field, and the function that reads the value, if any.
WORDS: dict[str, tuple[str, Callable[[Any, str], Any] | None]] = {
    "class": ("kind", None),
    "memory": ("host_bytes", _memory),
    "gpu_type": ("gpu_types", gpu_types),
    "min_memory": ("min_memory_bytes", _memory),
    "steps": ("steps_total", None),
    "step_time": ("step_serial_s", partial(_time, some_seconds)),
    "grace": ("grace_s", partial(_time, seconds)),
    "time_limit": ("time_limit_s", partial(_time, some_seconds)),
    "idle": ("idle_s", partial(_time, some_seconds)),
    "retry": ("max_restarts", None),
    "checkpoint_dir": ("checkpoint_root", None),
}
#: How the class ``interactive`` was called before; read for one release.
FORMER_INTERACTIVE = "trial"
#: Fields that are flags of `submit` by their own names.
FLAGS = frozenset(
    (
        *("name", "tenant", "preempt_by", "priority", "cpus", "spans", "weight", "array"),
        *("metric", "mode", "search", "eta", "steps_min", "target"),
    )
)
_WRITTEN = {name: word for word, (name, _) in WORDS.items()}
#: The names of an app's fields, those of its requirements among them.
NAMES = tuple(name for name in (*AppSpec.__struct_fields__, *Requirements.__struct_fields__) if name != "requirements")
#: The fields of a spec file, by the names that users write.
FIELDS = ", ".join(("command", *(_WRITTEN.get(name, name) for name in NAMES if name not in SIMULATED_ONLY)))


def load(path: Path) -> dict[str, Any]:
    """Return the fields in a spec file: those of the flags, under the names of `AppSpec`, and ``command``.

    Raises
    ------
    Fault
        For a file that cannot be read or is not TOML.
    """
    try:
        fields = tomllib.loads(path.read_text())
    except OSError as error:
        raise usage(f"{path} cannot be read: {error.strerror}", "give -f a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise usage(f"{path} is not TOML: {error}", "mend that line; see docs/cli.md for an example") from None
    if "gpus" in fields:
        raise usage(f"{path}: unknown field `gpus`; gpus is called gang (or sizes)", "write gang = 2, for two GPUs")
    for word, (name, read) in WORDS.items():
        if word in fields:
            if name in fields:
                raise usage(f"{path} says both {word} and {name}, which are the same", "leave one out")
            value = fields.pop(word)
            fields[name] = read(value, word) if read is not None else value
    return fields


def build(fields: Mapping[str, Any]) -> AppSpec:
    """Return the spec made of these fields.

    An elastic job needs at least the first of its sizes, so its gang need not be given.

    Raises
    ------
    Fault
        Naming the field that is wrong.
    """
    fields = dict(fields)
    if "requirements" in fields:
        raise usage(
            "the spec cannot be used: requirements is no field of it; its fields stand by themselves",
            f"its fields are: {FIELDS}",
        )
    if fields.get("kind") == FORMER_INTERACTIVE:
        fields["kind"] = "interactive"
    if "utility" in fields:
        fields["utility"] = _utility(fields["utility"])
    try:
        fields = as_held(fields)
    except ValueError as error:
        raise usage(f"the spec cannot be used: {error}", "see docs/cli.md, Arrays and chains") from None
    sizes = fields.get("sizes")
    smallest = {"gang": sizes[0]} if isinstance(sizes, list | tuple) and sizes else {}
    try:
        app_spec = msgspec.convert(nested(smallest | fields), AppSpec)
    except msgspec.ValidationError as error:
        words = in_words(error, AppSpec).replace("requirements.", "", 1)
        name = words.split(" ", 1)[0]
        flag = f" (--{_WRITTEN.get(name, name).replace('_', '-')})" if name in _WRITTEN or name in FLAGS else ""
        mend = (
            f"its fields are: {FIELDS}" if "unknown field" in words else "mend it, or leave it out; see submit --help"
        )
        raise usage(f"the spec cannot be used: {words.replace(name, name + flag, 1)}", mend) from None
    if app_spec.gpus_max:
        raise usage(
            f"gpus_max is {app_spec.gpus_max}, but a job says which numbers of GPUs it accepts",
            "list them instead, such as sizes = [1, 2, 4]",
        )
    return app_spec


def _utility(written: Any) -> Any:
    """Return a utility written as text, or in its own form already; raises `Fault` for any other value."""
    if isinstance(written, str):
        return utility(written, "utility")
    if isinstance(written, Utility | dict | None):
        return written
    raise usage(
        f'the spec cannot be used: utility is {kind_of(written)}, and must be text such as "deadline:6h"',
        'write utility = "deadline:6h", "soft:6h", "none" or "sigmoid:50,2/h,6h"; see docs/cli.md',
    )


def absolute(path: str | Path) -> str:
    """Return `path` as every node should see it."""
    return str(Path(os.path.abspath(path)))  # noqa: PTH100 - resolve() would follow the links of this host only
