"""Watches the interpreter of a training process: its program, its exit status, the steps of an optimizer."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import Any

#: Programs that start the training processes of a task and train nothing themselves, as scripts and as modules.
LAUNCHERS = frozenset({"torchrun", "accelerate", "accelerate-launch", "deepspeed"})
LAUNCHER_MODULES = frozenset(
    {
        "torch.distributed.run",
        "torch.distributed.launch",
        "accelerate.commands.launch",
        "accelerate.commands.accelerate_cli",
        "deepspeed.launcher.runner",
        "deepspeed.launcher.launch",
    }
)
#: Options of the interpreter that are followed by their value.
_VALUED = frozenset({"-W", "-X", "--check-hash-based-pycs"})


def program(arguments: Sequence[str]) -> tuple[str, str]:
    """Return the program of an interpreter with these arguments (`sys.orig_argv`): its kind and its name.

    The kind is ``script``, ``module``, ``code`` (for -c, whose name is the code) or ``none``.
    """
    rest = iter(arguments[1:])
    for argument in rest:
        if argument in _VALUED:
            next(rest, "")
        elif argument.startswith(("-W", "-X")):
            continue
        elif match := re.fullmatch(r"-[A-Za-z]*?([mc])(.*)", argument, re.DOTALL):
            kind = "module" if match[1] == "m" else "code"
            return kind, match[2] or next(rest, "")
        elif not argument.startswith("-"):
            return "script", argument
    return "none", ""


def is_launcher(arguments: Sequence[str]) -> bool:
    """Return whether this interpreter only starts training processes: torchrun, accelerate launch, deepspeed."""
    kind, name = program(arguments)
    return (kind == "module" and name in LAUNCHER_MODULES) or (
        kind == "script" and os.path.basename(name) in LAUNCHERS  # noqa: PTH119 - pathlib costs every program its import
    )


def is_helper(arguments: Sequence[str]) -> bool:
    """Return whether this interpreter is one of `multiprocessing`'s own, such as its resource tracker."""
    kind, name = program(arguments)
    return kind == "code" and name.startswith("from multiprocessing")


def watch_launcher(code: int) -> None:
    """Let a launcher end with `code` if its training processes did: that is no failure, and it would report one.

    The first that leaves makes torchrun send SIGTERM to the others, which may not be quite gone.
    """
    report = sys.excepthook

    @functools.wraps(report)
    def report_or_exit(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if {code} <= _exit_codes(error) <= {code, -signal.SIGTERM}:
            raise SystemExit(code)
        report(kind, error, trace)

    sys.excepthook = report_or_exit


def _exit_codes(error: BaseException) -> set[Any]:
    """Exit codes of the processes that `error` is about.

    It is torchrun's ChildFailedError, CalledProcessError, or ProcessExitedException of `torch.multiprocessing`.
    """
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict):
        return {getattr(failure, "exitcode", None) for failure in failures.values()}
    return {getattr(error, "returncode", getattr(error, "exit_code", None))}


def watch_exit(note: Callable[[object], None]) -> None:
    """Tell `note` the status the script exits with: it cannot be read at the end of the interpreter."""
    leave = sys.exit

    @functools.wraps(leave)
    def leave_with(status: Any = None, /) -> None:
        if threading.current_thread() is threading.main_thread():
            note(status)
        leave(status)

    sys.exit = leave_with  # type: ignore[assignment]


def watch_optimizers(stepped: Callable[..., None]) -> None:
    """Call `stepped` after every optimizer step."""
    when_imported("torch.optim.optimizer", lambda module: module.register_optimizer_step_post_hook(stepped))


def when_imported(name: str, hook: Callable[[ModuleType], object]) -> None:
    """Call `hook` with the module `name` once the script has loaded it; nothing is loaded from here."""
    module = sys.modules.get(name)
    if module is not None:
        hook(module)
    else:
        sys.meta_path.insert(0, _Finder(name, hook))


class _Finder(importlib.abc.MetaPathFinder):
    """Waits for the one module, then steps aside."""

    def __init__(self, name: str, hook: Callable[[ModuleType], object]) -> None:
        self._name, self._hook = name, hook

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_hook(module: ModuleType) -> None:
                execute(module)
                self._hook(module)

            spec.loader.exec_module = execute_and_hook  # type: ignore[method-assign]
        return spec
