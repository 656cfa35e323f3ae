"""An expected end of a command: one sentence for the user, the next step, and the exit code."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from app_agent.control import ControlError
from protocol import exit_codes


class Fault(ControlError):  # noqa: N818 - not always an error, and not always the caller's
    """The reason why a command failed; `next_step` is the mend.

    `done` tells the part that was done all the same, as fields of the document.
    """

    def __init__(
        self,
        sentence: str,
        *,
        code: int = exit_codes.FAILED,
        next_step: str = "",
        done: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(sentence, code=code)
        self.next_step = next_step
        self.done = dict(done or {})

    def document(self) -> dict[str, object]:
        """Return the document for `--json`."""
        return {"schema": "error/v1", "error": self.sentence, "next": self.next_step, "code": self.code} | self.done


def address_of(journal_file: Path) -> str:
    """Return the address of the database that an arbiter's `journal_file` has; raises `Fault`."""
    from arbiter.config import address_in
    from protocol.config import ConfigError

    try:
        return address_in(journal_file)
    except ConfigError as error:
        raise Fault(str(error)) from None


def journal_place(folder: Path | None, journal_file: Path | None) -> Path | str | None:
    """Return the place of an arbiter's journal by a verb's two options; None if neither is given. Raises `Fault`."""
    if folder is not None and journal_file is not None:
        raise usage("--journal and --journal-file are two places of one journal", "name the one where it is")
    return folder if journal_file is None else address_of(journal_file)


def usage(sentence: str, next_step: str = "") -> Fault:
    """Return a fault of the command line itself."""
    return Fault(sentence, code=exit_codes.USAGE, next_step=next_step)
