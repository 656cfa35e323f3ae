"""How every daemon's TOML file becomes one frozen value, and the sentence a user reads when it does not."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Struct

ConfigT = TypeVar("ConfigT", bound=Struct)
#: Checks beyond the types; raises `ConfigError` naming the source it is given.
Check = Callable[[ConfigT, str], None]

_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
#: Sentences of msgspec about mistakes, and ours; its sentences about other mistakes stay as they are.
_PLACE = re.compile(r"(?P<mistake>.*?)(?: - at `\$\.?(?P<field>.*)`)?", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`")
_MISSING = re.compile(r"Object missing required field `(.*)`")
_CHOICE = re.compile(r"Invalid enum value (.*)")
_LENGTH = re.compile(r"Expected `(array|str)` of length >= (\d+)")
_BOUND = re.compile(r"Expected `(?:int|float)` (>=|<=|>|<) (\S+)")
_TYPE = re.compile(r"Expected `(.*?)`(?:, got `(.*)`)?")
_NAME = re.compile(r"Expected `str` matching regex '\^\[a-z0-9\]\[a-z0-9-\].*'")
_BOUNDS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
}
#: Where a person finds the names of all fields.
SHOWN = "the files of `gpu-arbiter init` show every field"
#: The same for values themselves; a bool is an int, too, so it comes first.
_VALUES: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, _TYPES["bool"]),
    (int, _TYPES["int"]),
    (float, _TYPES["float"]),
    (str, _TYPES["str"]),
    ((list, tuple), _TYPES["array"]),
    (dict, _TYPES["object"]),
)


class ConfigError(Exception):
    """The configuration cannot be used; the message names file, field and mend."""


def load(path: Path, kind: type[ConfigT], check: Check[ConfigT], *, shown: str = SHOWN) -> ConfigT:
    """Return the configuration in the TOML file at `path`. `shown` says which file has the names of all fields.

    Raises
    ------
    ConfigError
        With the file, the field and the mend.
    """
    return parse(read(path), kind, check, source=str(path), shown=shown)


def read(path: Path) -> dict[str, Any]:
    """Return the fields of the TOML file at `path`.

    Raises
    ------
    ConfigError
        With the file and the mend.
    """
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give the file with --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        mend = "mend that line: write NAME = VALUE, with text in quotation marks"
        raise ConfigError(f"{path} is not TOML: {error}; {mend}") from error


def parse(
    fields: Mapping[str, Any], kind: type[ConfigT], check: Check[ConfigT], *, source: str, shown: str = SHOWN
) -> ConfigT:
    """Return the configuration made of these fields.

    Raises
    ------
    ConfigError
        With `source`, the field and the mend.
    """
    try:
        config = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {in_words(error, kind)}; {shown}") from error
    check(config, source)
    return config


def shipped(name: str) -> str:
    """Return where the names of all fields are, for a file that `init` does not write."""
    return f"the shipped {name}, beside the units that `gpu-arbiter units` names, shows every field"


def in_words(error: msgspec.ValidationError, kind: type[Struct] | None = None) -> str:
    """Return the mistake as a user reads it, the field first: ``start_s must be at least 0``.

    With the `kind` that was to be made, choices are listed.
    """
    place = _PLACE.fullmatch(str(error))
    assert place is not None, "everything matches"
    mistake, field = place["mistake"], place["field"] or ""
    if found := _UNKNOWN.fullmatch(mistake):
        return f"unknown field `{_inside(field, found[1])}`; leave it out or mend its name"
    if found := _MISSING.fullmatch(mistake):
        return f"missing required field `{_inside(field, found[1])}`; add it"
    subject = field or "the whole"
    if found := _CHOICE.fullmatch(mistake):
        choices = _choices(kind, field) if kind is not None else ()
        mend = f"none of {', '.join(map(repr, choices))}" if choices else "none of its choices"
        return f"{subject} is {found[1]}, which is {mend}"
    if found := _LENGTH.fullmatch(mistake):
        return f"{subject} is too short; give {found[2]} {'entry' if found[1] == 'array' else 'character'} or more"
    if found := _BOUND.fullmatch(mistake):
        return f"{subject} must be {_BOUNDS[found[1]]} {found[2].removesuffix('.0')}"
    if _NAME.fullmatch(mistake):
        return f"{subject} cannot be that; use lower-case letters, digits and dashes, such as team-a"
    if found := _TYPE.fullmatch(mistake):
        but = f", and is {_kind(found[2])}" if found[2] else ""
        return f"{subject} must be {_kind(found[1])}{but}"
    return f"{field}: {mistake}" if field else mistake


def _choices(kind: Any, field: str) -> tuple[Any, ...]:
    """Return the choices of a field, such as ``arbiter.tenants[...].name``, if they are few; else none."""
    found = kind
    for name in re.sub(r"\[.*?\]", "", field).split("."):
        kinds = [each for each in (found, *get_args(found)) if isinstance(each, type) and issubclass(each, Struct)]
        found = get_type_hints(kinds[0]).get(name) if kinds else None
    literals = [each for each in (found, *get_args(found)) if get_origin(each) is Literal]
    return get_args(literals[0]) if literals else ()


def kind_of(value: object) -> str:
    """Return the kind of a value of a TOML file, in the words of `in_words`: ``a whole number`` for 5."""
    return next((words for kind, words in _VALUES if isinstance(value, kind)), "a date or a time")


def _inside(field: str, name: str) -> str:
    return f"{field}.{name}" if field else name


def _kind(types: str) -> str:
    """Return ``a whole number or nothing`` for ``int | null``."""
    return " or ".join(_TYPES.get(name, name) for name in types.split(" | "))


def owner_of(file: Path) -> str:
    """Return the systemd unit that alone can read `file`, a credential of it; empty for any other file."""
    above, _, below = str(file).partition("/run/credentials/")
    return below.partition("/")[0] if not above else ""


def require_positive(config: Struct, names: Iterable[str], source: str) -> None:
    """Refuse numbers that are not above 0, or not finite.

    Raises
    ------
    ConfigError
        With `source` and the first such field.
    """
    for name in names:
        value = getattr(config, name)
        if not 0 < value < math.inf:
            mend = "above 0" if value <= 0 else "a finite number above 0"
            raise ConfigError(f"{source}: {name} is {value}; it must be {mend}")


def require_not_negative(config: Struct, names: Iterable[str], source: str) -> None:
    """Refuse numbers below 0, or not finite.

    Raises
    ------
    ConfigError
        With `source` and the first such field.
    """
    for name in names:
        value = getattr(config, name)
        if not 0 <= value < math.inf:
            mend = "0 or more" if value < 0 else "a finite number, 0 or more"
            raise ConfigError(f"{source}: {name} is {value}; it must be {mend}")


def require_id(value: str, name: str, example: str, source: str) -> None:
    """Refuse a name that cannot be part of a broker user.

    Raises
    ------
    ConfigError
        With `source`, the field `name` and an example.
    """
    if not _ID.fullmatch(value):
        raise ConfigError(
            f"{source}: {name} is {value!r}; use lower-case letters, digits and dashes, such as {example}"
        )
