"""Takes away each measure that docs/security.md names, and demands that the test of the attack fails.

`tests/data/measures.toml` says for each attack of the page which lines of the code stop it, and how they would read if
they did not. As a program this makes those edits in a copy of the repository, one measure at a time, and runs the test
that the page names: first with all measures, where it must pass, then without the one, where it must fail. Words
restrict it to attacks that contain one of them. The exit code is 1 if a test failed with all measures, or passed
without one. A test that needs root, a real systemd or the like is skipped elsewhere, and told as not tried.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from tests.support.pages import DOCS, ROOT

DATA = ROOT / "tests" / "data" / "measures.toml"
COPY = ROOT / "out" / "attacks"
COMPILED = ROOT / "out" / "attacks-loops"  #: the auction's loops of all copies
_ROW = re.compile(r"^\| (?!attack|---)(.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)
#: What a test has to say of its failure; that of a group of tasks stands behind bars.
_WORDS = re.compile(r"(?:E  |[ |]+\| )\s*(?!ExceptionGroup)(.*(?:Error|Failed|assert|Exception).*)")
_FAILED, _PASSED = 1, 0


class Attack(Struct, frozen=True):
    """A row of the page."""

    attack: str
    stopped_by: str
    tried_by: str


class Edit(Struct, frozen=True, forbid_unknown_fields=True):
    """The text `old` of a file, which is there once, and what takes its place."""

    file: str
    old: str
    new: str


class Measure(Struct, frozen=True, forbid_unknown_fields=True):
    """What stops some attacks that one test tries; `edits` take it away. `without` says what is so then."""

    attacks: tuple[str, ...]
    without: str
    edits: tuple[Edit, ...]


def attacks() -> list[Attack]:
    """Return all rows of the page; "the same" is replaced by what stands above it."""
    rows: list[Attack] = []
    for attack, stopped_by, tried_by in _ROW.findall((DOCS / "security.md").read_text()):
        above = rows[-1] if rows else None
        test = above.tried_by if above and tried_by == "the same" else tried_by.strip("`")
        rows.append(Attack(attack, stopped_by, test))
    return rows


def measures() -> tuple[Measure, ...]:
    """Return what `measures.toml` has; raise ``msgspec.ValidationError`` with the field if it cannot be read."""

    class Document(Struct, forbid_unknown_fields=True):
        measures: tuple[Measure, ...]

    return msgspec.toml.decode(DATA.read_bytes(), type=Document).measures


@contextmanager
def taken_away(measure: Measure, root: Path) -> Iterator[None]:
    """Make the edits of a measure below `root`, and undo them."""
    before = {edit.file: (root / edit.file).read_text() for edit in measure.edits}
    try:
        for edit in measure.edits:
            text = (root / edit.file).read_text()
            assert text.count(edit.old) == 1, f"{edit.file} has {text.count(edit.old)} times: {edit.old}"
            (root / edit.file).write_text(text.replace(edit.old, edit.new))
        yield
    finally:
        for file, text in before.items():
            (root / file).write_text(text)


def _copy() -> None:
    """Copy what git knows, and what is new; what was made meanwhile stays behind."""
    shutil.rmtree(COPY, ignore_errors=True)
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (COPY / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, COPY / name)


def _tried(test: str) -> tuple[int | None, str]:
    """Run a test in the copy; return pytest's exit code and a line of what it said. None: it was skipped."""
    command = [sys.executable, "-B", "-m", "pytest", "-m", "full or not full", "-p", "no:cacheprovider", "--tb=short"]
    kept = os.environ | {"NUMBA_CACHE_DIR": str(COMPILED)}
    done = subprocess.run([*command, "-rs", test], cwd=COPY, env=kept, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode == _PASSED and not re.search(r"\b[1-9]\d* passed", done.stdout):
        return None, next((line for line in lines if line.startswith("SKIPPED")), "skipped")
    told = next((found[1] for found in map(_WORDS.match, lines) if found), lines[-1] if lines else done.stderr)
    return done.returncode, told


def main(words: Sequence[str]) -> int:
    """Try the attacks that contain one of the words, or all; return the exit code."""
    test_of = {row.attack: row.tried_by for row in attacks()}
    chosen = [each for each in measures() if not words or any(w in a for w in words for a in each.attacks)]
    _copy()
    wrong = 0
    with_all: dict[str, tuple[int | None, str]] = {}
    for number, measure in enumerate(chosen, 1):
        test = test_of[measure.attacks[0]]
        if test not in with_all:
            with_all[test] = _tried(test)
        code, told = with_all[test]
        if code == _PASSED:
            with taken_away(measure, COPY):
                code, told = _tried(test)
            right = code == _FAILED
            verdict = "fails, as it must" if right else f"DOES NOT FAIL (exit code {code})"
        else:
            right = code is None
            verdict = "not tried" if right else "FAILS WITH ALL MEASURES"
        wrong += not right
        print(f"{number}/{len(chosen)} {'; '.join(measure.attacks)}\n  without: {measure.without}", flush=True)
        print(f"  {test}: {verdict}: {told[:300]}", flush=True)
    shutil.rmtree(COPY, ignore_errors=True)  # a program that a test ended may still write there
    print(f"{len(chosen)} measures, {wrong} wrong")
    return int(wrong > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
