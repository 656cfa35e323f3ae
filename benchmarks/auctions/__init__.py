"""What the auction's solver is measured against: instance families, exact solvers of other makes, proven optima."""
