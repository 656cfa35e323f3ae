"""The arbiter's state, its transitions, and the index that is derived from it."""
