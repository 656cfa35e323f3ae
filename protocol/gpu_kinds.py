"""Which GPUs an app can use, by the type and the memory that its user asked for.

A type is compared with the name that the driver gives a GPU, word by word: "A100" is a word of
"NVIDIA A100-SXM4-80GB", and neither "A10" nor "SXM" is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from protocol.messages import Requirements

_WORD = re.compile(r"[a-z0-9]+")
#: A card counts by the size that it is sold as: of that the driver reports up to a twelfth less, since firmware and
#: error correction keep the rest (81,559 MiB of an H100 of 80 GB, 15,109 MiB of a T4 of 16 GB).
REPORTED_PART = 11 / 12
GIB = 2**30


def is_of(model: str, gpu_type: str) -> bool:
    """Whether each word of a type is in a driver's name for a GPU, as one word or as several without their spaces.

    Capitals, and what stands between words, make no difference.
    """
    words = _WORD.findall(model.lower())
    whole = {"".join(words[first:last]) for first in range(len(words)) for last in range(first + 1, len(words) + 1)}
    return whole.issuperset(_WORD.findall(gpu_type.lower()))


def wishes_kind(wished: Requirements) -> bool:
    """Whether a user asked for GPUs of some kind only."""
    return bool(wished.gpu_types or wished.min_memory_bytes)


def suits(wished: Requirements, model: str, memory_bytes: int) -> bool:
    """Whether a GPU is of the kind that a user asked for; one of unknown name or memory is of no kind."""
    if wished.gpu_types and not any(is_of(model, gpu_type) for gpu_type in wished.gpu_types):
        return False
    return memory_bytes >= REPORTED_PART * wished.min_memory_bytes


def in_words(wished: Requirements) -> str:
    """Return the kind that a user asked for: ``H100 or H200 with at least 80 GiB``; empty if any GPU will do."""
    return counted(wished, 2).removeprefix("2 ") if wishes_kind(wished) else ""


def counted(wished: Requirements, count: int) -> str:
    """Return so many GPUs of the kind that a user asked for: ``2 H200``, or ``2 GPUs with at least 80 GiB``."""
    noun = " or ".join(wished.gpu_types) or ("GPU" if count == 1 else "GPUs")
    memory = f" with at least {wished.min_memory_bytes / GIB:.4g} GiB" if wished.min_memory_bytes else ""
    return f"{count} {noun}{memory}"


def kinds_in_words(gpus: Iterable[tuple[str, int]]) -> str:
    """Return the kinds of GPUs, each by the driver's name and its bytes of memory: ``NVIDIA H200 (140.4 GiB)``."""
    named = {f"{model or 'GPUs without a name'} ({memory / GIB:.4g} GiB)" for model, memory in gpus}
    return ", ".join(sorted(named))


class Fit(NamedTuple):
    """The most GPUs of a kind that a job can have, known and in service, and the kinds that there are, in words.

    That is the most that one node has, or all together for a job that may lie on several.
    """

    known: int
    in_service: int
    kinds: str


def fit_of(wished: Requirements, capacity: Mapping[str, Any]) -> Fit | None:
    """Return what a document ``capacity/v1`` says of GPUs of the kind that a user asked for.

    None if the user asked for no kind, no GPU is known, or an arbiter of an older version has not told the kinds.
    """
    nodes = capacity.get("kinds")
    if not nodes or not wishes_kind(wished):
        return None
    kinds = [gpu for node in nodes for gpu in node["gpus"]]
    most = []
    for word in ("known", "in_service"):
        each = [
            sum(gpu[word] for gpu in node["gpus"] if suits(wished, gpu["model"], gpu["memory_bytes"])) for node in nodes
        ]
        together = sum(node["nodes"] * count for node, count in zip(nodes, each, strict=True))
        most.append(together if wished.spans else max(each))
    words = kinds_in_words((gpu["model"], gpu["memory_bytes"]) for gpu in kinds)
    return Fit(most[0], most[1], words)


def misfit(wished: Requirements, gang: int, fit: Fit) -> tuple[str, str] | None:
    """Return why a job can never have so many GPUs of the kind that a user asked for, as far as known, and the mend."""
    if gang <= fit.known:
        return None
    needs = f"each job needs {counted(wished, gang)}"
    if fit.known:
        has = "all nodes together have" if wished.spans else "the largest node has"
        sentence = f"{needs}{'' if wished.spans else ' on one node'}, and {has} {fit.known} of that kind"
        mend = f"ask for at most {fit.known} with --gpus, or for another kind"
    else:
        sentence, mend = f"{needs}, and no node has one", "ask for another kind"
    return f"{sentence}; the GPUs here are {fit.kinds}", mend
