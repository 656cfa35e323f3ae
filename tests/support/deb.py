"""The Debian package of this tree, built once for all tests that install it."""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILDER = ROOT / "packaging/deb/build.py"
#: The packages of the newest tree that was tested; `make clean` removes them.
KEPT = ROOT / "out/deb"


def why_not() -> str:
    """Why no package can be built here; empty if one can."""
    return "" if shutil.which("dpkg-deb") else "dpkg-deb is not installed"


@functools.cache
def package(version: str = "") -> Path:
    """Return the package of the tree as it is when it is first asked for; as one of another version if that is named.

    Raises
    ------
    AssertionError
        If it cannot be built, with the builder's words.
    """
    KEPT.mkdir(parents=True, exist_ok=True)
    with (KEPT / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # tests of several processes want it at a time
        folder = KEPT / _fingerprint()
        for other in KEPT.iterdir():
            if other.is_dir() and other != folder:
                shutil.rmtree(other)
        place = folder / (version or "own")
        if not list(place.glob("*.deb")):
            line = [sys.executable, str(BUILDER), "--to", str(place), *(["--version", version] if version else [])]
            done = subprocess.run(line, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
        (made,) = place.glob("*.deb")
        return made


@functools.cache
def earlier() -> Path:
    """Return the package of the commit that GPU_ARBITER_EARLIER names, to upgrade from; without one that of the tree.

    Raises
    ------
    AssertionError
        If it cannot be built.
    """
    named = os.environ.get("GPU_ARBITER_EARLIER", "")
    if not named:
        return package()
    commit = _git("rev-parse", "--verify", f"{named}^{{commit}}")
    place = ROOT / "out/deb-earlier" / commit[:12]
    if not list(place.glob("*.deb")):
        with tempfile.TemporaryDirectory() as folder:
            _git("clone", "--quiet", "--no-checkout", str(ROOT), folder)
            _git("checkout", "--quiet", commit, at=Path(folder))
            line = [sys.executable, "packaging/deb/build.py", "--to", str(place)]
            done = subprocess.run(line, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    (made,) = place.glob("*.deb")
    return made


def _git(*words: str, at: Path = ROOT) -> str:
    done = subprocess.run(["git", *words], cwd=at, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"git {' '.join(words)}: {done.stderr}"
    return done.stdout.strip()


def _fingerprint() -> str:
    """Return a name for the contents of all files that Git follows, and for the interpreter."""
    listed = _git("ls-files", "-z")
    digest = sha256(sys.version.encode())
    for name in listed.split("\0"):
        path = ROOT / name
        if name and path.is_file() and not name.startswith(("tests/", "docs/", "benchmarks/")):  # no part of a package
            digest.update(f"{name} {sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:16]
