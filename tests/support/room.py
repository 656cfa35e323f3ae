"""Room on a disk that a file takes beyond its end, where its size does not show it."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest

KEEP_SIZE = 0x01


def take_room(path: Path, size: int) -> None:
    """Take `size` bytes of the disk for a file, which keeps its length, as each process may that can write to it."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        if libc.fallocate(ctypes.c_int(fd), ctypes.c_int(KEEP_SIZE), ctypes.c_int64(0), ctypes.c_int64(size)) != 0:
            number = ctypes.get_errno()
            if number in (errno.EOPNOTSUPP, errno.ENOSYS):
                pytest.skip("the file system of the tests takes no room ahead")
            raise OSError(number, os.strerror(number))
    finally:
        os.close(fd)
