"""A bus that gives its broker a minute to answer: a busy machine is not what a test is about."""

from __future__ import annotations

from protocol.bus.amqp import AmqpBus
from tests.support.patience import PATIENCE_S


def patient_bus(url: str) -> AmqpBus:
    """Return the bus at `url`."""
    return AmqpBus(url, timeout_s=PATIENCE_S / 2)
