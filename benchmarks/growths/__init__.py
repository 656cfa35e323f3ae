"""The parts of `benchmarks/growth.py`."""
