"""The web page: the site's present and past in a browser, and its metrics, from a process of its own."""

from __future__ import annotations

from importlib.util import find_spec

from launch.faults import usage

#: Of the extra `web`.
LIBRARIES = ("starlette", "uvicorn", "jinja2", "prometheus_client")
#: Of the extra `otel`.
OF_TRACES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
PORT = 8470


def check_libraries(*, traces: bool) -> None:
    """Refuse to begin without the libraries of the page, and of `traces` where these are wished.

    Raises
    ------
    Fault
        With the extra that brings them.
    """
    missing = [name for name in (*LIBRARIES, *(OF_TRACES if traces else ())) if not _is_there(name)]
    if missing:
        raise usage(
            f"the web page needs {' and '.join(missing)}, which this environment lacks",
            f"pip install 'gpu-arbiter[{'otel,' if traces else ''}web]'",
        )


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False
