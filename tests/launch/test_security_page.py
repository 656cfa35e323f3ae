"""The table of attacks in docs/security.md: each names a test that is there, and has a measure to be taken away."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.support.attacks import Attack, Measure, attacks, measures, taken_away
from tests.support.pages import ROOT

ROWS = attacks()
MEASURES = measures()
TEST = re.compile(r"(tests/\w+/test_\w+\.py)::(test_\w+)")


@cache
def names_in(file: str) -> frozenset[str]:
    """The names of the tests in a file."""
    found = ast.walk(ast.parse((ROOT / file).read_text()))
    return frozenset(each.name for each in found if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))


def test_the_page_lists_more_than_thirty_attacks_each_once() -> None:
    assert len(ROWS) >= 30
    assert len({row.attack for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.attack)
def test_each_attack_names_a_test_that_is_there(row: Attack) -> None:
    named = TEST.fullmatch(row.tried_by)
    assert named, f"{row.tried_by} is no test"
    file, test = named.groups()
    assert Path(ROOT, file).exists()
    assert test in names_in(file)


def test_each_attack_has_a_measure_that_can_be_taken_away() -> None:
    named = Counter(attack for measure in MEASURES for attack in measure.attacks)
    assert set(named) == {row.attack for row in ROWS}


@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.attacks[0])
def test_the_edits_of_a_measure_still_fit_the_code_and_are_undone(measure: Measure, tmp_path: Path) -> None:
    tests = {row.tried_by for row in ROWS if row.attack in measure.attacks}
    assert len(tests) == 1, f"attacks of one measure are tried by one test, not {tests}"
    files = {edit.file: (ROOT / edit.file).read_text() for edit in measure.edits}
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    with taken_away(measure, tmp_path):
        assert all((tmp_path / file).read_text() != text for file, text in files.items())
        assert all(compiles(tmp_path / file) for file in files if file.endswith(".py"))
    assert all((tmp_path / file).read_text() == text for file, text in files.items())


def compiles(path: Path) -> bool:
    ast.parse(path.read_text())
    return True
