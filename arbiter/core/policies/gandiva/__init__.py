"""Gandiva: packing, migration and grow-shrink in place of preemption."""
