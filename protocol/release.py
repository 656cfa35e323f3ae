"""The release of this program: journals say which one wrote them, and no older one reads them."""

from __future__ import annotations

import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PROGRAM = "gpu-arbiter"


def release(source: Path = Path(__file__).parents[1]) -> str:
    """Return the release as ``MAJOR.MINOR.PATCH``.

    A source tree that is run without having been installed, as on a host that reaches no package registry, has no
    metadata: its `source` says it.
    """
    try:
        return version(PROGRAM)
    except PackageNotFoundError:
        return str(tomllib.loads((source / "pyproject.toml").read_text())["project"]["version"])
