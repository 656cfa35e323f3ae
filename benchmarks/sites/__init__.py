"""The parts of ``benchmarks/site.py``: the agents of a whole site in two processes, and what is read off them."""
