"""Auctions read from files: what is refused and by which field's name, what is accepted, and nothing in between."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arbiter.core.policies.themis.auction import instance as auctions
from arbiter.core.policies.themis.auction.instance import Instance, InstanceError, Result, parse, solve
from tests.support.effort import examples

EXAMPLE = (Path(__file__).resolve().parents[2] / "examples" / "auction.json").read_bytes()
INFINITE, NOT_A_NUMBER = math.inf, math.nan
ABSENT = object()


def example() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(EXAMPLE)
    return document


def changed(*changes: tuple[str, Any]) -> bytes:
    """Return the example with these paths (`apps.0.t_id`) set to values, or taken out when `ABSENT`."""
    document = example()
    for path, value in changes:
        *way, last = [int(step) if step.isdigit() else step for step in path.split(".")]
        inner: Any = document
        for step in way:
            inner = inner[step]
        if value is ABSENT:
            del inner[last]
        else:
            inner[last] = value
    return json.dumps(document).encode()


def refusal(data: bytes) -> str:
    with pytest.raises(InstanceError) as caught:
        parse(data)
    return str(caught.value)


# --- refused --------------------------------------------------------------------------------------------------------


class Broken(NamedTuple):
    path: str
    value: Any
    named: str  #: what the sentence begins with


BROKEN = [
    Broken("schema", ABSENT, "schema is missing"),
    Broken("schema", "themis-auction-2", "schema "),
    Broken("schema", 1, "schema is a whole number"),
    Broken("lease", ABSENT, "lease is missing"),
    Broken("lease", -1, "lease "),
    Broken("lease", NOT_A_NUMBER, "lease "),
    Broken("lease", "600", "lease is text"),
    Broken("leese", 600, "leese: there is no such field"),
    Broken("machines", ABSENT, "machines is missing"),
    Broken("machines", {}, "machines is an object"),
    Broken("machines.1", "rome", "machines[1] is text"),
    Broken("machines.1.id", ABSENT, "machines[1].id is missing"),
    Broken("machines.1.id", "", "machines[1].id "),
    Broken("machines.1.id", "m" * 257, "machines[1].id "),
    Broken("machines.1.id", 7, "machines[1].id is a whole number"),
    Broken("machines.1.id", "a\x1b[2J", "machines[1].id: 'a\\x1b[2J' has characters"),
    Broken("machines.1.id", "\ud800", "machines[1].id: '\\ud800' has characters"),
    Broken("machines.1.id", "rome-1", "machines[1].id: rome-1 is there twice"),
    Broken("machines.2.rack", None, "machines[2].rack is null"),
    Broken("machines.2.rack", "a\n", "machines[2].rack: 'a\\n' has characters"),
    Broken("machines.0.gpus", 0, "machines[0].gpus "),
    Broken("machines.0.gpus", 4.5, "machines[0].gpus is a number with a fraction"),
    Broken("machines.0.gpus", True, "machines[0].gpus is true or false"),
    Broken("machines.0.gpus", 10**400, "machines[0].gpus "),
    Broken("machines.0.gpus", 200_000, "machines: they have more than 200000 GPUs"),
    Broken("machines.0.free", -1, "machines[0].free "),
    Broken("machines.0.free", 9, "machines[0].free: 9 of 8 GPUs"),
    Broken("machines.0.fre", 1, "machines[0].fre: there is no such field"),
    Broken("apps", ABSENT, "apps is missing"),
    Broken("apps", None, "apps is null"),
    Broken("apps.4", [], "apps[4] is a list"),
    Broken("apps.4.id", ABSENT, "apps[4].id is missing"),
    Broken("apps.4.id", "ada-1", "apps[4].id: ada-1 is there twice"),
    Broken("apps.4.id", "\u202eeve", "apps[4].id: "),
    Broken("apps.3.elapsed", -0.5, "apps[3].elapsed "),
    Broken("apps.3.elapsed", INFINITE, "apps[3].elapsed "),
    Broken("apps.3.elapsed", 1e300, "apps[3].elapsed "),
    Broken("apps.3.work_left", NOT_A_NUMBER, "apps[3].work_left "),
    Broken("apps.3.work_left", "2000", "apps[3].work_left is text"),
    Broken("apps.3.t_id", ABSENT, "apps[3].t_id is missing"),
    Broken("apps.3.t_id", 0, "apps[3].t_id "),
    Broken("apps.3.t_id", NOT_A_NUMBER, "apps[3].t_id "),
    Broken("apps.3.t_id", -INFINITE, "apps[3].t_id "),
    Broken("apps.3.t_id", 10**400, "apps[3].t_id "),
    Broken("apps.3.t_id", 1e-310, "apps[3].t_id "),  # 1 / V would be infinite
    Broken("apps.3.demand_max", 0, "apps[3].demand_max "),
    Broken("apps.3.demand_max", 1e3, "apps[3].demand_max is a number with a fraction"),
    Broken("apps.3.gang", 0, "apps[3].gang "),
    Broken("apps.3.gang", 2**64, "apps[3].gang "),
    Broken("apps.3.slowdown", 1.0, "apps[3].slowdown is a number"),
    Broken("apps.3.slowdown.rack", ABSENT, "apps[3].slowdown.rack is missing"),
    Broken("apps.3.slowdown.rack", "1", "apps[3].slowdown.rack is text"),
    Broken("apps.3.slowdown.rack", 0.9, "apps[3].slowdown.rack: it is less than `machine`"),
    Broken("apps.3.slowdown.cross", 0.9, "apps[3].slowdown.cross: it is less than `rack`"),
    Broken("apps.3.slowdown.machine", 0, "apps[3].slowdown.machine "),
    Broken("apps.3.slowdown.slot", 1.0, "apps[3].slowdown.slot: there is no such field"),
    Broken("apps.3.held", [], "apps[3].held is a list"),
    Broken("apps.3.held.oslo-1", -1, "apps[3].held "),
    Broken("apps.3.held.oslo-1", 1.5, "apps[3].held is a number with a fraction"),
    Broken("apps.3.held.paris", 1, "apps[3].held: there is no machine paris"),
    Broken("apps.3.held.", 1, "apps[3].held "),
    Broken("apps.3.held.oslo-1", 2, "apps[3].held: oslo-1 has 4 GPUs"),
    Broken("apps.3.demand", 2, "apps[3].demand: there is no such field"),
    Broken("apps.3.x\x1b\ud800", 2, "the file cannot be read as JSON"),
    Broken("apps.3.x\x1b", 2, "apps[3].'x\\x1b': there is no such field"),
    Broken("apps.3." + "x" * 1000, 2, "apps[3]." + "x" * 57 + "...: there is no such field"),
    Broken("apps.3.a - at `$", 2, "apps[3].a - at `$: there is no such field"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value", "named"), BROKEN, ids=[f"{b.path[:40]!a} {str(b.value)[:12]!a}" for b in BROKEN]
)
def test_a_broken_field_is_named_first_and_the_mend_last(path: str, value: Any, named: str) -> None:
    sentence = refusal(changed((path, value)))
    assert sentence.startswith(named)
    assert ";" in sentence.removeprefix(named)
    assert len(sentence) < 300
    assert sentence.isprintable()


def test_every_field_is_told_what_it_should_be() -> None:
    holders = {"": example(), "machines[]": example()["machines"][0], "apps[]": example()["apps"][0]}
    holders["apps[].slowdown"] = holders["apps[]"]["slowdown"]
    fields = {f"{shape}.{name}".removeprefix(".") for shape, holder in holders.items() for name in holder}
    assert fields | {"", "machines[]", "apps[]"} == set(auctions._SHOULD_BE)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (b"null", "the file is null"),
        (b"[]", "the file is a list"),
        (b"3", "the file is a whole number"),
        (b"{}", "schema is missing"),
        (b"lease = 600", "the file cannot be read as JSON"),
        (EXAMPLE[:-3], "the file cannot be read as JSON"),
        (EXAMPLE + b"x", "the file cannot be read as JSON"),
        (b"\xff\xfe\xfd", "the file cannot be read as JSON"),
        (b"\x89PNG\r\n\x1a\n", "the file cannot be read as JSON"),
        (b"[" * 100_000, "the file cannot be read as JSON"),
        (b"9" * 10_000, "the file cannot be read as JSON"),
        (EXAMPLE.replace(b'"lease"', b'"lease": 1, "lease"'), "lease: the name is there twice in one object"),
        (EXAMPLE.replace(b'"oslo-1": 1', b'"oslo-1": 1, "oslo-1": 1'), "oslo-1: the name is there twice"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_is_no_auction_is_refused_in_a_sentence(data: bytes, sentence: str) -> None:
    assert refusal(data).startswith(sentence)


def test_gpus_held_by_several_apps_count_together() -> None:
    held = ("apps.1.held", {"rome-1": 1}), ("apps.4.held", {"rome-1": 2})
    assert refusal(changed(*held)).startswith("apps[4].held: rome-1 has 8 GPUs")  # 4 free, 2 + 1 + 2 held


def machine(index: int, **fields: Any) -> dict[str, Any]:
    return {"id": f"m{index}", "rack": "r", "gpus": 1, "free": 1} | fields


def app(index: int, **fields: Any) -> dict[str, Any]:
    return {**example()["apps"][1], "id": f"a{index}", "held": {}} | fields


@pytest.mark.parametrize(
    ("machines", "apps", "named"),
    [
        ([machine(0, gpus=100_000), machine(1, gpus=100_001)], [], "machines: they have more than 200000 GPUs"),
        ([machine(0)], [app(i) for i in range(10_001)], "apps: 10001 with 1 machines are too many"),
        ([machine(0, gpus=50_000, free=50_000)], [app(i, gang=1, demand_max=10**9) for i in range(81)], "apps: togeth"),
    ],
    ids=["GPUs", "pairs", "rows"],
)
def test_what_would_exhaust_memory_is_refused(machines: list[Any], apps: list[Any], named: str) -> None:
    assert refusal(changed(("machines", machines), ("apps", apps))).startswith(named)


def test_a_file_too_large_is_refused() -> None:
    assert refusal(b" " * (auctions.BYTES_MAX + 1)).startswith("the file has more than 32 MiB")


@pytest.mark.parametrize(
    "changes",
    [
        (("apps.1.work_left", 0), ("apps.1.elapsed", 0)),
        (("apps.1.work_left", 5e-324), ("apps.1.elapsed", 0)),  # would vanish when divided by the GPUs
        (("apps.1.work_left", 1e-99), ("apps.1.slowdown", {"machine": 5e-324, "rack": 1, "cross": 1})),
    ],
)
def test_an_infinite_value_is_refused(changes: tuple[tuple[str, Any], ...]) -> None:
    assert refusal(changed(("apps.1.elapsed", 0), *changes)).startswith("apps[1].work_left: without time elapsed")


# --- accepted -------------------------------------------------------------------------------------------------------


def outcome(data: bytes) -> Result:
    """Return the result of a file that must be accepted, checked for what every result promises."""
    auction = parse(data)
    result = solve(auction)
    check(auction, result)
    return result


def check(auction: Instance, result: Result) -> None:
    figures = [result.sum_log_v, result.upper_bound, result.gap, *result.log_v.values(), *result.without.values()]
    assert all(map(math.isfinite, figures))
    assert all(0.0 < c <= 1.0 for c in result.c.values())
    names = {app.id for app in auction.apps}
    assert {*result.allocation} == {*result.log_v} == {*result.c} == {*result.without} == {*result.grants} == names
    for host in auction.machines:
        won = sum(by_machine.get(host.id, 0) for by_machine in result.allocation.values())
        kept = sum(by_machine.get(host.id, 0) for by_machine in result.grants.values())
        assert kept <= won <= host.free
        assert kept + result.leftover.get(host.id, 0) == host.free


@pytest.mark.parametrize(
    "changes",
    [
        (("apps", []),),
        (("machines", []), ("apps.0.held", {}), ("apps.3.held", {})),
        (("machines", []), ("apps", [])),
        tuple((f"machines.{index}.free", 0) for index in range(4)),
        (("lease", 0),),
        (("lease", 1e15),),
        (("lease", 0), ("apps.1.elapsed", 0)),
        (("apps.3.work_left", 0),),
        (("lease", 0), ("apps.3.work_left", 0)),
        (("apps.0.gang", 9),),
        (("apps.0.demand_max", 1),),
        (("apps.0.demand_max", 1), ("apps.0.gang", 2)),
        (("apps.0.demand_max", 10**9),),
        (("apps.0.demand_max", 10**9), ("apps.0.gang", 10**9)),
        (("apps.1.held", {"rome-1": 1, "oslo-2": 0}),),
        (("apps.1.held", ABSENT),),
        (("apps.1.t_id", 1e-9), ("apps.2.t_id", 1e9)),
        (("apps.1.t_id", 1e-100), ("apps.2.t_id", 1e15)),
        (("apps.1.elapsed", 0), ("apps.1.work_left", 1e-99)),
        (("apps.1.elapsed", 1e15), ("apps.1.work_left", 1e15)),
        (("apps.1.slowdown", {"machine": 1e6, "rack": 1e6, "cross": 1e6}),),
        (("apps.1.slowdown", {"machine": 1e-9, "rack": 1, "cross": 1e6}),),
        (("machines.3.id", "Zürich 3 北"), ("apps.1.id", "$.apps[0]")),
    ],
    ids=lambda changes: ascii(" ".join(f"{path}={value!s}"[:30] for path, value in changes)),
)
def test_odd_but_meaningful_auctions_are_solved(changes: tuple[tuple[str, Any], ...]) -> None:
    outcome(changed(*changes))


def test_the_order_of_fields_and_an_absent_held_change_nothing() -> None:
    document = dict(reversed(example().items()))
    for one in document["apps"]:
        if not one["held"]:
            del one["held"]
    assert parse(json.dumps(document).encode()) == parse(EXAMPLE)


def test_a_machine_of_which_nothing_is_held_is_not_held() -> None:
    plain, zeros = outcome(changed()), outcome(changed(("apps.1.held", {"rome-2": 0, "oslo-1": 0})))
    assert (zeros.allocation, zeros.log_v, zeros.c) == (plain.allocation, plain.log_v, plain.c)


def test_a_file_with_a_byte_order_mark_is_read() -> None:
    assert parse(b"\xef\xbb\xbf" + EXAMPLE) == parse(EXAMPLE)


# --- anything -------------------------------------------------------------------------------------------------------

#: What mutations insert: bytes that JSON means something by, and words that break numbers.
SCRAPS = [
    *(bytes([byte]) for byte in b'{}[],:"\\-.0159eE \n\x00\x1b\xff'),
    *(b"NaN", b"1e999", b"null", b"-0", b"\\ud800", b"\xc3"),
]


def result_or_sentence(data: bytes) -> None:
    try:
        auction = parse(data)
    except InstanceError as error:
        sentence = str(error)
    else:
        check(auction, solve(auction, 50.0))
        return
    assert sentence.isprintable()
    assert ";" in sentence


@st.composite
def mutations(draw: st.DrawFn) -> bytes:
    """Return the example after a few cuts, insertions and overwritings."""
    data = bytearray(EXAMPLE)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        gone = draw(st.integers(0, 3))
        data[at : at + gone] = draw(st.sampled_from(SCRAPS) | st.binary(max_size=2))
    return bytes(data)


@given(data=mutations())
@settings(max_examples=examples(600), deadline=None)
def test_a_mutated_file_gives_a_result_or_a_sentence(data: bytes) -> None:
    result_or_sentence(data)


@given(data=st.binary(max_size=64) | st.text(max_size=64).map(str.encode))
def test_arbitrary_bytes_give_a_sentence(data: bytes) -> None:
    refusal(data)


VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just([]) | st.just({})
    | st.sampled_from([0, 1, 2, 1e-100, 5e-324, 1e-9, 1e9, 1e15, 10**9])
)  # fmt: skip


def leaves(value: Any, path: str = "") -> list[str]:
    steps = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    inner = [leaf for step, below in steps for leaf in leaves(below, f"{path}.{step}")]
    return [path.removeprefix("."), *inner] if path else inner


@given(changes=st.dictionaries(st.sampled_from(leaves(example())), VALUES, min_size=1, max_size=4))
@settings(max_examples=examples(600), deadline=None)
def test_any_values_of_fields_give_a_result_or_a_sentence(changes: dict[str, Any]) -> None:
    # Longest paths first: what a shorter one replaces is gone afterwards.
    result_or_sentence(changed(*sorted(changes.items(), key=lambda change: -len(change[0]))))


def test_the_seed_decides_ties_and_the_order_of_the_file_nothing() -> None:
    apps = [
        {"id": f"a{index}", "elapsed": 0.0, "work_left": 9000.0, "t_id": 1000.0, "demand_max": 4, "gang": 4,
         "slowdown": {"machine": 1.0, "rack": 1.5, "cross": 2.0}, "held": {}}
        for index in range(4)
    ]  # fmt: skip
    document = {
        "schema": "themis-auction-1",
        "lease": 600.0,
        "machines": [{"id": "m", "rack": "r", "gpus": 4, "free": 4}],
    }

    def winner(order: list[dict[str, object]], seed: int) -> str:
        result = solve(parse(json.dumps({**document, "apps": order}).encode()), seed=seed)
        assert list(result.allocation) == [app["id"] for app in order]
        return next(app for app, won in result.allocation.items() if won)

    assert len({winner(apps, seed) for seed in range(16)}) > 1
    assert all(winner(apps, seed) == winner(apps[::-1], seed) for seed in range(16))
