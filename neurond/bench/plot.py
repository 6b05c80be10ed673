"""The figures as bars, in one SVG file, written by hand: a plot library would be larger than neurond."""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

from neurond.bench.report import Measured, Report, number

WIDTH, ROW, LEFT, RIGHT = 960, 22, 400, 150
FONT = "font-family='sans-serif' font-size='12'"


def write(path: Path, report: Report) -> None:
    """Write the plot: one group of bars for each section and unit, each with its own scale."""
    path.write_text("\n".join(_svg(report.measured)) + "\n", "utf-8")


def _svg(measured: Sequence[Measured]) -> Iterator[str]:
    ordered = sorted(enumerate(measured), key=lambda one: (_group(one[1], measured), one[0]))
    body: list[str] = []
    y = 10
    for (_, section, unit), rows in groupby(ordered, key=lambda one: _group(one[1], measured)):
        found = [one for _, one in rows]
        y += 2 * ROW
        body.append(f"<text x='10' y='{y - 8}' {FONT} font-weight='bold'>{escape(f'{section}: {unit}')}</text>")
        largest = max((one.high for one in found), default=0) or 1
        for one in found:
            body += _bar(one, y, (WIDTH - LEFT - RIGHT) / largest)
            y += ROW
    yield f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{y + 10}'>"
    yield "<rect width='100%' height='100%' fill='white'/>"
    yield from body
    yield "</svg>"


def _group(one: Measured, measured: Sequence[Measured]) -> tuple[int, str, str]:
    """Keep sections in their order."""
    return next(at for at, other in enumerate(measured) if other.section == one.section), one.section, one.unit


def _bar(one: Measured, y: int, scale: float) -> Iterator[str]:
    """Draw the median as a bar, and a line from the lowest to the highest round."""
    colour = "#1f77b4" if "neurond" in one.what or one.section in {"ledger", "socket"} else "#999999"
    middle = y + ROW / 2
    yield f"<text x='{LEFT - 8}' y='{middle + 4}' {FONT} text-anchor='end'>{escape(one.what)}</text>"
    yield f"<rect x='{LEFT}' y='{y + 3}' width='{max(one.value, 0) * scale:.1f}' height='{ROW - 6}' fill='{colour}'/>"
    low, high = LEFT + max(one.low, 0) * scale, LEFT + max(one.high, 0) * scale
    yield f"<line x1='{low:.1f}' x2='{high:.1f}' y1='{middle}' y2='{middle}' stroke='black'/>"
    yield f"<text x='{high + 6:.1f}' y='{middle + 4}' {FONT}>{escape(number(one.value))}</text>"
