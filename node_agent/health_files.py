"""The files on the health of this node's GPUs: the ledger, and the file by which an administrator lifts it."""

from __future__ import annotations

from pathlib import Path

import structlog

from node_agent.core.events import HealthLedger
from node_agent.workers.records import read_json, write_json
from protocol.messages import GpuId

log: structlog.stdlib.BoundLogger = structlog.get_logger("node_agent")

#: In the state directory: `HealthLedger`.
LEDGER = "health.json"
#: In the state directory, made by an administrator: the ids of GPUs to trust again, one a line; empty for all.
LIFT = "unquarantine"


def read(state_dir: Path) -> HealthLedger:
    """Return the ledger of an earlier node agent; an empty one if it is missing, or damaged, which is logged."""
    ledger = read_json(state_dir / LEDGER, HealthLedger)
    if ledger is None and (state_dir / LEDGER).exists():
        log.warning("health.damaged", path=str(state_dir / LEDGER), meaning="no GPU is quarantined any more")
    return ledger or HealthLedger()


def write(state_dir: Path, ledger: HealthLedger) -> None:
    """Write `ledger` down."""
    write_json(state_dir / LEDGER, ledger)


def tell(ledger: HealthLedger) -> None:
    """Log which GPUs are in quarantine."""
    for gpu, why in ledger.quarantined.items():
        log.warning("gpu.quarantined", gpu=gpu, why=why)


def lifted(state_dir: Path) -> tuple[GpuId, ...] | None:
    """Return the GPUs that an administrator trusts again, () for all, and take the file away; None without one."""
    path = state_dir / LIFT
    try:
        text = path.read_text(errors="replace")
        path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning(
            "health.unreadable", path=str(path), error=str(error), mend="give the file to the node agent's user"
        )
        return None
    gpus = tuple(GpuId(word) for word in text.split())
    log.info("quarantine.lifted", gpus=gpus or "all")
    return gpus
