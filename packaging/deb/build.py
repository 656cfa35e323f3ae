"""Build ``dist/gpu-arbiter_VERSION_ARCH.deb``: ``python packaging/deb/build.py [--to FOLDER] [--version VERSION]``.

`make deb` runs it. The version is that of pyproject.toml unless another is given, as to rehearse an upgrade.

The package is one environment at /opt/gpu-arbiter with the packages of requirements.lock in this folder, whose hashes
are checked, the systemd units, and the accounts that these run as. No unit is enabled: a host is what its admin
enables. The environment is for the Python of the host that builds it, Debian's own, and the package depends on that.
Nothing is built when it is installed.
"""

from __future__ import annotations

import argparse
import compileall
import gzip
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tempfile
import time
from email.utils import formatdate
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
OPT = "opt/gpu-arbiter"
#: The packages with their hashes, made by `make lock`: of the extras those that daemons and command line can need;
#: training has PyTorch in environments of its own.
LOCK = HERE / "requirements.lock"
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
#: Debian's own interpreter, which the environment stands on.
INTERPRETER = Path("/usr/bin") / PYTHON
PROGRAM = f"""#!/{OPT}/bin/python
import sys

from gpu_arbiter import main

if __name__ == "__main__":
    sys.exit(main())
"""
#: Of the installed packages, what a host never needs.
LEFT_OUT = ("bin", "*/tests", "*/test", "pip", "pip-*.dist-info")


def main() -> int:
    """Build the package, print its path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=ROOT / "dist", help="the folder for the package")
    parser.add_argument("--version", default="", help="in place of that in pyproject.toml, such as 0.2.0")
    given = parser.parse_args()
    folder: Path = given.to
    if given.version and not re.fullmatch(r"\d+(\.\d+)*", given.version):
        parser.error(f"--version {given.version!r} is no version; write numbers with dots between them, such as 0.2.0")
    why = obstacle()
    if why:
        sys.stderr.write(f"{why}\n")
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-arbiter-deb-") as scratch:
        sys.stdout.write(f"{package(Path(scratch), folder, given.version)}\n")
    return 0


def obstacle() -> str:
    """Return why no package can be built here, with the mend; empty if it can."""
    if shutil.which("dpkg-deb") is None:
        return "dpkg-deb is not installed; build the package on Debian 12, Ubuntu 24.04 or a later one"
    if not INTERPRETER.exists():
        return f"{INTERPRETER} is not there; build with the Python of this system: make deb PYTHON=/usr/bin/python3"
    return ""


def package(scratch: Path, folder: Path, version: str) -> Path:
    """Build the package in `scratch`; return its path in `folder`. An empty `version` is that of the project.

    Raises
    ------
    subprocess.CalledProcessError
        If pip or dpkg-deb fails; it has said why.
    """
    root = scratch / "root"
    wheel = build_wheel(scratch, version)
    version = wheel.name.split("-")[1]
    environment(root / OPT, wheel)
    files_of_the_system(root, version)
    set_times(root)
    control(root, version)
    return pack(root, folder, version)


def build_wheel(scratch: Path, version: str) -> Path:
    """Return the wheel of what Git follows; setuptools would take stale files from elsewhere."""
    source = scratch / "source"
    followed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in followed.split("\0")[:-1]:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    if version:
        project = source / "pyproject.toml"
        text = re.sub("^version = .*$", f'version = "{version}"', project.read_text(), count=1, flags=re.MULTILINE)
        project.write_text(text)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", scratch, source)
    (wheel,) = scratch.glob("*.whl")
    return wheel


def environment(place: Path, wheel: Path) -> None:
    """Make the environment that will live at /opt/gpu-arbiter; the first line of its one script says that place."""
    packages = place / "lib" / PYTHON / "site-packages"
    packages.mkdir(parents=True)
    into = ("install", "--target", packages, "--no-compile")
    pip(*into, "--require-hashes", "-r", LOCK)
    pip(*into, "--no-deps", wheel)
    for pattern in LEFT_OUT:
        for path in packages.glob(pattern):
            shutil.rmtree(path)
    (place / "bin").mkdir()
    (place / "bin" / "python").symlink_to(INTERPRETER)
    program = place / "bin" / "gpu-arbiter"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    version = ".".join(map(str, sys.version_info[:3]))
    (place / "pyvenv.cfg").write_text(f"home = /usr/bin\ninclude-system-site-packages = false\nversion = {version}\n")
    # No daemon may write there, so each start would compile anew. The hash of a source stands for its time.
    compileall.compile_dir(
        packages,
        quiet=2,
        stripdir=str(packages),
        prependdir=f"/{packages.relative_to(place.parents[1])}",
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        workers=os.cpu_count() or 1,
    )


def files_of_the_system(root: Path, version: str) -> None:
    """Add units, accounts, the command on the PATH, and what Debian wants of every package."""
    units = root / "lib/systemd/system"
    units.mkdir(parents=True)
    for unit in (ROOT / "launch/site/systemd").glob("*.service"):
        shutil.copy(unit, units)
    for name, kind in (("sysusers.conf", "sysusers.d"), ("tmpfiles.conf", "tmpfiles.d")):
        place = root / "usr/lib" / kind
        place.mkdir(parents=True)
        shutil.copy(ROOT / "launch/site/systemd" / name, place / "gpu-arbiter.conf")
    (root / "etc/gpu-arbiter").mkdir(parents=True)
    (root / "usr/bin").mkdir(parents=True)
    (root / "usr/bin/gpu-arbiter").symlink_to(f"/{OPT}/bin/gpu-arbiter")
    notes = root / "usr/share/doc/gpu-arbiter"
    notes.mkdir(parents=True)
    shutil.copy(HERE / "copyright", notes)
    since = formatdate(epoch())
    news = f"gpu-arbiter ({version}) stable; urgency=medium\n\n  * See CHANGELOG.md.\n\n -- {builder()}  {since}\n"
    with gzip.GzipFile(notes / "changelog.gz", "wb", compresslevel=9, mtime=epoch()) as out:
        out.write(news.encode())
    manual = root / "usr/share/man/man1"
    manual.mkdir(parents=True)
    with gzip.GzipFile(manual / "gpu-arbiter.1.gz", "wb", compresslevel=9, mtime=epoch()) as out:
        out.write((HERE / "gpu-arbiter.1").read_bytes())
    overrides = root / "usr/share/lintian/overrides"
    overrides.mkdir(parents=True)
    shutil.copy(HERE / "lintian-overrides", overrides / "gpu-arbiter")


def set_times(root: Path) -> None:
    """Give all files one time and the rights that a package's files have, so that one commit gives one package."""
    for path in (root, *root.rglob("*")):
        if not path.is_symlink():
            is_program = path.is_dir() or (path.stat().st_mode & 0o100 and ".so" not in path.suffixes)
            path.chmod(0o755 if is_program else 0o644)
        os.utime(path, (epoch(), epoch()), follow_symlinks=False)


