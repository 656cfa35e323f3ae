"""The table of attacks in docs/security.md: each names a test that is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.pages import DOCS, ROOT

ROWS = re.findall(r"^\| (?!attack|---)(.+?) \| (.+?) \| (.+?) \|$", (DOCS / "security.md").read_text(), re.MULTILINE)
TEST = re.compile(r"`(tests/\w+/test_\w+\.py)::(test_\w+)`")


@cache
def names_in(file: str) -> frozenset[str]:
    """The names of the tests in a file."""
    found = ast.walk(ast.parse((ROOT / file).read_text()))
    return frozenset(each.name for each in found if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))


def test_the_page_lists_more_than_thirty_attacks_each_once() -> None:
    attacks = [attack for attack, _, _ in ROWS]
    assert len(attacks) >= 30
    assert len(set(attacks)) == len(attacks)


@pytest.mark.parametrize(("attack", "tried_by"), [(attack, tried_by) for attack, _, tried_by in ROWS])
def test_each_attack_names_a_test_that_is_there(attack: str, tried_by: str) -> None:
    if tried_by == "the same":
        tried_by = next(before for _, _, before in reversed(ROWS[: place(attack)]) if before != "the same")
    named = TEST.fullmatch(tried_by)
    assert named, f"{tried_by} is no test"
    file, test = named.groups()
    assert Path(ROOT, file).exists()
    assert test in names_in(file)


def place(attack: str) -> int:
    return next(number for number, row in enumerate(ROWS) if row[0] == attack)
