"""The files that are shipped for a site: an example configuration of each daemon, and the systemd units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().with_name("systemd")
#: The program in the units as they are shipped.
PROGRAM = "/opt/gpu-arbiter/bin/gpu-arbiter"
#: Column at which an example's remarks begin.
REMARKS = 51


def configurations(nodes: Sequence[str], owners: Sequence[str]) -> dict[str, str]:
    """Return the files of a site by name: the arbiter's, and one for each node and for each owner's app agent."""
    arbiter, node, app = (_text(f"{kind}.toml") for kind in ("arbiter", "node", "app"))
    return {
        "arbiter.toml": arbiter,
        **{f"node-{name}.toml": _renamed(node, "n1", name) for name in nodes},
        **{f"app-{owner}.toml": _renamed(app, "alice", owner) for owner in owners},
    }


def gateway(name: str) -> str:
    """Return the configuration of a gateway of that name."""
    return _renamed(_text("gateway.toml"), "login1", name)


def node(name: str, launcher: str = "") -> str:
    """Return the configuration of a node agent, which has the launcher at that socket start its tasks."""
    text = _renamed(_text("node.toml"), "n1", name)
    return "".join(
        _aligned(line.replace('""', f'"{launcher}"', 1)) if launcher and line.startswith("launcher = ") else line
        for line in text.splitlines(keepends=True)
    )


def file(name: str) -> str:
    """Return the text of another file that is shipped."""
    return _text(name)


def units(program: str = PROGRAM) -> dict[str, str]:
    """Return the systemd units by name; they start `program`."""
    return {path.name: _text(path.name).replace(PROGRAM, program) for path in sorted(FOLDER.glob("*.service"))}


def _text(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _renamed(text: str, example: str, name: str) -> str:
    """Return an example's text for another participant; remarks stay in their column as far as there is room."""
    return "".join(map(_aligned, text.replace(example, name).splitlines(keepends=True)))


def _aligned(line: str) -> str:
    setting, mark, remark = line.partition(" #")
    return f"{setting.rstrip().ljust(REMARKS - 1)}{mark}{remark}" if mark and setting.strip() else line


def write(files: Mapping[str, str], folder: Path) -> list[Path]:
    """Write the files, which must not be there, and return their paths. A file with the same text may be there.

    Raises
    ------
    FileExistsError
        With the path of a file that has another text; nothing has been written.
    OSError
        If the folder cannot be made or written.
    """
    paths = {folder / name: text for name, text in files.items()}
    for path, text in paths.items():
        if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
            raise FileExistsError(str(path))
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in paths.items():
        path.write_text(text, encoding="utf-8")
    return list(paths)
