"""The verbs of the command line, one file per group; each file adds its own to the Typer app it is given."""
