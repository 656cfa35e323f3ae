"""The names that docstrings and comments put in backticks exist: a module that was moved leaves no trace there."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import Struct

ROOT = Path(__file__).parents[2]
PRODUCT = ("protocol", "valuation", "arbiter", "node_agent", "app_agent", "simulator", "launch")
#: By room, the other rooms that its modules may import.
BELOW = {"launch": PRODUCT, "simulator": PRODUCT, "protocol": ()}
#: Names of other programs and libraries.
FOREIGN = {"VACUUM", "concurrent", "cupy", "message_id", "nvmlDeviceGpuRecoveryAction_t", "rsync", "torch"}

_QUOTED = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)`(?!`)")
_SEE = re.compile(r"\bsee `([A-Za-z_]\w*)`")


class Source(Struct, frozen=True):
    """What the code of one file says."""

    words: set[str]  #: of its path, its names and its short strings
    defined: set[str]  #: its functions and classes, the names of the module, and the parts of its path


def read(path: str, text: str) -> Source:
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    tree = ast.parse(text)
    words, defined = {*parts}, {*parts}
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                defined.add(name)
    nodes = [*ast.walk(tree)]
    texts = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # most are docstrings
    for node in nodes:
        if isinstance(node, DEFINITIONS):
            defined.add(node.name)
        if id(node) not in texts:
            words.update(value for value in vars(node).values() if isinstance(value, str) and len(value) < 60)
    words = {word for text in words for word in re.findall(r"\w+", text)}
    return Source(words, defined)


DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def prose_of(text: str) -> Iterator[str]:
    """Yield what a file says to people: its docstrings and comments."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, *DEFINITIONS)):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def unknown(text: str, source: Source, words: set[str], defined: set[str]) -> Iterator[str]:
    """Yield the names in backticks that are no `words` of any code, and those to see that are not `defined`."""
    for said in prose_of(text):
        for name in _QUOTED.findall(said):
            if not {*name.split(".")} <= words and name.partition(".")[0] not in FOREIGN:
                yield name
        yield from (name for name in _SEE.findall(said) if name not in defined | source.words)


def test_names_in_backticks_exist() -> None:
    paths = [path for folder in (*PRODUCT, "tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}
    sources = {name: read(name, text) for name, text in texts.items()}
    words = {word for source in sources.values() for word in source.words}
    for room in PRODUCT:
        seen = (room, *BELOW.get(room, PRODUCT[:2]))
        defined = {name for path, source in sources.items() if path.startswith(seen) for name in source.defined}
        of_room = {path: source for path, source in sources.items() if path.startswith(f"{room}/")}
        wrong = {path: [*unknown(texts[path], source, words, defined)] for path, source in of_room.items()}
        assert {path: names for path, names in wrong.items() if names} == {}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("# a comment names `gone`", ["gone"]),
        ('"""A module, `there.gone`; ``gone`` is a word."""', ["there.gone"]),
        ('"""A word, `there`, that is no module: see `there`."""', ["there"]),
        ("# a word, `there`, and see `kept`; `torch.cuda` is foreign", []),
        ("own = 1  # see `own`", []),
    ],
)
def test_a_name_that_nothing_has_is_found(text: str, wrong: list[str]) -> None:
    assert [*unknown(text, read("a/b.py", text), {"there", "kept", "own"}, {"kept"})] == wrong
