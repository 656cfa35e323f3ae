"""A site on seven hosts, which are network namespaces of this one: `python -m tests.lab`, or `make lab`."""
