"""A site of one user: its files, its daemons, its systemd units."""
