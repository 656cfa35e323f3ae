"""The web page: the site's present and past in a browser, and its metrics, from a process of its own."""

from __future__ import annotations

from importlib.util import find_spec

from launch.faults import usage

#: Of the extra `web`.
LIBRARIES = ("starlette", "uvicorn", "jinja2", "prometheus_client")
PORT = 8470


def check_libraries() -> None:
    """Refuse to begin without the libraries.

    Raises
    ------
    Fault
        With the extra that brings them.
    """
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        raise usage(
            f"the web page needs {' and '.join(missing)}, which this environment lacks",
            "pip install 'gpu-arbiter[web]'",
        )
