"""The worth of an allocation to an app: what an app agent states and bids, and the arbiter works out from that."""
