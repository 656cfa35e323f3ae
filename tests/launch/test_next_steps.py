"""Every command and every flag that we tell users to type exists; and no next step leads back to where it came from."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import pytest
import typer.main
from typer.core import TyperGroup

from app_agent.daemon import TAG_LENGTH, TAG_LETTERS
from launch import cli
from launch.registry import Verbs

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("protocol", "valuation", "arbiter", "node_agent", "app_agent", "simulator", "launch")
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

#: What stands for a value in a sentence that is put together.
VALUE = "VALUE"
#: A command of ours begins like this; what follows these words is no verb.
COMMAND = re.compile(r"(?<![\w./@-])gpu-arbiter (?=[a-z])(?!(?:has|in|is|itself|needs|on|says|where)\b)")
#: And ends like this within a sentence.
END = re.compile(r"[`;,()#|\n]|\. |: |\.$| - ")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
#: Whose texts are told to users: those of errors and of `doctor`.
TELLING = {"usage", "Fault", "Check"}


class Verb(NamedTuple):
    """The flags of a command, and those of them that must be given, each by all its names."""

    flags: frozenset[str]
    required: tuple[frozenset[str], ...]


def verbs() -> dict[str, Verb]:
    """Every command by its words: ``up``, ``auction solve``."""
    found: dict[str, Verb] = {}
    whole = typer.main.get_command(cli.app)
    assert isinstance(whole, Verbs)
    whole.load_all()
    groups: list[tuple[str, TyperGroup]] = [("", whole)]
    for prefix, group in groups:
        for name, command in group.commands.items():
            if isinstance(command, TyperGroup):
                groups.append((f"{prefix}{name} ", command))
                continue
            flags = [frozenset((*each.opts, *each.secondary_opts)) for each in command.params]
            required = [opts for opts, each in zip(flags, command.params, strict=True) if each.required]
            mandatory = tuple(opts for opts in required if any(opt.startswith("-") for opt in opts))
            further = getattr(command, "of_slurm", ())
            found[prefix + name] = Verb(frozenset({"-h", "--help"}).union(*flags, further), mandatory)
    return found


VERBS = verbs()
FLAGS = frozenset().union(*(verb.flags for verb in VERBS.values()))


def texts(tree: ast.AST) -> Iterator[str]:
    """Every text in a piece of code, with VALUE for what is put in."""
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else VALUE for part in node.values)


def told(tree: ast.AST) -> Iterator[str]:
    """The texts of errors that are raised, and of what tells users of one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and getattr(node.func, "id", "") in TELLING):
            yield from texts(node)


def wrong_commands(text: str, *, whole: bool) -> Iterator[str]:
    """What in `text` is a command of ours that there is not; `whole`: one that can be typed as it stands."""
    for found in COMMAND.finditer(text):
        words = END.split(text[found.end() :], maxsplit=1)[0].split()
        name = next((each for each in (" ".join(words[:2]), words[0]) if each in VERBS), None)
        if name is None:
            yield f"gpu-arbiter has no {words[0]}"
            continue
        arguments = list(
            takewhile(
                lambda word: word not in ("--", "python") and not word.endswith(".sh"), words[len(name.split()) :]
            )
        )
        flags = {word.partition("=")[0] for word in arguments if re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word)}
        yield from (f"gpu-arbiter {name} has no {flag}" for flag in sorted(flags - VERBS[name].flags))
        lacking = [sorted(names)[0] for names in VERBS[name].required if not names & flags]
        yield from (f"gpu-arbiter {name} needs {flag}" for flag in lacking if whole)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_command_and_flag_that_the_program_tells_users_of_exists(package: str) -> None:
    wrong = []
    for path in sorted((ROOT / package).rglob("*.py")):
        tree = ast.parse(path.read_text())
        found = [mistake for text in texts(tree) for mistake in wrong_commands(text, whole=True)]
        found += [f"nothing has {flag}" for text in told(tree) for flag in FLAG.findall(text) if flag not in FLAGS]
        wrong += [f"{path.relative_to(ROOT)}: {mistake}" for mistake in found]
    assert wrong == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_in_a_document_exists(document: Path) -> None:
    lines = document.read_text().splitlines()
    assert [mistake for line in lines for mistake in wrong_commands(line, whole=False)] == []


@pytest.mark.parametrize(
    "document", [*DOCUMENTS, ROOT / "launch" / "site" / "systemd" / "app.toml"], ids=lambda path: path.name
)
def test_ids_of_apps_in_a_document_look_like_those_that_are_given(document: Path) -> None:
    """The owner, the letters of a journal, a number."""
    found = re.findall(r"\b(?:me|alice|ana|ada|bob)-[a-z]*[0-9]+", document.read_text())
    assert [app for app in found if not re.fullmatch(rf"[a-z]+-[{TAG_LETTERS}]{{{TAG_LENGTH}}}[0-9]+", app)] == []


def test_a_command_that_there_is_not_would_be_found() -> None:
    told = "do `gpu-arbiter dance`, gpu-arbiter ps --every; gpu-arbiter arbiter, or gpu-arbiter up --nodes 2 --socket X"
    assert list(wrong_commands(told, whole=True)) == [
        "gpu-arbiter has no dance",
        "gpu-arbiter ps has no --every",
        "gpu-arbiter arbiter needs --config",
        "gpu-arbiter up has no --socket",
    ]
