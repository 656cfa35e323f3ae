"""Labelled traces for the benchmark of introspection."""
