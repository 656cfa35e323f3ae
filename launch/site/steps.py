"""Steps of an installation: each looks what a host has, says what it would do there, and does it.

A step changes nothing while it looks. A thing that is as it should be is kept, so a second installation
finds nothing to do. Only paths below the host's root folder are written and removed.
"""

from __future__ import annotations

import itertools
import os
import pwd
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Literal, Protocol

from msgspec import Struct

from launch.faults import Fault

#: What becomes of the thing that a step is about.
Act = Literal["make", "keep", "change", "remove"]
#: Where an admin's own units are, and where those of packages are.
UNITS = "/etc/systemd/system"
PACKAGED_UNITS = ("/usr/lib/systemd/system", "/lib/systemd/system")
#: No program that is run here takes so long but one that waits for a daemon to be ready.
PROGRAM_S = 120.0
#: For what a daemon makes at its first start.
MADE_S = 30.0
#: What a unit says of the environment whose daemon it starts.
_PROGRAM = re.compile(r"(?<=^ExecStart=)/\S*(?=/gpu-arbiter )", re.MULTILINE)


class Look(Struct, frozen=True):
    """What a step found: what it would do, and the reason where there is one."""

    act: Act
    why: str = ""


class Host:
    """A host, by the folder that is its root; `live` if that is the host that runs this."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.live = root == Path("/")

    def at(self, path: str) -> Path:
        """Return where a path of the host is."""
        return self.root / path.lstrip("/")

    def inside(self, path: str) -> Path:
        """Return where a path of the host is that is to be written or removed.

        Raises
        ------
        Fault
            If a link on the way to it leads out of the root.
        """
        folder = self.at(path).parent.resolve()
        if not folder.is_relative_to(self.root.resolve()):
            raise Fault(
                f"{path} is left alone: a link on the way to it leads to {folder}, out of {self.root}",
                next_step="make it a relative link, or work on the host itself without --root",
            )
        return self.at(path)

    def account(self, name: str) -> tuple[int, int] | None:
        """Return number and group of an account; None if the host has no such account."""
        if self.live:
            try:
                known = pwd.getpwnam(name)
            except KeyError:
                return None
            return known.pw_uid, known.pw_gid
        try:
            lines = self.at("/etc/passwd").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return None
        fields = next((line.split(":") for line in lines if line.startswith(f"{name}:")), None)
        return None if fields is None else (int(fields[2]), int(fields[3]))

    def call(self, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a program of this host to its end.

        Raises
        ------
        Fault
            If it is not there, or has not ended in time.
        """
        if shutil.which(words[0]) is None:
            raise Fault(f"{words[0]} is not on this host", next_step="install it, and do the same again")
        try:
            return subprocess.run(words, input=text, capture_output=True, text=True, check=False, timeout=PROGRAM_S)
        except subprocess.TimeoutExpired:
            raise Fault(f"`{' '.join(words[:3])}` has not ended within {PROGRAM_S:.0f} s") from None

    def do(self, *words: str, text: str | None = None) -> str:
        """Run a program of this host that must succeed; return what it printed. Raises `Fault` with its own words."""
        done = self.call(*words, text=text)
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
            raise Fault(f"`{' '.join(words[:4])}` failed: {said}")
        return done.stdout

    def systemctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Have systemctl do something to the host, which need not be running."""
        return self.call("systemctl", *([] if self.live else [f"--root={self.root}"]), *words)

    def runs(self, unit: str) -> bool:
        """Whether a unit runs, or is about to."""
        return self.systemctl("is-active", unit).stdout.strip() in ("active", "activating", "reloading")

    def started_at(self, unit: str) -> float:
        """Return the time of the clock, in seconds, at which a unit's program was started; 0 if that is not known."""
        asked = ("show", "--timestamp=us+utc", "--property=ExecMainStartTimestamp", "--value", unit)
        _, _, told = self.systemctl(*asked).stdout.strip().partition(" ")  # after the day of the week
        try:
            return datetime.fromisoformat(told.replace(" UTC", "+00:00")).timestamp()
        except ValueError:
            return 0.0

    def units(self, pattern: str) -> list[str]:
        """Return the names of the units of a pattern that are enabled or loaded, instances of templates among them."""
        wanted = self.at(UNITS).glob(f"*.wants/{pattern}")
        names = {path.name for path in wanted}
        if self.live and Path("/run/systemd/system").is_dir():
            listed = self.do("systemctl", "list-units", "--all", "--plain", "--no-legend", "--full", pattern)
            # A unit that has failed has a mark before its name.
            names |= {word for line in listed.splitlines() for word in line.split()[:2] if word.endswith(".service")}
        return sorted(names)


