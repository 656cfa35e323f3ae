"""The node agent without hands: state machines of tasks, proof of release, escalation."""
