"""Where a job's checkpoints lie and when one may be trusted. Standard library only: runs inside the training process.

``<root>/a<attempt>-s<step>/`` holds what the script's save function wrote, and ``manifest.json``. A checkpoint is
written under a temporary name, every file and the folder are flushed to the disk, then it is renamed: a folder with
this name and a manifest that matches it is complete, and anything else is skipped.

All attempts of a job share `root`. An attempt restores the newest checkpoint of the attempts *before* it, so whatever a
revived zombie of an older attempt still writes is outranked as soon as its successor has saved once.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: How many complete checkpoints of a job stay: the newest, and one more in case the newest cannot be read.
KEPT = 2
MANIFEST = "manifest.json"
FINISHED = "finished.json"

_COMPLETE = re.compile(r"a(\d+)-s(\d+)\Z")
_PARTIAL = re.compile(r"tmp-a(\d+)-s\d+\Z")


class Checkpoint:
    """A complete checkpoint: mini-batches 0 to `step` are done in it."""

    __slots__ = ("attempt", "path", "step")

    def __init__(self, attempt: int, step: int, path: Path) -> None:
        self.attempt = attempt
        self.step = step
        self.path = path


def newest(root: Path, before_attempt: int) -> Checkpoint | None:
    """Return the newest complete checkpoint of the attempts before `before_attempt`, or None."""
    found = [item for item in _complete(root) if item.attempt < before_attempt]
    return found[-1] if found else None


def write(root: Path, attempt: int, step: int, total_steps: int, save: Callable[[str], object]) -> Path:
    """Let `save(folder)` write its files and make them a durable checkpoint; return its folder.

    Raises
    ------
    OSError
        If the disk refuses; nothing half-written is left under a trusted name.
    ValueError
        If `save` wrote no file.
    """
    final = root / f"a{attempt}-s{step}"
    if _read(final) is not None:
        return final  # this very step was saved a moment ago: nothing has changed since
    partial = root / f"tmp-a{attempt}-s{step}"
    _make_empty(partial)
    try:
        save(str(partial))
        _seal(partial, {"schema": "checkpoint/v1", "attempt": attempt, "step": step, "total_steps": total_steps})
        shutil.rmtree(final, ignore_errors=True)  # an incomplete one of the same name
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync(root)
    _prune(root, attempt)
    return final


def write_finished(root: Path, document: dict[str, Any]) -> None:
    """Put `document` into ``<root>/finished.json``, durably and all at once.

    Raises
    ------
    OSError
        If the disk refuses.
    """
    root.mkdir(parents=True, exist_ok=True)
    partial = root / f"tmp-{FINISHED}-{os.getpid()}"
    partial.write_text(json.dumps(document, sort_keys=True) + "\n", encoding="utf-8")
    _sync(partial)
    partial.replace(root / FINISHED)
    _sync(root)


def _complete(root: Path) -> list[Checkpoint]:
    """All complete checkpoints, oldest first."""
    try:
        entries = list(root.iterdir())
    except OSError:  # not there yet: no attempt has saved
        return []
    found = [item for item in map(_read, entries) if item is not None]
    return sorted(found, key=lambda item: (item.attempt, item.step))


def _read(path: Path) -> Checkpoint | None:
    """Return the checkpoint in `path`, or None unless its manifest says it is complete and its files are as listed."""
    match = _COMPLETE.match(path.name)
    if match is None:
        return None
    attempt, step = int(match[1]), int(match[2])
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        assert isinstance(manifest, dict)
        told = manifest.get("complete"), manifest.get("attempt"), manifest.get("step"), manifest.get("files")
    except (OSError, ValueError, AssertionError):
        return None
    if told != (True, attempt, step, _files(path)):
        return None
    return Checkpoint(attempt, step, path)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _seal(folder: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest last and flush everything, so that a manifest on the disk means the rest is there too."""
    files = _files(folder)
    if not files:
        raise ValueError("the save function wrote no file into the folder it was given")
    for path in sorted(folder.rglob("*")):
        _sync(path)
    document = {**manifest, "files": files, "complete": True}
    (folder / MANIFEST).write_text(json.dumps(document, sort_keys=True) + "\n", encoding="utf-8")
    _sync(folder / MANIFEST)
    _sync(folder)


def _files(folder: Path) -> dict[str, int]:
    """Size in bytes of every file below `folder`, by relative name, the manifest left out."""
    files = (path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prune(root: Path, attempt: int) -> None:
    """Remove all but the newest complete checkpoints, and what crashed attempts before `attempt` left half-written."""
    for item in _complete(root)[:-KEPT]:
        shutil.rmtree(item.path, ignore_errors=True)
    with contextlib.suppress(OSError):
        for path in list(root.iterdir()):
            match = _PARTIAL.match(path.name)
            if match is not None and int(match[1]) < attempt:
                shutil.rmtree(path, ignore_errors=True)
