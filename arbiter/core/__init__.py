"""Decisions of the arbiter, and nothing that could carry one out."""
