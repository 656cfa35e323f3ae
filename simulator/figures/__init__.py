"""Rows, figures and reports of simulations."""
