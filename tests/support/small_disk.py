"""A file system of its own, of a few MB, that a test fills up."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str = "16m", *, owner: int = 0) -> Iterator[None]:
    """Have one in this folder until the block ends; it belongs to the user `owner`."""
    folder.mkdir()
    options = f"size={size},mode=700,uid={owner}"
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=False)
    if made.returncode:
        pytest.skip("only root can mount a small file system")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill_up(folder: Path) -> Path:
    """Write a file that leaves no room in this file system."""
    ballast = folder / "ballast"
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast
