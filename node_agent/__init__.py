"""The node agent, one per node: starts, suspends, moves and ends workers under leases, and proves GPUs empty."""
