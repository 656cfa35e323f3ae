"""A job's checkpoints: their folders, and the proof that one is complete. Standard library only.

``<root>/a<attempt>-s<step>/`` holds the files of the script's save function, and ``manifest.json``. A checkpoint is
written under a temporary name, every file and the folder are flushed to the disk, then it is renamed: a folder with
this name and a manifest that matches it is complete, and anything else is skipped.

Each says of which run it is, one submission of one app. A checkpoint that another run has left in the same folder is
another job's, also under the same name: it is never loaded, counted or removed.

All attempts of a job share its roots. The durable one is seen by every node. The other, if there is one, lies in this
node's memory: a checkpoint with which a job leaves its GPUs goes there, so that an attempt that starts on the same node
need not wait for a disk, and the node agent copies it to the durable root. An attempt restores the newest checkpoint of
the attempts *before* it, so a checkpoint that a revived zombie of an older attempt still writes is outranked as soon as
its successor has saved once.

Several processes of one task (ranks) write one checkpoint together. Rank 0 makes the folder, each rank's save function
writes into it, each marks that it is done, and rank 0 seals and renames it. The marks lie in a folder beside it, whose
name holds the order's number, so that none is ever taken for another's. A rank that fails says so there, and all give
up. Of a job on several nodes only the step and the attempt are the same in all, so there a step that could not be saved
once cannot be saved again in that attempt. Each rank has its file system look anew now and then, since NFS remembers
for half a minute that a file was not there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Save = Callable[[str], object]  #: the script's function that writes its state into a folder

#: How many complete checkpoints of a job stay: the newest, and one more in case the newest cannot be read.
KEPT = 2
MANIFEST = "manifest.json"
FINISHED = "finished.json"
#: How long one rank waits for another to do its part: to come, to write its share, to seal.
RANKS_S_MAX = 600.0
_LOOK_S = 0.01
#: How often a rank on another node than rank 0 has its file system ask anew.
LOOK_ANEW_S = 0.5

_COMPLETE = re.compile(r"a(\d+)-s(\d+)\Z")
_PARTIAL = re.compile(r"tmp-a(\d+)-s\d+(?:-.*)?\Z")
_MARKS = "-marks"


_UNFINISHED = re.compile(rf"tmp-{re.escape(FINISHED)}-\d+\Z")


def is_ours(name: str) -> bool:
    """Whether a name in a job's folder is one that this module and the node agent give, and no script."""
    return name == FINISHED or any(each.match(name) for each in (_COMPLETE, _PARTIAL, _UNFINISHED))


class Checkpoint:
    """A complete checkpoint: mini-batches 0 to `step` are done in it, and `samples` were consumed if that was told."""

    __slots__ = ("attempt", "path", "run", "samples", "step")

    def __init__(self, attempt: int, step: int, path: Path, samples: int = 0, run: str = "") -> None:
        self.attempt, self.step, self.path, self.samples, self.run = attempt, step, path, samples, run


class Root:
    """A folder of checkpoints of one `run`, empty for one that an earlier version submitted.

    `durable`: files that are said to be there are there after a power cut; else in memory only.
    """

    __slots__ = ("durable", "kept", "path", "run")

    def __init__(self, path: Path, *, durable: bool = True, run: str = "") -> None:
        self.path, self.durable, self.run = path, durable, run
        self.kept = KEPT if durable else 1


class Team:
    """One process among those that write a checkpoint together; `order` is the same in all, and new each time.

    If they are on several nodes, `apart`, it is not new each time.
    """

    __slots__ = ("apart", "order", "patience_s", "rank", "world")

    def __init__(
        self,
        rank: int = 0,
        world: int = 1,
        order: str = "",
        patience_s: float = RANKS_S_MAX,
        *,
        apart: bool = False,
    ) -> None:
        self.rank, self.world, self.order, self.patience_s, self.apart = rank, world, order, patience_s, apart


def newest(roots: Sequence[Root], before_attempt: int) -> Checkpoint | None:
    """Return the newest complete checkpoint of the attempts before `before_attempt`, or None.

    Of the same checkpoint in two roots, the one in the first. The newest of another run is warned of.
    """
    every = [(item, item.run == root.run) for root in roots for item in _complete(root.path)]
    found = [item for item, own in every if own and item.attempt < before_attempt]
    strange = [item for item, own in every if not own]
    if strange:
        _warn_of(max(strange, key=lambda item: (item.attempt, item.step)), roots[-1].run)
    return max(found, key=lambda item: (item.attempt, item.step), default=None)


