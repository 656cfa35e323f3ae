"""Imported before anything of `protocol`: says so where a file of the user hides that package of ours.

The command line is safe from that (`gpu_arbiter.py`). A script that uses the Python client has its own folder first on
the import path, and means its own modules by their names; so theirs stay theirs, and the mend is the user's.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path


def check() -> None:
    """Raise ImportError, with the file and the mend, if `protocol` is not the package beside this one."""
    loaded = sys.modules.get("protocol")
    origin = getattr(loaded, "__file__", None) if loaded else getattr(find_spec("protocol"), "origin", None)
    own = Path(__file__).resolve().parents[1] / "protocol" / "__init__.py"
    if origin is not None and Path(origin).resolve() != own:
        raise ImportError(
            f"{origin} hides the package `protocol` of gpu-arbiter, which its Python client needs; rename that file, "
            "or start the script from another folder"
        )


check()
