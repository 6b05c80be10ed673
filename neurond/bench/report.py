"""What was measured, as a table for people and as JSON."""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from neurond import __version__


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure: the median of several rounds, with the lowest and the highest of them."""

    section: str
    what: str
    unit: str
    value: float
    low: float
    high: float
    more: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure against another: the median of the rounds' ratios. `must` and `aim` are bounds, from below or above.

    `upward` says that more is better.
    """

    section: str
    what: str
    value: float
    low: float
    high: float
    must: float | None = None
    aim: float | None = None
    upward: bool = True

    @property
    def verdict(self) -> str:
        """Whether the bounds are kept."""
        if self.must is None:
            return ""
        sign = 1 if self.upward else -1
        if self.aim is not None and sign * self.value >= sign * self.aim:
            return "as aimed"
        return "good" if sign * self.value >= sign * self.must else "short"


class Report:
    """Collects figures; `progress` lines go to stderr as they come, if they are wanted."""

    def __init__(self, *, quick: bool, talkative: bool) -> None:
        self.quick = quick
        self.measured: list[Measured] = []
        self.ratios: list[Ratio] = []
        self.left_out: list[str] = []
        self.notes: list[str] = []
        self._talkative = talkative
        self._begun = time.monotonic()
        self._wall = time.time()

    def progress(self, text: str) -> None:
        """Say what is being measured now."""
        if self._talkative:
            print(f"{time.monotonic() - self._begun:6.1f} s  {text}", file=sys.stderr, flush=True)  # noqa: T201

    def add(self, section: str, what: str, unit: str, values: Sequence[float], **more: float) -> None:
        """Add a figure, from its value in each round."""
        found = Measured(section, what, unit, statistics.median(values), min(values), max(values), more)
        self.measured.append(found)

    def compare(
        self,
        section: str,
        what: str,
        ours: Sequence[float],
        theirs: Sequence[float],
        *,
        must: float | None = None,
        aim: float | None = None,
        upward: bool = True,
    ) -> None:
        """Add the ratio of two figures that were measured in turn."""
        ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
        self.ratios.append(Ratio(section, what, statistics.median(ratios), min(ratios), max(ratios), must, aim, upward))

    def leave_out(self, what: str, why: str) -> None:
        """Note that something is not measured."""
        self.left_out.append(f"{what}: {why}")
        self.progress(f"left out: {what}: {why}")

    def as_json(self) -> str:
        """Return everything as one object."""
        content = {
            "neurond": __version__,
            "quick": self.quick,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._wall)),
            "command": ["neurond", *sys.argv[1:]],
            "machine": machine(),
            "measured": [asdict(one) for one in self.measured],
            "ratios": [asdict(one) | {"verdict": one.verdict} for one in self.ratios],
            "left_out": self.left_out,
            "notes": self.notes,
        }
        return json.dumps(content, indent=2)

    def as_table(self) -> str:
        """Return everything as text."""
        rows = [["SECTION", "WHAT", "MEDIAN", "LOWEST", "HIGHEST", "UNIT", "MORE"]]
        for one in self.measured:
            more = ", ".join(f"{name} {number(value)}" for name, value in one.more.items())
            figures = [number(one.value), number(one.low), number(one.high)]
            rows.append([one.section, one.what, *figures, one.unit, more])
        compared = [["SECTION", "RATIO", "MEDIAN", "LOWEST", "HIGHEST", "MUST", "AIM", ""]]
        for ratio in self.ratios:
            bounds = [_bound(bound, upward=ratio.upward) for bound in (ratio.must, ratio.aim)]
            figures = [f"{value:.2f}" for value in (ratio.value, ratio.low, ratio.high)]
            compared.append([ratio.section, ratio.what, *figures, *bounds, ratio.verdict])
        lines = [*_columns(rows), "", *_columns(compared), ""]
        lines += [f"left out: {text}" for text in self.left_out]
        return "\n".join([*lines, *self.notes, "machine: " + ", ".join(f"{k} {v}" for k, v in machine().items())])


def number(value: float) -> str:
    """Return a figure with three digits that count."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _bound(value: float | None, *, upward: bool) -> str:
    return "" if value is None else f"{'≥' if upward else '≤'} {value:g}"


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def machine() -> dict[str, str]:
    """Return what the figures depend on."""
    models = [line for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines() if line.startswith("model name")]
    return {
        "processor": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0)) if os.cpu_count() is None else os.cpu_count()),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": " ".join(f"{value:.1f}" for value in os.getloadavg()),
    }
