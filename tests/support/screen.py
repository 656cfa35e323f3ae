"""A real terminal in which a command runs and a person types: a window of tmux, on a server of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from secrets import token_hex

from tests.support.patience import PATIENCE_S

WHY_NOT = "" if shutil.which("tmux") else "tmux is not installed (apt-get install tmux)"


class Screen:
    """The window; `keys` are tmux's names of keys, or text."""

    def __init__(self, server: str) -> None:
        self._tmux = ("tmux", "-f", "/dev/null", "-L", server)

    def do(self, *words: str, env: Mapping[str, str] | None = None) -> str:
        return subprocess.run([*self._tmux, *words], capture_output=True, text=True, check=True, env=env).stdout

    def type(self, *keys: str) -> None:
        self.do("send-keys", *keys)

    def resize(self, columns: int, rows: int) -> None:
        self.do("resize-window", "-x", str(columns), "-y", str(rows))

    @property
    def text(self) -> str:
        """What is shown, and what has scrolled by; long lines in one piece."""
        return self.do("capture-pane", "-p", "-J", "-S", "-")

    def see(self, pattern: str) -> str:
        """Wait until `pattern` is in what is shown now, whatever was shown before; return all that is shown."""
        by = time.monotonic() + PATIENCE_S
        while not re.search(pattern, shown := self.do("capture-pane", "-p", "-J"), re.MULTILINE):
            assert time.monotonic() < by, f"no {pattern!r} is shown, but:\n{shown}"
            time.sleep(0.1)
        return shown

    def wait(self, pattern: str, count: int = 1) -> re.Match[str]:
        """Wait until so many matches of `pattern` are shown; return the last."""
        by = time.monotonic() + PATIENCE_S
        while True:
            text = self.text
            found = list(re.finditer(pattern, text, re.MULTILINE))
            if len(found) >= count:
                return found[-1]
            assert time.monotonic() < by, f"no {pattern!r} is shown, but:\n{text}"
            time.sleep(0.1)


@contextmanager
def screen(env: Mapping[str, str], folder: str, columns: int = 100, rows: int = 30) -> Iterator[Screen]:
    """A shell in a window; its prompt is ``here$``."""
    made = Screen(f"test-{token_hex(6)}")
    size = ("-x", str(columns), "-y", str(rows))
    shell = ("env", "PS1=here$ ", "bash", "--norc", "--noprofile")
    made.do("new-session", "-d", *size, "-c", folder, *shell, env=env)
    try:
        made.wait(r"^here\$")
        yield made
    finally:
        made.do("kill-server")
