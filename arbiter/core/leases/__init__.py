"""Leases: granted, renewed, revoked, proven; and the plans that follow from them."""
