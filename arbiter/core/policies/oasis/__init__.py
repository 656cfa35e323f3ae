"""OASiS: admission by price, and its baselines."""
