"""The command line's side of the control socket, with the errors of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from app_agent.config import default_socket
from app_agent.control import Control, ControlError, exit_code
from app_agent.core.host import AppRecord, QueryKind
from app_agent.core.spec import AppSpec
from launch import exit_codes
from launch.faults import Fault, usage
from protocol.config import ConfigError

Until = Literal["done", "running"]
#: What helps, by exit code, where the sentence does not say it already.
NEXT_STEPS = {
    exit_codes.NOT_FOUND: "gpu-arbiter ps -a",
    exit_codes.UNREACHABLE: "gpu-arbiter doctor",
    exit_codes.NOT_PERMITTED: "set GPU_ARBITER_URL to your own daemon's socket",
}


class Ending(Struct, frozen=True):
    """How an app ended: the exit code for `run` and `wait`, and a sentence unless all is well."""

    code: int
    sentence: str = ""


class Client:
    """A conversation with the app agent's daemon."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self.address = control.path

    def submit(self, spec: AppSpec) -> str:
        """Queue an app and return its id."""
        with _faults():
            return self._control.submit(spec)

    def cancel(self, app: str) -> None:
        """End an app for good."""
        with _faults():
            self._control.cancel(app)

    def wait(self, app: str, *, until: Until, timeout_s: float | None) -> AppRecord:
        """Return the app's record once it is over, or runs."""
        with _faults():
            return self._control.wait(app, until=until, timeout_s=timeout_s)

    def query(self, kind: QueryKind, target: str = "", offset: int = 0) -> dict[str, Any]:
        """Return the arbiter's answer."""
        with _faults():
            return self._control.query(kind, target, offset)

    def apps(self) -> list[AppRecord]:
        """Return the owner's apps, oldest first."""
        with _faults():
            return self._control.apps()

    def resolve(self, selector: str) -> str:
        """Return the id that `selector` means: itself, or the newest app for ``last``."""
        if selector != "last":
            return selector
        apps = self.apps()
        if not apps:
            raise Fault(
                "you have submitted nothing yet",
                code=exit_codes.NOT_FOUND,
                next_step="gpu-arbiter submit -- python train.py",
            )
        return apps[-1].app


@contextmanager
def open_client(path: Path | None = None) -> Iterator[Client]:
    """Talk to the daemon at `path`, or where it usually listens.

    Raises
    ------
    Fault
        Here and from every call inside: the daemon's sentence, its exit code and the next step.
    """
    with _faults():
        control = Control(path or default_socket())
    with control:
        yield Client(control)


@contextmanager
def _faults() -> Iterator[None]:
    try:
        yield
    except ControlError as error:
        raise Fault(error.sentence, code=error.code, next_step=NEXT_STEPS.get(error.code, "")) from None
    except ConfigError as error:
        raise usage(str(error)) from None


def ending(record: AppRecord) -> Ending:
    """Return how the app of `record` ended, or that it runs."""
    if record.state == "finished" or not record.over:
        told = record.over and record.reason
        return Ending(exit_codes.DONE, f"{record.app} finished: {record.reason}" if told else "")
    return Ending(exit_code(record), f"{record.app} {record.state}: {record.reason}".rstrip(": "))
