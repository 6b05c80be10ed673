"""How lengths of time are written by people and for people."""

import re

UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "ms": 0.001}


def read_duration(text: str) -> float:
    """Read a time such as 90, 90s, 1h30m, 2d into seconds. Raises ValueError with a sentence."""
    number = r"\d{1,15}(?:\.\d{1,15})?"
    if not text or not re.fullmatch(f"(?:{number}(?:ms|[smhd]))*(?:{number})?", text, re.ASCII):
        raise ValueError(f"{text!r} is not a time such as 30s, 10m, 1h30m or 2d")
    return sum(float(amount) * UNITS[unit] for amount, unit in re.findall(f"({number})(ms|[smhd]?)", text))


def write_duration(seconds: float) -> str:
    """Write a time as `read_duration` reads it: 5400 becomes "1h30m"."""
    if seconds != int(seconds) or not seconds:
        return f"{seconds:.3f}".rstrip("0").rstrip(".") + "s"
    left, parts = int(seconds), []
    for unit in ("d", "h", "m", "s"):
        amount, left = divmod(left, int(UNITS[unit]))
        if amount:
            parts.append(f"{amount}{unit}")
    return "".join(parts)
