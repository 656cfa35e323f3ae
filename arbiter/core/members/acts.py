"""Acts of people on apps and nodes: each that changed something has a row in the ledger, and each is answered."""

from __future__ import annotations

from typing import Any

import msgspec

from arbiter.core.effects import ActRecord
from arbiter.core.turn import Turn
from protocol.core import Send
from protocol.messages import Act, Answer, Party


def record(turn: Turn, sender: Party, act: Act, outcome: str) -> None:
    """Write down what an act has changed, or why a person was refused."""
    turn.effects.append(ActRecord(act.act_id, turn.now, sender.id, act.kind, act.target, outcome))
    turn.tell(act.target, f"{act.kind} by {sender.user}: {outcome}", loudly=True)


def answer(turn: Turn, sender: Party, act: Act, document: dict[str, Any]) -> None:
    """Answer an act with a document ``act/v1``."""
    turn.effects.append(Send(sender, Answer(act.act_id, msgspec.json.encode({"schema": "act/v1"} | document))))


def refuse(turn: Turn, sender: Party, act: Act, code: int, why: str) -> None:
    """Answer an act with an exit code and a sentence."""
    document = msgspec.json.encode({"schema": "error/v1", "code": code, "error": why})
    turn.effects.append(Send(sender, Answer(act.act_id, document, why)))
