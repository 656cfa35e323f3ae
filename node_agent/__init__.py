"""One per GPU host: starts, suspends, moves and ends workers, only under a lease, and proves what it did."""
