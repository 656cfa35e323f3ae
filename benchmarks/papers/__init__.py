"""Published evaluations, rerun."""
