"""How numbers and names are written for people. The command line has this too, so it imports next to nothing."""

from collections.abc import Iterable


def ranges(chips: Iterable[int]) -> str:
    """Write numbers as people read them: 0,1,2,3,5 becomes "0-3,5"; none is "none"."""
    parts: list[list[int]] = []
    for index in sorted(chips):
        if parts and parts[-1][-1] == index - 1:
            parts[-1].append(index)
        else:
            parts.append([index])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts) or "none"


def printable(text: str) -> str:
    """Return a text with nothing in it that a terminal would obey, or that would begin a line of a log."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
