"""Fields of `Requirements`, given to tests' makers beside the other fields of what holds them."""

from __future__ import annotations

from typing import Any, TypeVar

from msgspec import Struct, structs

from app_agent.core.spec import nested
from protocol.messages import Requirements

StructT = TypeVar("StructT", bound=Struct)


def made(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields for a maker: those of `Requirements` as one value, the others as they are."""
    fields = nested(fields)
    return fields | {"requirements": Requirements(**fields["requirements"])}


def replace(value: StructT, /, **changes: Any) -> StructT:
    """Msgspec's `replace`, which also changes the fields of what holds requirements."""
    if not hasattr(value, "requirements"):
        return structs.replace(value, **changes)
    fields = nested(changes)
    wishes = fields.pop("requirements")
    held = changes.get("requirements", value.requirements)
    return structs.replace(value, **fields, requirements=structs.replace(held, **wishes))