def write(
    roots: Sequence[Root],
    attempt: int,
    step: int,
    facts: dict[str, Any],
    save: Save,
    team: Team | None = None,
) -> Path:
    """Let `save(folder)` write its files and make them a checkpoint in the first of `roots` that takes it.

    `facts` are further entries of the manifest. Of several ranks, all call this for the same step, with the same roots.
    Returns the checkpoint's folder.

    Raises
    ------
    OSError
        If the disk refuses; nothing half-written is left under a trusted name.
    ValueError
        If `save` wrote no file.
    TimeoutError
        If another rank did not do its part.
    """
    team = team or Team()
    name = f"a{attempt}-s{step}"
    for root in roots:
        saved = _read(root.path / name)
        if saved is not None and saved.run == root.run:
            return root.path / name  # this very step was saved a moment ago: nothing has changed since
    manifest = {"schema": "checkpoint/v1", "run": roots[-1].run, "attempt": attempt, "step": step, **facts}
    *others, last = roots
    for root in others:
        # Every exception: PyTorch's own for a full memory is no OSError.
        with contextlib.suppress(Exception):
            return _write(root, roots, name, manifest, save, team)
    return _write(last, roots, name, manifest, save, team)


def write_finished(root: Root, document: dict[str, Any]) -> None:
    """Put `document` into ``<root>/finished.json``, durably and all at once; the file of another run is set aside.

    Raises
    ------
    OSError
        If the disk refuses.
    """
    folder, final = root.path, root.path / FINISHED
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"tmp-{FINISHED}-{os.getpid()}"
    partial.write_text(json.dumps({**document, "run": root.run}, sort_keys=True) + "\n", encoding="utf-8")
    _sync(partial)
    other = _finished_run(final)
    if other not in (None, root.run):
        final.rename(folder / f"finished-{other or 'unnamed'}.json")
        warnings.warn(f"gpu-arbiter: {final} was of {_named(other)}; it is set aside beside it", stacklevel=5)
    partial.replace(final)
    _sync(folder)


# --- writing --------------------------------------------------------------------------------------------------------


def _write(root: Root, roots: Sequence[Root], name: str, manifest: dict[str, Any], save: Save, team: Team) -> Path:
    if team.world == 1:
        return _lead(root, f"tmp-{name}", name, manifest, save, None)
    partial = f"tmp-{name}-{team.order}"
    marks = _Marks(root.path / (partial + _MARKS), team)
    if team.rank == 0:
        return _lead(root, partial, name, manifest, save, marks)
    later = [item.path / (partial + _MARKS) for item in roots[roots.index(root) + 1 :]]
    _follow(root.path / partial, root.path / name, save, marks, later)
    return root.path / name


def _lead(
    root: Root,
    partial_name: str,
    name: str,
    manifest: dict[str, Any],
    save: Save,
    marks: _Marks | None,
) -> Path:
    """Make the folder, save this rank's share, wait for the others', and seal it."""
    partial, final = root.path / partial_name, root.path / name
    try:
        _make_empty(partial)
        _make_way(final)
        if marks is not None:
            marks.open()
        save(str(partial))
        if marks is not None:
            marks.wait_done()
        _seal(partial, manifest, durable=root.durable)
        partial.rename(final)
    except BaseException as error:
        if marks is not None:
            marks.give_up(error)
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if root.durable:
        _sync(root.path)
    _prune(root, int(manifest["attempt"]))
    return final


def _follow(partial: Path, final: Path, save: Save, marks: _Marks, later: Sequence[Path]) -> None:
    """Save this rank's share into the folder that rank 0 makes, and wait until it has sealed the whole."""
    marks.wait_open(later)
    try:
        save(str(partial))
    except BaseException as error:
        marks.check()  # rank 0 has taken the folder away
        marks.fail(error)
        raise
    marks.done()
    marks.wait_sealed(final)


