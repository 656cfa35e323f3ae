"""Where each verb lives; and a command that imports a verb's module when the verb is called, not before.

A verb that only asks is to answer at once, and most of its time went by in imports of the others. The name of a verb is
here, everything else beside its function: the list of `--help` is read from the source text of the docstrings.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

#: The verbs of each module of `launch.verbs`, in the order of `--help`.
MODULES: Mapping[str, Sequence[str]] = {
    "submission": ("submit", "run", "wait"),
    "sbatch": ("sbatch",),
    "terminals": ("attach", "ssh-proxy"),
    "acts": ("cancel", "hold", "release", "requeue"),
    "inspection": ("ps", "explain", "logs", "nodes", "shares", "rounds"),
    "events": ("events",),
    "report": ("report",),
    "top": ("top",),
    "web": ("web",),
    "cleaning": ("clean",),
    "administration": ("drain", "undrain"),
    "doctor": ("doctor",),
    "provisioning": ("provision",),
    "backups": ("backup", "restore", "journal"),
    "installation": ("init", "units", "install", "uninstall"),
    "auction": ("auction",),
    "simulation": ("simulate", "compare", "sweep"),
    "worlds": ("worlds",),
    "daemons": ("up", "arbiter", "node-agent", "app-agent", "gateway", "launcher"),
    "demo": ("demo",),
    "about": ("version",),
}
MODULE_OF = {verb: module for module, verbs in MODULES.items() for verb in verbs}


class Verbs(TyperGroup):
    """The group of all verbs."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """Return the names of all verbs."""
        return list(MODULE_OF)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """Return a verb's command: one that knows its help line only, unless the verb is imported."""
        if cmd_name in self.commands or cmd_name not in MODULE_OF:
            return self.commands.get(cmd_name)
        return TyperCommand(cmd_name, help=help_line(cmd_name))

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        """Return the verb that is called, imported, and its arguments."""
        if args[0] in MODULE_OF:
            self.load(MODULE_OF[args[0]])
            command = self.commands[args[0]]
            for each in (command, *getattr(command, "commands", {}).values()):
                for parameter in each.get_params(ctx):
                    _convert_when_needed(parameter)
        else:  # the error suggests a verb that is spelt alike
            self.load_all()
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Read the flags before the verb."""
        for parameter in self.get_params(ctx):
            _convert_when_needed(parameter)
        return super().parse_args(ctx, args)

    def load(self, module: str) -> None:
        """Import a module of `launch.verbs`, and take its verbs in."""
        app = typer.Typer(rich_markup_mode=None)
        import_module(f"launch.verbs.{module}").add(app)
        self.commands.update(get_group(app).commands)

    def load_all(self) -> Mapping[str, Any]:
        """Import all modules; return every verb's command by its name."""
        for module in MODULES:
            self.load(module)
        return self.commands


def help_line(verb: str) -> str:
    """Return the first line of a verb's docstring, without importing it."""
    return _help_lines(MODULE_OF[verb]).get(verb.replace("-", "_"), "")


@cache
def _help_lines(module: str) -> Mapping[str, str]:
    source = (Path(__file__).parent / "verbs" / f"{module}.py").read_text(encoding="utf-8")
    functions = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    return {each.name: (ast.get_docstring(each) or "").partition("\n")[0] for each in functions}


def _convert_when_needed(parameter: Any) -> None:
    """Have a parameter of the command line take a value as it is if that has the right type already.

    Typer imports pydantic for every other value, which takes longer than all the rest of a short command.
    """
    convert: Callable[[Any, Any], Any] = parameter.process_value
    kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    several = parameter.multiple or parameter.nargs == -1

    def process(ctx: Any, value: Any) -> Any:
        empty = value is None or (several and not value)
        if empty and parameter.required and ctx.resilient_parsing:  # a shell completes what is still to be written
            return value
        if kind is None or (empty and parameter.required):
            return convert(ctx, value)
        if empty:
            value = () if several else None
        elif kind == list[str] and all(type(each) is str for each in value):
            value = list(value)
        elif kind is int and type(value) is str and _whole(value, parameter.type_descriptor.parameter_info):
            value = int(value)
        elif kind is float and type(value) is str and _decimal(value, parameter.type_descriptor.parameter_info):
            value = float(value)
        elif kind is Path and type(value) is str and _unchecked(parameter.type_descriptor.parameter_info):
            value = Path(value)
        elif (
            not (kind is Path and isinstance(value, Path))
            and type(value) is not kind
            and not (get_origin(kind) is Literal and value in get_args(kind))
        ):
            return convert(ctx, value)
        return value if parameter.callback is None else parameter.callback(ctx, parameter, value)

    parameter.process_value = process


def _whole(text: str, bounds: Any) -> bool:
    """Return whether a text is a whole number within bounds."""
    if not (text.isascii() and text.removeprefix("-").isdigit()):
        return False
    return _is_between(int(text), bounds)


def _decimal(text: str, bounds: Any) -> bool:
    """Return whether a text is a plain decimal number within bounds."""
    whole, _, part = text.removeprefix("-").partition(".")
    plain = text.isascii() and (whole + part).isdigit()
    return plain and _is_between(float(text), bounds)


def _is_between(value: float, bounds: Any) -> bool:
    low, high = bounds.min, bounds.max
    return (low is None or value >= low) and (high is None or value <= high)


def _unchecked(wished: Any) -> bool:
    """Return whether a path may be any: nothing is to be looked up."""
    looked_up = (wished.exists, wished.writable, wished.resolve_path, wished.path_type, not wished.file_okay)
    return not any(looked_up) and wished.dir_okay and not wished.allow_dash
