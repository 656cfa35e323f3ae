"""Themis: a partial-allocation auction over finish-time fairness."""