class Planned(Struct, frozen=True):
    """One step with what it found."""

    step: Step
    look: Look

    @property
    def line(self) -> str:
        """Return the step as a line of a plan."""
        return f"{self.look.act:6}  {self.step.what}{f': {self.look.why}' if self.look.why else ''}"


class Step(Protocol):
    """One thing that a host must have, or must not have."""

    @property
    def what(self) -> str:
        """Return what it is about."""

    def look(self, host: Host, before: Sequence[Planned]) -> Look:
        """Return what is to be done, after the steps `before`. Changes nothing."""

    def do(self, host: Host) -> None:
        """Do it; raises `Fault` or OSError."""


def plan(steps: Sequence[Step], host: Host) -> list[Planned]:
    """Return all steps with what they found."""
    planned: list[Planned] = []
    for step in steps:
        planned.append(Planned(step, step.look(host, planned)))
    return planned


def carry_out(planned: Sequence[Planned], host: Host) -> int:
    """Do what there is to do; return how many steps that were.

    Raises
    ------
    Fault
        With the step that failed. Those before it are done.
    """
    todo = [each.step for each in planned if each.look.act != "keep"]
    before = os.umask(0o022)  # folders that are made on the way to a file are for daemons, too
    try:
        for step in todo:
            _do(step, host)
    finally:
        os.umask(before)
    return len(todo)


def _do(step: Step, host: Host) -> None:
    try:
        step.do(host)
    except OSError as error:
        raise Fault(f"{step.what}: {error}", next_step="mend that, and do the same again") from None
    except Fault as fault:
        mend = fault.next_step or "mend that, and do the same again: what is done is kept"
        raise Fault(f"{step.what}: {fault.sentence}", code=fault.code, next_step=mend) from None


def write(path: Path, text: str, mode: int, owner: tuple[int, int] = (0, 0)) -> None:
    """Write a file anew, whole or not at all."""
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        os.fchmod(file.fileno(), mode)
        os.fchown(file.fileno(), *owner)
    beside.replace(path)


def is_written(path: Path, text: str) -> bool:
    """Whether a file has a text as an installation writes it. Units of another environment start another program."""
    found = path.read_text(encoding="utf-8", errors="replace")
    return _PROGRAM.sub("", found) == _PROGRAM.sub("", text)


def put_aside(path: Path) -> list[Path]:
    """Return the files beside a path that an installation has put aside."""
    named = re.compile(re.escape(f"{path.name}.old") + r"([.]\d+)?")
    return sorted(each for each in path.parent.glob(f"{path.name}.old*") if named.fullmatch(each.name))


def _free(path: Path) -> Path:
    """Return a name beside a path under which it can be put aside."""
    names = itertools.chain([f"{path.name}.old"], (f"{path.name}.old.{count}" for count in itertools.count(1)))
    return next(each for each in map(path.with_name, names) if not os.path.lexists(each))


# --- what there must be -----------------------------------------------------------------------------------------------


