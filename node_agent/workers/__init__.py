"""Processes of tasks: starting, watching, talking to, signalling and re-adopting them."""