class _Marks:
    """The marks by which ranks tell each other about one checkpoint: files in a folder that all of them see."""

    def __init__(self, folder: Path, team: Team) -> None:
        self._folder, self._team = folder, team

    # rank 0

    def open(self) -> None:
        self._folder.mkdir()
        self._put("open")

    def wait_done(self) -> None:
        """Wait until every other rank has saved its share."""
        for rank in range(1, self._team.world):
            self._wait(f"rank {rank} did not save its share", self._folder / f"done-{rank}")

    def give_up(self, error: BaseException) -> None:
        with contextlib.suppress(OSError):  # making the folder may be the very thing that failed
            self._put("closed", f"rank 0: {_sentence(error)}")

    # all others

    def wait_open(self, later: Sequence[Path]) -> None:
        """Wait until rank 0 has made the folder; ConnectionAbortedError if it has gone on to a later root."""
        turned = [folder / "open" for folder in later]
        self._wait("rank 0 did not begin", self._folder / "open", *turned)
        if any(path.exists() for path in turned):
            raise ConnectionAbortedError("rank 0 has given this folder up")

    def done(self) -> None:
        self._put(f"done-{self._team.rank}")

    def fail(self, error: BaseException) -> None:
        """Say that this rank has failed."""
        with contextlib.suppress(OSError):
            self._put("failed", f"rank {self._team.rank}: {_sentence(error)}")

    def wait_sealed(self, final: Path) -> None:
        self._wait("rank 0 did not seal it", final)

    def check(self) -> None:
        """Raise ConnectionAbortedError if a rank has given up, with its reason."""
        for mark in ("failed", "closed"):
            with contextlib.suppress(FileNotFoundError):
                raise ConnectionAbortedError((self._folder / mark).read_text(encoding="utf-8"))

    def _look_anew(self) -> None:
        """Change the folders, after which the file system asks its server again what is in them."""
        for folder in (self._folder.parent, self._folder):
            with contextlib.suppress(OSError):
                os.utime(folder)

    def _put(self, name: str, text: str = "") -> None:
        partial = self._folder / f"{name}.{self._team.rank}.tmp"
        partial.write_text(text, encoding="utf-8")
        partial.replace(self._folder / name)

    def _wait(self, late: str, *wanted: Path) -> None:
        deadline = time.monotonic() + self._team.patience_s
        look_anew_at = time.monotonic() + LOOK_ANEW_S
        while True:
            if self._team.apart and time.monotonic() >= look_anew_at:
                look_anew_at += LOOK_ANEW_S
                self._look_anew()
            self.check()
            if any(path.exists() for path in wanted):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{late} within {self._team.patience_s:.0f} s")
            time.sleep(_LOOK_S)


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:1000]


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _make_way(final: Path) -> None:
    """Remove an incomplete checkpoint of this name; a complete one is of another run, and stays."""
    other = _read(final)
    if other is not None:
        raise FileExistsError(f"{final} is a checkpoint of {_named(other.run)}, not of this one; move it away")
    shutil.rmtree(final, ignore_errors=True)


def _seal(folder: Path, manifest: dict[str, Any], *, durable: bool) -> None:
    """Write the manifest last and flush everything, so that a manifest on the disk means the rest is there too."""
    files = _files(folder)
    if not files:
        raise ValueError("the save function wrote no file into the folder it was given")
    for path in sorted(folder.rglob("*")) if durable else ():
        _sync(path)
    document = {**manifest, "files": files, "complete": True}
    (folder / MANIFEST).write_text(json.dumps(document, sort_keys=True) + "\n", encoding="utf-8")
    if durable:
        _sync(folder / MANIFEST)
        _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prune(root: Root, attempt: int) -> None:
    """Remove all but the newest complete checkpoints, and the half-written ones of crashed attempts before `attempt`.

    Of this attempt's own, remove the marks of checkpoints that came to an end: all ranks are past that when they write
    again.
    """
    for item in [item for item in _complete(root.path) if item.run == root.run][: -root.kept]:
        shutil.rmtree(item.path, ignore_errors=True)
    with contextlib.suppress(OSError):
        for path in list(root.path.iterdir()):
            match = _PARTIAL.match(path.name)
            if match is not None and int(match[1]) < attempt + path.name.endswith(_MARKS):
                shutil.rmtree(path, ignore_errors=True)


# --- reading --------------------------------------------------------------------------------------------------------


def _complete(root: Path) -> list[Checkpoint]:
    """Return all complete checkpoints, of every run, oldest first."""
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
        samples, run = manifest.get("samples", 0), str(manifest.get("run", ""))
    except (OSError, ValueError, AssertionError):
        return None
    if told != (True, attempt, step, _files(path)):
        return None
    return Checkpoint(attempt, step, path, samples if type(samples) is int else 0, run)


def _warn_of(strange: Checkpoint, run: str) -> None:
    warnings.warn(
        f"gpu-arbiter: {strange.path} is a checkpoint of {_named(strange.run)}, not of this one, and is not loaded; "
        f'a later attempt goes on from it if its {MANIFEST} says "run": "{run}"',
        stacklevel=5,
    )


def _named(run: str | None) -> str:
    return f"run {run}" if run else "a run without a name (of an earlier version)"


def _finished_run(path: Path) -> str | None:
    """Return the run whose end is recorded on the disk; None if there is none."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return str(document.get("run", "")) if isinstance(document, dict) else None


def _files(folder: Path) -> dict[str, int]:
    """Size in bytes of every file below `folder`, by relative name, the manifest left out."""
    files = (path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
