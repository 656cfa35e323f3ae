"""No function of the product is longer than a reader takes in at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support.pages import ROOT

PRODUCT = ("arbiter", "node_agent", "app_agent", "valuation", "protocol", "simulator", "launch")
#: Loops that are compiled: they may call little, and their text is part of what the cache of compiled loops goes by.
COMPILED = "arbiter/core/policies/themis/auction/kernel.py"
LINES_MAX = 45


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
