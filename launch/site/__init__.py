"""A site of one user on one host: its configuration and its daemons, in one process or several."""
