"""Auction instances of schema `themis-auction-1`, as the plain dictionaries that their JSON is."""

from __future__ import annotations

from typing import Literal, TypedDict

SCHEMA: Literal["themis-auction-1"] = "themis-auction-1"


class Slowdown(TypedDict):
    """How many times longer an iteration takes when the GPUs lie within a machine, a rack, or across racks."""

    machine: float
    rack: float
    cross: float


class Machine(TypedDict):
    """One machine: `gpus` in all, `free` of them in the auction."""

    id: str
    rack: str
    gpus: int
    free: int


class App(TypedDict):
    """One bidder. `elapsed` and `t_id` in seconds, `work_left` in serial GPU-seconds, `gang` in GPUs per gang."""

    id: str
    elapsed: float
    work_left: float
    t_id: float
    demand_max: int
    gang: int
    slowdown: Slowdown
    held: dict[str, int]


class Instance(TypedDict):
    """One auction; `lease` in seconds."""

    schema: Literal["themis-auction-1"]
    lease: float
    machines: list[Machine]
    apps: list[App]
