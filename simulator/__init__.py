"""The simulator: the arbiter's, the app agents' and the node agents' own cores under virtual time."""
