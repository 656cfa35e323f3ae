"""Where the interpreter of a training process is watched: how it exits, and when an optimizer makes a step."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def watch_exit(note: Callable[[object], None]) -> None:
    """Tell `note` the status the script exits with: at the end of the interpreter nobody can be asked for it."""
    leave = sys.exit

    @functools.wraps(leave)
    def leave_with(status: Any = None, /) -> None:
        if threading.current_thread() is threading.main_thread():
            note(status)
        leave(status)

    sys.exit = leave_with  # type: ignore[assignment]


_OPTIMIZERS = "torch.optim.optimizer"


def watch_optimizers(stepped: Callable[..., None]) -> None:
    """Call `stepped` after every optimizer step, without loading PyTorch for a script that does not."""
    module = sys.modules.get(_OPTIMIZERS)
    if module is not None:
        module.register_optimizer_step_post_hook(stepped)
    else:
        sys.meta_path.insert(0, _OptimizerFinder(stepped))


class _OptimizerFinder(importlib.abc.MetaPathFinder):
    """Waits for the one module, then steps aside."""

    def __init__(self, stepped: Callable[..., None]) -> None:
        self._stepped = stepped

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _OPTIMIZERS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_hook(module: ModuleType) -> None:
                execute(module)
                module.register_optimizer_step_post_hook(self._stepped)

            spec.loader.exec_module = execute_and_hook  # type: ignore[method-assign]
        return spec
