"""Processes that train: the child's side, ``python -m benchmarks.gpu.trainee cuda``.

Reads requests, one JSON line each, ``{"call": "module:function", "with": {...}}``, and answers each with one.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import dataclass
from typing import Any


@dataclass
class Child:
    """What lives from one request to the next."""

    device: str
    training: Any = None
    parked: Any = None
    graph: Any = None


def answer(child: Child, request: dict[str, Any]) -> dict[str, Any]:
    """Do what is asked; whatever goes wrong becomes an answer."""
    module, _, function = request["call"].partition(":")
    try:
        found: dict[str, Any] = getattr(importlib.import_module(module), function)(child, **request["with"])
    except Exception as error:  # noqa: BLE001 - told to the parent, who asked
        return {"failed": f"{type(error).__name__}: {error}"}
    return found


def main(device: str) -> int:
    """Serve until standard input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between the lines
    print(json.dumps({}), file=out, flush=True)
    child = Child(device)
    for line in sys.stdin:
        print(json.dumps(answer(child, json.loads(line))), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