class Folder(Struct, frozen=True):
    """A folder of root's. One that is `exact` is also opened where its mode is narrower."""

    path: str
    mode: int = 0o755
    exact: bool = False

    @property
    def what(self) -> str:
        """Return its path."""
        return f"folder {self.path}"

    def look(self, host: Host, before: Sequence[Planned]) -> Look:
        """Look who may use it."""
        path = host.inside(self.path)
        if path.is_symlink():
            return Look("keep", f"it is a link to {path.readlink()}")
        return _compared(path, self.mode, exact=self.exact)

    def do(self, host: Host) -> None:
        """Make it, or close it."""
        path = host.inside(self.path)
        made = not path.exists()
        path.mkdir(parents=True, exist_ok=True)
        if made or self.exact:
            path.chmod(self.mode)
            os.chown(path, 0, 0)
        _close(path, self.mode)


class File(Struct, frozen=True):
    """A file that is written once: what is there stays, but is closed if it is open wider than `mode`.

    It need not be there where one of `elsewhere` is, which a package has brought. A file with `replaces` is not the
    admin's own: another text is put aside as ``NAME.old``, ``NAME.old.1``. An `owner` in place of root is an account.
    One that is `exact` is also written anew where its mode is narrower, or its group another. The plan has the `note`.
    """

    path: str
    text: str
    mode: int = 0o644
    elsewhere: tuple[str, ...] = ()
    replaces: bool = False
    owner: str = "root"
    exact: bool = False
    note: str = ""

    @property
    def what(self) -> str:
        """Return its path."""
        return f"file {self.path}"

    def look(self, host: Host, before: Sequence[Planned]) -> Look:
        """Look what is there, and who may use it."""
        path = host.inside(self.path)
        if path.is_symlink():  # a unit that is masked, for example
            return Look("keep", f"it is a link to {path.readlink()}")
        packaged = next((place for place in self.elsewhere if host.at(place).is_file()), "")
        if packaged:
            return Look("keep", f"it is yours, in place of {packaged}" if path.exists() else f"there is {packaged}")
        if path.is_file() and self._is_another(path):
            aside = "" if is_written(path, self.text) else f", which is kept as {_free(path).name}"
            return Look("change", f"it has another text{aside}")
        found = _compared(path, self.mode, self.owner, host, exact=self.exact)
        return Look("make", self.note) if found.act == "make" else found

    def do(self, host: Host) -> None:
        """Write it, or close what is there."""
        path, owner = host.inside(self.path), _numbers(host, self.owner)
        path.parent.mkdir(parents=True, exist_ok=True)
        another = path.exists() and self._is_another(path)
        if another and not is_written(path, self.text):
            _close(path, self.mode)
            path.replace(_free(path))
        if path.exists() and not another and not self.exact:
            _close(path, self.mode, owner)
        else:
            write(path, self.text, self.mode, owner)

    def _is_another(self, path: Path) -> bool:
        return self.replaces and path.read_text(encoding="utf-8", errors="replace") != self.text


def _numbers(host: Host, owner: str) -> tuple[int, int]:
    """Return number and group of an account; raises `Fault` if the host has no such account."""
    found = (0, 0) if owner == "root" else host.account(owner)
    if found is None:
        raise Fault(f"this host has no account {owner}", next_step="install what makes it, and do the same again")
    return found


