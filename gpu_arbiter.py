"""The start of the installed command: it finds our own packages where a user's folder has modules of the same names.

A training project may well have a ``launch.py`` or a ``protocol.py``, and PYTHONPATH may name its folder. So our
packages, ``launch`` and ``protocol`` among them, are looked for before anything there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Run the command line."""
    put_users_folders_last()
    from launch.cli import main as run  # here: the path is in order now

    run()


def put_users_folders_last() -> None:
    """Move the current folder and those of PYTHONPATH to the end of the import path, and put our own before them."""
    own = str(Path(__file__).resolve().parent)
    users = {os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep)}  # noqa: PTH100
    users |= {str(Path.cwd()), ""}
    users -= {own}
    kept = [folder for folder in sys.path if folder not in users]
    last = [folder for folder in sys.path if folder in users]
    sys.path[:] = [*kept, own, *last]


if __name__ == "__main__":
    main()