def control(root: Path, version: str) -> None:
    """Write the package's own description and its scripts."""
    kib = sum(path.lstat().st_size for path in root.rglob("*")) // 1024
    words = {
        "VERSION": version,
        "ARCHITECTURE": architecture(),
        "PYTHON": PYTHON,
        "KIB": str(kib),
        "BUILDER": builder(),
    }
    folder = root / "DEBIAN"
    folder.mkdir()
    text = (HERE / "control").read_text()
    for name, word in words.items():
        text = text.replace(f"@{name}@", word)
    (folder / "control").write_text(text)
    for script in ("postinst", "prerm", "postrm"):
        shutil.copy(HERE / script, folder / script)
        (folder / script).chmod(0o755)


def pack(root: Path, folder: Path, version: str) -> Path:
    """Write the package; return its path."""
    made = folder / f"gpu-arbiter_{version}_{architecture()}.deb"
    env = os.environ | {"SOURCE_DATE_EPOCH": str(epoch())}
    line = ["dpkg-deb", "--build", "--root-owner-group", "-Zxz", "-z2", root, made]
    subprocess.run(line, env=env, check=True, stdout=subprocess.DEVNULL)
    return made


def architecture() -> str:
    """Return Debian's name of this machine's architecture."""
    line = ["dpkg", "--print-architecture"]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip()


def builder() -> str:
    """Return name and address of who builds the package, as Debian's tools have them from the environment."""
    return f"{os.environ.get('DEBFULLNAME', 'gpu-arbiter')} <{os.environ.get('DEBEMAIL', 'builder@localhost')}>"


def epoch() -> int:
    """Return the time of the newest commit, in seconds; now, where there is none."""
    line = ["git", "log", "-1", "--format=%ct"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    return int(done.stdout or time.time())


def pip(*words: str | Path) -> None:
    """Run pip of the interpreter that runs this."""
    line = [sys.executable, "-m", "pip", *words, "--quiet", "--disable-pip-version-check"]
    subprocess.run(line, check=True)


if __name__ == "__main__":
    sys.exit(main())
