"""How rows, times and colours are put on a terminal."""

import os
import sys
import time
from collections.abc import Sequence

from neurond.ledger.words import printable

COLOURS = {"free": "32", "leased": "33", "active": "33", "draining": "35", "queued": "36"}
TROUBLE = "31"


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, colour: bool) -> None:
    """Print columns as wide as they need to be; a cell that names a state gets its colour."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [header, *cells]) for i in range(len(header))]
    for row in [header, *cells]:
        line = "  ".join(
            paint(cell.ljust(width), cell, on=colour and row is not header)
            for cell, width in zip(row, widths, strict=True)
        )
        print(line.rstrip())


def paint(text: str, state: str, *, on: bool) -> str:
    """Return the text in the colour of a state."""
    if not on or (state not in COLOURS and state not in {"lost", "quarantined", "stuck", "foreign"}):
        return text
    return f"\033[{COLOURS.get(state, TROUBLE)}m{text}\033[0m"


def want_colour(choice: str) -> bool:
    """Decide on colour: `choice` is always, never or auto (a terminal, and no NO_COLOR)."""
    if choice == "auto":
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    return choice == "always"


def clock(at: float | None) -> str:
    """Write a moment for people: the time of day, with the date if it is not today."""
    if at is None:
        return ""
    then = time.localtime(at)
    same_day = then[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M", then)
