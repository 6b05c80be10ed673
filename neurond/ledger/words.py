"""How numbers, times and names are written for people. The command line has this too, so it imports next to nothing."""

import re
from collections.abc import Iterable

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "ms": 0.001}


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


def duration(text: str) -> float:
    """Read a time such as 90, 90s, 1h30m, 2d into seconds. Raises ValueError with a sentence."""
    number = r"\d{1,15}(?:\.\d{1,15})?"
    if not text or not re.fullmatch(f"(?:{number}(?:ms|[smhd]))*(?:{number})?", text, re.ASCII):
        raise ValueError(f"{text!r} is not a time such as 30s, 10m, 1h30m or 2d")
    return sum(float(amount) * UNITS[unit] for amount, unit in re.findall(f"({number})(ms|[smhd]?)", text))


def write_duration(seconds: float) -> str:
    """Write a time as `duration` reads it: 5400 becomes "1h30m"."""
    if seconds != int(seconds) or not seconds:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    left, parts = int(seconds), []
    for unit in ("d", "h", "m", "s"):
        amount, left = divmod(left, int(UNITS[unit]))
        if amount:
            parts.append(f"{amount}{unit}")
    return "".join(parts)
