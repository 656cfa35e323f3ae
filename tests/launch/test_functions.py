"""No function of the product is longer than a reader takes in at once, and none is named by a lone adverb."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support.pages import ROOT

PRODUCT = ("arbiter", "node_agent", "app_agent", "valuation", "protocol", "simulator", "launch")
#: Loops that are compiled: they may call little, and their text is part of what the cache of compiled loops goes by.
COMPILED = "arbiter/core/policies/themis/auction/kernel.py"
LINES_MAX = 45
#: Adverbs and prepositions, which alone name nothing. `of` makes a value of another, `at` is a figure at a time, and an
#: app that is `over` is over `since` then.
LONE = """
above after again ahead alone always anew apart as aside away back before below beside beyond by elsewhere for from here
in later on once soon still then there to together towards under until with within without yet
"""


def lengths(text: str) -> Iterator[tuple[str, int]]:
    """The functions of a module, each with the lines from its first statement after the docstring to its end."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0].end_lineno if ast.get_docstring(node) is not None else node.body[0].lineno - 1
            yield node.name, (node.end_lineno or 0) - (first or 0)


@pytest.mark.parametrize("room", PRODUCT)
def test_no_function_is_long(room: str) -> None:
    files = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / room).rglob("*.py"))]
    found = {
        f"{file}, {name}": lines
        for file in files
        if file != COMPILED
        for name, lines in lengths((ROOT / file).read_text(encoding="utf-8"))
        if lines > LINES_MAX
    }
    assert files
    assert found == {}, f"split these by meaning, into functions of at most {LINES_MAX} lines"


def test_signature_and_docstring_do_not_count() -> None:
    one = 'def one(\n    a: int,\n) -> int:\n    """Say it.\n\n    At length.\n    """\n'
    text = f"{one}    b = a\n    return (\n        b\n    )\n"
    assert list(lengths(text)) == [("one", 4)]
    assert list(lengths("async def two() -> None:\n    pass\n")) == [("two", 1)]
    assert list(lengths('def three() -> None:\n    """Do nothing."""\n')) == [("three", 0)]


@pytest.mark.parametrize("room", PRODUCT)
def test_no_function_or_class_is_named_by_an_adverb_or_a_preposition_alone(room: str) -> None:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    found = [
        f"{path.relative_to(ROOT)}, {node.name}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, kinds) and node.name.strip("_") in LONE.split()
    ]
    assert found == [], "name these by a subject or a noun"
