"""A wall clock that a test sets, for processes that it starts: the other clocks of the host are as they are."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

#: Takes the place of the C library's wall clock. The file holds by how many seconds it is wrong.
PROGRAM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long wrong_s(void) {
    char text[32] = {0};
    const char *path = getenv("WALL_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return 0;
    if (read(fd, text, sizeof text - 1) < 0) text[0] = 0;
    close(fd);
    return strtol(text, NULL, 10);
}
int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "clock_gettime");
    int done = real(id, now);
    if (!done && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += wrong_s();
    return done;
}
time_t time(time_t *told) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (told) *told = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *told, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    told->tv_sec = now.tv_sec;
    told->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""


def missing() -> str:
    """Return what is missing to have one; empty: nothing."""
    return "" if shutil.which("cc") else "there is no C compiler (cc) to build the wall clock with"


class WallClock:
    """`environment` is for the processes that shall read this clock; `set` also reaches those that run."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "wall-clock"
        library = folder / "wall_clock.so"
        (folder / "wall_clock.c").write_text(PROGRAM)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "wall_clock.c", "-ldl"], check=True)
        self.environment: Mapping[str, str] = {"LD_PRELOAD": str(library), "WALL_CLOCK": str(self._file)}
        self.set(0.0)

    def set(self, ahead_s: float) -> None:
        """Have it show the true time and so many seconds, from now on."""
        fresh = self._file.with_suffix(".new")
        fresh.write_text(f"{ahead_s:.0f}")
        fresh.replace(self._file)
