"""What tests start for themselves and end again: servers, and networks."""

from __future__ import annotations

from typing import Protocol, Self


class Startable(Protocol):
    """A thing that a `with` starts; it is closed in the end, also if it could not be started."""

    def start(self) -> None:
        """Start it."""
        ...

    def close(self) -> None:
        """End it, as far as it was started; nothing of it is left behind."""
        ...

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
