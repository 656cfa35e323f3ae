"""How every daemon's TOML file becomes one frozen value, and what a user reads when it does not."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

ConfigT = TypeVar("ConfigT", bound=Struct)
#: Checks what types cannot say; raises `ConfigError` naming the source it is given.
Check = Callable[[ConfigT, str], None]

_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


class ConfigError(Exception):
    """The configuration cannot be used; the message names file, field and mend."""


def load(path: Path, kind: type[ConfigT], check: Check[ConfigT]) -> ConfigT:
    """Return the configuration in the TOML file at `path`.

    Raises
    ------
    ConfigError
        With the file, the field and the mend.
    """
    try:
        fields = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; give the file with --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    return parse(fields, kind, check, source=str(path))


def parse(fields: Mapping[str, Any], kind: type[ConfigT], check: Check[ConfigT], *, source: str) -> ConfigT:
    """Return the configuration made of these fields.

    Raises
    ------
    ConfigError
        With `source`, the field and the mend.
    """
    try:
        config = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}; see docs/operations.md for every field") from error
    check(config, source)
    return config


def require_positive(config: Struct, names: Iterable[str], source: str) -> None:
    """Refuse numbers that are not above 0.

    Raises
    ------
    ConfigError
        With `source` and the first such field.
    """
    for name in names:
        if getattr(config, name) <= 0:
            raise ConfigError(f"{source}: {name} is {getattr(config, name)}; it must be above 0")


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
