"""Values written by the version before this one, in today's form; read for one release.

There the wishes of a user stood one by one in an app's report, record and spec, and some of them in each of its jobs.
Today they are one value, `Requirements`. So an app agent of that version is understood, and snapshots and events that
it or an arbiter of that version left are read. Where an app's tasks ran was a mapping, which a snapshot sorted by its
keys; today they are pairs in the order of their age.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

KindT = TypeVar("KindT")

WISHES = ("spans", "grace_s", "preempt_by", "priority", "kind", "cpus", "host_bytes", "weight", "utility")
#: Names of classes that have changed.
_KINDS = {"trial": "interactive"}


def decode(packed: bytes, kind: type[KindT] | msgspec.msgpack.Decoder[KindT]) -> KindT:
    """Return the value in `packed`, which this version or the one before has written as MessagePack.

    Raises
    ------
    msgspec.ValidationError
        If it is in neither form.
    """
    decoder = kind if isinstance(kind, msgspec.msgpack.Decoder) else msgspec.msgpack.Decoder(kind)
    try:
        return decoder.decode(packed)
    except msgspec.ValidationError:
        return decoder.decode(msgspec.msgpack.encode(converted(msgspec.msgpack.decode(packed))))


def converted(raw: Any) -> Any:
    """Return a value, decoded without types, in today's form."""
    if isinstance(raw, list):
        return [converted(item) for item in raw]
    if not isinstance(raw, dict):
        return raw
    # The settings of policies have other names today; the arbiter is told all of them anew at each start.
    fields = {name: converted(value) for name, value in raw.items() if name != "policy_settings"}
    if isinstance(fields.get("classes"), list):
        fields["classes"] = [_KINDS.get(name, name) for name in fields["classes"]]
    if isinstance(fields.get("ran"), dict):
        fields["ran"] = sorted(fields["ran"].items(), key=lambda pair: _age(pair[0]))
    if not {"tenant", "gang"} <= fields.keys() or "requirements" in fields:
        return fields
    jobs = fields.get("jobs") or [{}]  # of one app they all had the same wishes
    found = (jobs[0] if isinstance(jobs, list) and isinstance(jobs[0], dict) else {}) | fields
    wishes = {name: found[name] for name in WISHES if name in found}
    if "kind" in wishes:
        wishes["kind"] = _KINDS.get(wishes["kind"], wishes["kind"])
    return {name: value for name, value in fields.items() if name not in wishes} | {"requirements": wishes}


def _age(task: str) -> tuple[str, int, int]:
    """Return by what tasks are sorted, those of a job by attempt and part: the ages of jobs are not known."""
    job, _, attempt = task.rpartition("-a")
    number, _, rank = attempt.partition(".")
    return job, int(number), int(rank or 0)