def _compared(path: Path, mode: int, owner: str = "root", host: Host | None = None, *, exact: bool = False) -> Look:
    """Look whether a path is there, its owner's, and open no wider than `mode`; an `exact` one has it and the group."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return Look("make")
    if found.st_mode & 0o7777 & ~mode:
        return Look("change", f"its mode {found.st_mode & 0o7777:o} is wider than {mode:o}")
    account = (0, 0) if owner == "root" or host is None else host.account(owner)
    if account is None or found.st_uid != account[0]:
        return Look("change", f"it belongs to user {found.st_uid} and should be {owner}'s")
    if exact and found.st_mode & 0o7777 != mode:
        return Look("change", f"its mode {found.st_mode & 0o7777:o} should be {mode:o}")
    if exact and found.st_gid != account[1]:
        return Look("change", f"it belongs to group {found.st_gid} and should be {owner}'s")
    return Look("keep")


def _close(path: Path, mode: int, owner: tuple[int, int] = (0, -1)) -> None:
    path.chmod(path.stat().st_mode & mode)
    os.chown(path, *owner)


class Accounts(Struct, frozen=True):
    """System accounts, as a file of systemd-sysusers names them; `names` are theirs."""

    file: str
    names: tuple[str, ...]

    @property
    def what(self) -> str:
        """Return their names."""
        return f"accounts {', '.join(self.names)}"

    def look(self, host: Host, before: Sequence[Planned]) -> Look:
        """Look which are there."""
        missing = [name for name in self.names if host.account(name) is None]
        return (
            Look("make", "" if len(missing) == len(self.names) else f"{', '.join(missing)}")
            if missing
            else Look("keep")
        )

    def do(self, host: Host) -> None:
        """Make those that are not there."""
        host.do("systemd-sysusers", *([] if host.live else [f"--root={host.root}"]), self.file)


class StateFolder(Struct, frozen=True):
    """A folder of an account's, as a file of systemd-tmpfiles names it."""

    file: str
    path: str
    account: str
    mode: int

    @property
    def what(self) -> str:
        """Return its path and its owner."""
        return f"folder {self.path} of {self.account}"

    def look(self, host: Host, before: Sequence[Planned]) -> Look:
        """Compare owner and mode."""
        try:
            found = host.at(self.path).stat()
        except FileNotFoundError:
            return Look("make")
        owner = host.account(self.account)
        if (found.st_uid, found.st_gid) != owner or found.st_mode & 0o7777 != self.mode:
            return Look("change", f"it should be {self.account}'s with mode {self.mode:o}")
        return Look("keep")

    def do(self, host: Host) -> None:
        """Make it, or set owner and mode."""
        host.do("systemd-tmpfiles", *([] if host.live else [f"--root={host.root}"]), "--create", self.file)


# --- units ------------------------------------------------------------------------------------------------------------


class Reloaded(Struct, frozen=True):
    """systemd has read the units that were written or removed; also what an admin has changed of `units`."""

    units: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        """Return what it is about."""
        return "units as systemd knows them"

    def look(self, host: Host, before: Sequence[Planned]) -> Look:
        """Look whether a step before touches a unit, and ask systemctl."""
        asked = [host.systemctl("show", "--property=NeedDaemonReload", "--value", unit).stdout for unit in self.units]
        old = _touches_units(before) or any("yes" in each for each in asked)
        return Look("change", "systemctl daemon-reload") if old else Look("keep")

    def do(self, host: Host) -> None:
        """Have systemd read them anew."""
        host.do("systemctl", "daemon-reload")


def _touches_units(before: Sequence[Planned], unit: str = "") -> bool:
    """Whether a step before writes or removes a file of a unit; of `unit`, if one is named."""
    start = f"{UNITS}/{unit}"
    written = (each.step.path for each in before if each.look.act != "keep" and isinstance(each.step, File | Absent))
    return any(path.startswith(start) for path in written)


class Enabled(Struct, frozen=True):
    """A unit starts with the host."""

    unit: str

    @property
    def what(self) -> str:
        """Return its name."""
        return f"start of {self.unit} with the host"

    def look(self, host: Host, before: Sequence[Planned]) -> Look:
        """Ask systemctl."""
        said = host.systemctl("is-enabled", self.unit).stdout.strip()
        return Look("keep", "" if said == "enabled" else said) if _starts(said) else Look("make", "systemctl enable")

    def do(self, host: Host) -> None:
        """Enable it."""
        done = host.systemctl("enable", self.unit)
        if done.returncode:
            raise Fault(f"`systemctl enable {self.unit}` failed: {' '.join(done.stderr.split())}")


def _starts(said: str) -> bool:
    """Whether systemctl's word on a unit means that it is started with the host, or by what needs it."""
    return said in ("enabled", "alias", "static", "indirect", "generated")


