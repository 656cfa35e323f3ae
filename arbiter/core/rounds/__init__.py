"""Rounds: probe, offer, bids, the policy's decision and what is done of it."""
