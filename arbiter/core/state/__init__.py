"""What the arbiter knows, what may follow what, and what is derived from it."""
