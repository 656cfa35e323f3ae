"""A function and its arguments in a folder, the process that calls it, and its outcome in the same folder.

The function is found by its module and its name, so this needs the submitting interpreter and the modules at the same
paths. A function of the submitting script is found as `multiprocessing` finds it: the script is loaded again under the
name ``__mp_main__``, so it must start its work behind ``if __name__ == "__main__":``.

Run as a script this calls the function in the folder that is its argument: exit code 0 with a result, 1 with an
exception. Standard library only.
"""

from __future__ import annotations

import os
import pickle
import secrets
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import spawn
from pathlib import Path
from typing import Any

CALL, OUTCOME = "call.pickle", "outcome.pickle"
#: Set in a process that loads the submitting script again.
LOADING = "GPU_ARBITER_LOADING_SCRIPT"


class CallError(Exception):
    """A function that cannot be called elsewhere, or a result that cannot be brought back: one sentence."""


class Outcome:
    """The result of a call, or its exception, which has a note with the traceback of the process that raised it."""

    def __init__(self, result: object, error: Exception | None) -> None:
        self.result = result
        self.error = error


# --- where the function is submitted --------------------------------------------------------------------------------


def write(folder: Path, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> Path:
    """Write a call into a new folder within `folder`; return that.

    Raises
    ------
    CallError
        If the function or an argument cannot be pickled, with its name, or the folder cannot be made.
    """
    name = name_of(function)
    if LOADING in os.environ:
        raise CallError(
            f'{name} is submitted while its script is loaded on a node; submit it behind `if __name__ == "__main__":`'
        )
    payload = _pickled(name, function, args, kwargs)
    process: dict[str, Any] = {"sys_path": [os.path.abspath(path) for path in sys.path]}  # noqa: PTH100 - "" is here
    if b"__main__" in payload:
        process |= _main_of(name)
    token = f"{name}-{secrets.token_hex(6)}"
    try:
        call = folder / token
        call.mkdir(parents=True)
        _write(call / CALL, pickle.dumps({"name": name, "process": process, "payload": payload}))
    except OSError as error:
        raise CallError(f"folder {folder} cannot be written: {error.strerror}; name one that every node sees") from None
    return call


def name_of(function: Callable[..., object]) -> str:
    """Return the name of a function, also of one with some arguments given."""
    return str(getattr(function, "__name__", "") or getattr(getattr(function, "func", function), "__name__", "call"))


def outcome(call: Path) -> Outcome | None:
    """Return the outcome of the call in that folder; None if its process left none.

    Raises
    ------
    CallError
        If the result cannot be unpickled here.
    """
    try:
        written = pickle.loads((call / OUTCOME).read_bytes())  # noqa: S301 - written by the owner's own function
    except FileNotFoundError:
        return None
    try:
        value = pickle.loads(written["value"])  # noqa: S301
    except Exception as error:
        raise CallError(f"the outcome of {written['name']} cannot be read here: {error!r}") from error
    if written["ok"]:
        return Outcome(value, None)
    value.add_note(f"raised by {written['name']} on a node:\n{written['traceback']}")
    return Outcome(None, value)


def remove(call: Path) -> None:
    """Remove the folder of a call."""
    shutil.rmtree(call, ignore_errors=True)


def _pickled(name: str, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> bytes:
    parts: list[tuple[str, object]] = [("the function", function)]
    parts += [(f"argument {number}", value) for number, value in enumerate(args, start=1)]
    parts += [(f"argument {word}", value) for word, value in kwargs.items()]
    try:
        return pickle.dumps((function, tuple(args), dict(kwargs)))
    except Exception as error:  # noqa: BLE001 - any class can raise anything as it is pickled
        field = next((field for field, value in parts if not _can_be_pickled(value)), "the call")
        if field == "the function":
            mend = "define it with `def` at the top of a module, as a node finds it by its module and name"
            raise CallError(f"{name} cannot be sent to a node: {error}; {mend}") from None
        mend = "give plain values, or the path of a file that every node sees"
        raise CallError(f"{field} of {name} cannot be pickled: {error}; {mend}") from None


def _can_be_pickled(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001 - any class can raise anything as it is pickled
        return False
    return True


def _main_of(name: str) -> dict[str, str]:
    """Return the words by which `multiprocessing.spawn.prepare` loads the script of this process again."""
    main = sys.modules["__main__"]
    module = getattr(main.__spec__, "name", None)
    if module:
        return {"init_main_from_name": str(module)}
    path = getattr(main, "__file__", None)
    if not path or not Path(path).is_file():  # a prompt, a notebook, standard input
        raise CallError(
            f"{name} uses what is defined in a session without a file; move it into a module, and import it from there"
        )
    return {"init_main_from_path": os.path.abspath(path)}  # noqa: PTH100 - resolve() would follow links of this host


def _write(path: Path, data: bytes) -> None:
    """Write a file whole, or not at all."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


# --- on the node ----------------------------------------------------------------------------------------------------


def run(folder: Path) -> int:
    """Call the function in `folder` and write its outcome; return the exit code."""
    (folder / OUTCOME).unlink(missing_ok=True)  # of an attempt before this one
    call = pickle.loads((folder / CALL).read_bytes())  # noqa: S301 - written by the owner
    try:
        function, args, kwargs = _load(call["process"], call["payload"])
        value = function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the submitter's to judge
        told = traceback.format_exc()
        sys.stderr.write(told)
        _write_outcome(folder, call["name"], _portable(error), told)
        return 1
    try:
        data = pickle.dumps(value)
    except Exception as error:  # noqa: BLE001 - any class can raise anything as it is pickled
        wrong = TypeError(f"the result of {call['name']} cannot be pickled: {error}; return plain values, or a path")
        _write_outcome(folder, call["name"], wrong, "")
        sys.stderr.write(f"{wrong}\n")
        return 1
    _write(folder / OUTCOME, pickle.dumps({"name": call["name"], "ok": True, "value": data}))
    return 0


def _load(process: dict[str, Any], payload: bytes) -> Any:
    """Return function and arguments, with the modules of the submitting process in reach."""
    own = [path for path in sys.path if path not in process["sys_path"]]
    os.environ[LOADING] = "1"
    try:
        spawn.prepare(process | {"sys_path": process["sys_path"] + own})
        return pickle.loads(payload)  # noqa: S301 - written by the owner
    finally:
        del os.environ[LOADING]


def _portable(error: Exception) -> Exception:
    """Return the exception, or one that can be brought back and says the same."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - any class can raise anything as it is pickled
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _write_outcome(folder: Path, name: str, error: Exception, told: str) -> None:
    document = {"name": name, "ok": False, "value": pickle.dumps(error), "traceback": told}
    _write(folder / OUTCOME, pickle.dumps(document))


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1])))
