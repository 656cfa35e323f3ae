"""Max-min finish-time fairness: the greatest rho is made as small as it can be."""
