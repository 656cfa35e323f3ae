"""Where the recorded traces lie, which are no part of this repository: tests that need them skip, in CI they fail."""

from __future__ import annotations

from pathlib import Path

from tests.support.needs import lack

ROOT = Path(__file__).resolve().parents[2]
#: In the checkout, or beside it.
FOLDERS = (ROOT / "shared", ROOT.parent / "shared")


def shared(path: str) -> Path:
    """Return the file or folder `path` of the shared folder, or skip the test."""
    for folder in FOLDERS:
        if (folder / path).exists():
            return folder / path
    return lack(f"shared/{path} is missing: recorded traces are not part of the repository")
