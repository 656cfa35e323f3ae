"""The daemons' log lines: on stderr, one line each; as JSON unless stderr is a terminal (systemd, files)."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog

#: The broker's client: of a lost connection it logs a traceback, and its link says the same in a sentence.
BROKER_LIBRARIES = frozenset({"aiormq", "aio_pika", "pamqp"})


def configure(level: str = "info", *, json: bool | None = None, stream: TextIO | None = None) -> None:
    """Set up structlog for this process, for the log lines of libraries too.

    `json` None: JSON unless `stream` (stderr) is a terminal.
    """
    stream = stream or sys.stderr
    lines = (not stream.isatty()) if json is None else json
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer() if lines else structlog.dev.ConsoleRenderer(colors=False)
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(stream),
        cache_logger_on_first_use=False,
    )
    libraries = logging.getLogger()
    if not any(isinstance(handler, LibraryLines) for handler in libraries.handlers):
        libraries.addHandler(LibraryLines(logging.WARNING))
    logging.captureWarnings(capture=True)


class LibraryLines(logging.Handler):
    """Turns a library's log record into one line like ours."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log `record`; with its traceback, unless that is of an error of a connection."""
        what, error = record.getMessage().strip().partition("\n")[0], _error_of(record)
        more: dict[str, object] = {}
        if error is not None and _of_a_connection(error):
            more["error"] = f"{type(error).__name__}: {error}"
        elif error is not None:
            more["exc_info"] = error
        log = structlog.get_logger("libraries").bind(library=record.name, what=what)
        if "error" in more and record.name.partition(".")[0] in BROKER_LIBRARIES:
            log.debug("library.said", **more)
        elif record.levelno >= logging.ERROR:
            log.error("library.said", **more)
        else:
            log.warning("library.said", **more)


def _error_of(record: logging.LogRecord) -> BaseException | None:
    """Return the error that a record tells of, with its traceback or in its words."""
    if record.exc_info:
        return record.exc_info[1]
    words = record.args if isinstance(record.args, tuple) else ()
    return next((word for word in words if isinstance(word, BaseException)), None)


def _of_a_connection(error: BaseException) -> bool:
    """Whether an error is that of a lost connection, or another that the broker's client raises."""
    library = type(error).__module__.partition(".")[0]
    return isinstance(error, ConnectionError | TimeoutError) or library in BROKER_LIBRARIES