class Started(Struct, frozen=True):
    """A unit runs, as its files are now. `files` are those of which a change asks for a new start."""

    unit: str
    files: tuple[str, ...] = ()
    wait: bool = False  #: until it is up; a daemon of ours may wait for its broker
    makes: str = ""  #: a file that it makes at its first start, for which is waited: it is to be copied elsewhere

    @property
    def what(self) -> str:
        """Return its name."""
        return f"daemon {self.unit}"

    def look(self, host: Host, before: Sequence[Planned]) -> Look:
        """Ask systemctl. Files may also be new since an installation that started nothing."""
        if not host.runs(self.unit):
            return Look("make", "systemctl start")
        changed = {getattr(each.step, "path", "") for each in before if each.look.act != "keep"}
        if changed & set(self.files) or _touches_units(before, self.unit):
            return Look("change", "systemctl restart, as its files are new")
        written = {path: host.at(path).stat().st_mtime for path in self.files if host.at(path).exists()}
        newest = max(written, key=lambda path: written[path], default="")
        started = host.started_at(self.unit) if newest else 0.0
        if started and written[newest] > started:
            return Look("change", f"systemctl restart, as {newest} is newer than its start")
        return Look("keep")

    def do(self, host: Host) -> None:
        """Start it, or start it anew."""
        host.do("systemctl", "restart", *([] if self.wait else ["--no-block"]), self.unit)
        by = time.monotonic() + MADE_S
        while self.makes and not host.at(self.makes).exists() and host.runs(self.unit) and time.monotonic() < by:
            time.sleep(0.1)


# --- what there must not be -------------------------------------------------------------------------------------------


class Stopped(Struct, frozen=True):
    """A unit neither runs nor starts with the host. Training goes on: it is no part of its unit's life."""

    unit: str

    @property
    def what(self) -> str:
        """Return its name."""
        return f"daemon {self.unit}"

    def look(self, host: Host, before: Sequence[Planned]) -> Look:
        """It is only planned for units that are enabled or loaded."""
        return Look("remove", f"systemctl disable{' --now' if host.live else ''}")

    def do(self, host: Host) -> None:
        """Stop and disable it. systemctl also removes a link to a unit elsewhere, which is the admin's."""
        file = host.at(f"{UNITS}/{re.sub('@.*[.]', '@.', self.unit)}")
        link = file.readlink() if file.is_symlink() else None
        done = host.systemctl("disable", *(["--now"] if host.live else []), self.unit)
        if link is not None and not file.is_symlink():
            host.inside(f"{UNITS}/{file.name}").symlink_to(link)
        if done.returncode:
            raise Fault(f"`systemctl disable {self.unit}` failed: {' '.join(done.stderr.split())}")


class Absent(Struct, frozen=True):
    """A file or a folder is not there, but for what is kept of it: paths within it."""

    path: str
    why: str = ""
    kept: tuple[str, ...] = ()

    @property
    def what(self) -> str:
        """Return its path."""
        return self.path

    def look(self, host: Host, before: Sequence[Planned]) -> Look:
        """It is only planned for what is there."""
        path = host.inside(self.path)
        left = [each for each in self.kept if host.inside(f"{self.path}/{each}").exists()]
        there = {each.name for each in path.iterdir()} if left else set()
        if left and there <= set(left):
            return Look("keep", f"{', '.join(left)} is the users'")
        return Look("remove", "; ".join(filter(None, (self.why, f"but for {', '.join(left)}" if left else ""))))

    def do(self, host: Host) -> None:
        """Remove it."""
        path = host.inside(self.path)
        if any(host.inside(f"{self.path}/{each}").exists() for each in self.kept):
            for within in path.iterdir():
                if within.name not in self.kept:
                    _remove(within)
        else:
            _remove(path)
            if path.parent.suffix == ".d" and path.parent.parent == host.at(UNITS) and not any(path.parent.iterdir()):
                path.parent.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class Kept(Struct, frozen=True):
    """Something that stays, with the reason."""

    path: str
    why: str

    @property
    def what(self) -> str:
        """Return its path."""
        return self.path

    def look(self, host: Host, before: Sequence[Planned]) -> Look:
        """Say why it stays."""
        return Look("keep", self.why)

    def do(self, host: Host) -> None:
        """Do nothing: it is never asked to."""
        raise AssertionError(self.path)
