"""The daemon at rest, and what is left of a great many leases: memory, descriptors, processor time."""

import time
from contextlib import ExitStack
from pathlib import Path

from neurond.bench.load import Load, processor_time
from neurond.bench.report import Report
from neurond.bench.servers import Daemon
from neurond.bench.talks import Leases
from neurond.bench.turns import Plan

SECTION = "rest"
MANY, AT_FIRST = 1_000_000, 100_000
"""Leases after which growth is measured, and those before it."""


def seconds(plan: Plan) -> float:
    """Return about how long this takes."""
    return _watched(plan) + 2 * _many(plan)[0] / 30_000 + 3


def measure(plan: Plan, report: Report, place: Path) -> None:
    """Measure it."""
    report.progress(f"rest: {_watched(plan):g} s of doing nothing, then {_many(plan)[0]:,} leases")
    with ExitStack() as undo:
        daemon = undo.enter_context(Daemon(place / "rest", 16))
        before = processor_time(daemon.pid)[0]
        time.sleep(_watched(plan))
        share = (processor_time(daemon.pid)[0] - before) / _watched(plan) * 100
        report.add(SECTION, "processor time at rest", "% of a core", [share])
        report.compare(SECTION, "processor time at rest, % of a core", [share], [1], must=0.2, upward=False)
        memory = _resident(daemon.pid)
        report.add(SECTION, "memory at rest", "MB", [memory])
        report.compare(SECTION, "memory at rest, MB", [memory], [1], must=60, aim=40, upward=False)
        load = Load(str(daemon.socket), 8, Leases(), daemon.pid)
        undo.callback(load.close)
        most, first = _many(plan)
        _lease(load, first)
        memory, files = _resident(daemon.pid), _files(daemon.pid)
        _lease(load, most - first)
        growth, files = _resident(daemon.pid) - memory, _files(daemon.pid) - files
    what = f"growth from {first:,} to {most:,} leases"
    report.add(SECTION, what, "MB", [growth])
    report.add(SECTION, what, "descriptors", [float(files)])
    report.compare(SECTION, what + ", MB", [growth], [1], must=2, upward=False)
    report.compare(SECTION, what + ", descriptors", [float(files)], [1], must=0, upward=False)


def _watched(plan: Plan) -> float:
    return 2.0 if plan.quick else 60.0


def _many(plan: Plan) -> tuple[int, int]:
    return (MANY // 50, AT_FIRST // 50) if plan.quick else (MANY, AT_FIRST)


def _lease(load: Load, leases: int) -> None:
    """Lease and release so many times: two requests each."""
    while leases > 0:
        leases -= load.run(0.2).requests // 2


def _resident(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text("ascii").splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1000
    return 0.0


def _files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
