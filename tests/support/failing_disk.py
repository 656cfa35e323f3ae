"""A small file system of its own that a test has fail: from then on it is read-only, as after an error of a disk."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

NEEDED = ("mkfs.ext4", "mount", "umount")


class FailingDisk:
    """An ext4 in a file, mounted at `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._image = folder.with_name(f"{folder.name}.img")

    def mount(self) -> None:
        """Mount it, made if it is not there yet; skip the test where that is not possible."""
        absent = [name for name in NEEDED if shutil.which(name) is None]
        if absent or os.geteuid() != 0:
            pytest.skip("only root, with e2fsprogs, can mount a small file system")
        if not self._image.exists():
            with self._image.open("wb") as image:
                image.truncate(16 * 2**20)
            subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "0", self._image], check=True)
        self.folder.mkdir(exist_ok=True, mode=0o700)
        done = subprocess.run(["mount", "-o", "loop", self._image, self.folder], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"no small file system can be mounted: {done.stderr.decode().strip()}")
        self.folder.chmod(0o700)

    def fail(self) -> None:
        """Let the kernel give the file system up, as it does after an error of the disk; it is read-only then."""
        subprocess.run(["mount", "-o", "remount,abort", self.folder], check=True)

    def unmount(self) -> None:
        """Take it away; files that are open in it stay open."""
        subprocess.run(["umount", "--lazy", self.folder], check=True)

    def mend(self) -> None:
        """Mount it anew, in order and writable. What the disk had not taken is lost."""
        self.unmount()
        self.mount()


@contextmanager
def failing_disk(folder: Path) -> Iterator[FailingDisk]:
    """Have one until the block ends."""
    disk = FailingDisk(folder)
    disk.mount()
    try:
        yield disk
    finally:
        disk.unmount()
