"""Policies that are fair to tenants: Astraea and its baselines."""
