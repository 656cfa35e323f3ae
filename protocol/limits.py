"""The bounds that a site sets on wishes: `submit` and the arbiter check them by the same functions."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec.structs import replace

from protocol.messages import Requirements

#: Tenants that a sentence names.
TENANTS_SHOWN = 20


def unnamed_tenant(tenant: str, named: Collection[str]) -> str:
    """Return a sentence on a tenant that a site does not name among its own; empty if it does."""
    if tenant in named:
        return ""
    shown = sorted(named)[:TENANTS_SHOWN]
    there = ", ".join(shown) or "it names none"
    there += f" and {len(named) - TENANTS_SHOWN} more" if len(named) > TENANTS_SHOWN else ""
    return f"tenant {tenant} is not among the tenants of this site ({there})"


def excess(
    wished: Requirements, *, priority_max: float, weight_max: float, classes: Sequence[str]
) -> tuple[str, str] | None:
    """Return a sentence on the wish that exceeds a site's bounds, and the mend; None if the site allows all wishes."""
    for name, asked, most in (
        ("priority", wished.priority, priority_max),
        ("weight", wished.weight, weight_max),
    ):
        if asked > most:
            return (
                f"{name} is {asked:g}, and this site allows at most {most:g}",
                f"lower it, or have the administrator raise {name}_max in the arbiter's configuration",
            )
    if wished.kind not in classes:
        allowed = " or ".join(classes)
        return f"its class is {wished.kind}, and this site allows {allowed} only", f"submit it with --class {allowed}"
    return None


def bounded(wished: Requirements, *, priority_max: int, weight_max: float) -> Requirements:
    """Return a user's wishes, cut to the site's bounds: an app may ask for more after its admission."""
    within = (min(wished.priority, priority_max), min(wished.weight, weight_max))
    if within == (wished.priority, wished.weight):
        return wished
    return replace(wished, priority=within[0], weight=within[1])
