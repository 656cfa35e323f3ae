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
    """What one file says: in its code, and to people."""

    words: set[str]  #: of its path, its names and its short strings
    defined: set[str]  #: its functions and classes, the names of the module, and the parts of its path
    prose: list[str]  #: its docstrings and comments


def read(path: str, text: str) -> Source:
    parts = path.removesuffix(".py").removesuffix("/__init__").split("/")
    tree = ast.parse(text)
    words, defined, prose = {*parts}, {*parts}, []
    for statement in tree.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                defined.add(name)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # most are docstrings
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, str) and len(value) < 60 and id(node) not in texts:
                words.update(re.findall(r"\w+", value))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            prose.append(ast.get_docstring(node) or "")
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            defined.add(node.name)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    prose += [token.string for token in tokens if token.type == tokenize.COMMENT]
    return Source(words, defined, prose)


def unknown(source: Source, words: set[str], defined: set[str]) -> Iterator[str]:
    """Yield the names in backticks that are no `words` of any code, and those to see that are not `defined`."""
    for text in source.prose:
        for name in _QUOTED.findall(text):
            if not {*name.split(".")} <= words and name.partition(".")[0] not in FOREIGN:
                yield name
        yield from (name for name in _SEE.findall(text) if name not in defined | source.words)


def test_names_in_backticks_exist() -> None:
    sources: dict[str, Source] = {}
    for folder in (*PRODUCT, "tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            sources[name] = read(name, path.read_text())
    words = {word for source in sources.values() for word in source.words}
    for room in PRODUCT:
        seen = (room, *BELOW.get(room, PRODUCT[:2]))
        defined = {name for path, source in sources.items() if path.startswith(seen) for name in source.defined}
        of_room = {path: source for path, source in sources.items() if path.startswith(f"{room}/")}
        assert {path: wrong for path, source in of_room.items() if (wrong := [*unknown(source, words, defined)])} == {}


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
    assert [*unknown(read("a/b.py", text), {"there", "kept", "own"}, {"kept"})] == wrong
