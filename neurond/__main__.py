"""`python -m neurond` is the same as `neurond`."""

from neurond.cli import command

command()
