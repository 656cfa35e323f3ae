"""Entry points: the command line, the daemons' start, `up` and the demo; may import every other room."""
