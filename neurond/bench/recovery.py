"""From exec to READY: with leases to take over, and with a long journal to read."""

import itertools
import shutil
import subprocess
import sys
import time
from pathlib import Path

from neurond.bench.report import Report
from neurond.bench.servers import LOAD_CORE, SERVER_CORE, Daemon, pin
from neurond.bench.turns import Plan, in_turn
from neurond.host import processes
from neurond.host.journal import Journal, encode_event
from neurond.ledger.events import Event, LeaseEnded, LeaseGranted, Opened
from neurond.ledger.leases import ByConnection, Lease, Owner, Want

SECTION = "recovery"
RECORDS = 100_000
IMPORTS = "import neurond.cli.serve, neurond.daemon.service"


def seconds(plan: Plan) -> float:
    """Return about how long this takes."""
    return _times(plan) * 5 + 6


def measure(plan: Plan, report: Report, place: Path) -> None:
    """Measure it; each start finds what a daemon left that was killed."""
    records = RECORDS // 10 if plan.quick else RECORDS
    report.progress(f"recovery: 0, 16, 64 leases, {records:,} records")
    hosts = {f"{count} leases": _left_over(place / f"recovery-{count}", count) for count in (0, 16, 64)}
    hosts[f"{records:,} records"] = _long_journal(place / "recovery-long", records)

    def ready(daemon: Daemon) -> float:
        try:
            shutil.copy(daemon.place / "kept", daemon.place / "journal")
            return daemon.start()
        finally:
            daemon.kill()

    subjects = {name: (lambda daemon=daemon: ready(daemon)) for name, daemon in hosts.items()}
    found = in_turn(_times(plan), {"interpreter and imports": _bare, **subjects})
    for name, walls in found.items():
        report.add(SECTION, name, "ms", [wall * 1e3 for wall in walls])
    for name in hosts:
        must = 1.5 if name == "64 leases" else None
        what = f"READY with {name}, against interpreter and imports"
        report.compare(SECTION, what, found[name], found["interpreter and imports"], must=must, upward=False)


def _times(plan: Plan) -> int:
    return 2 if plan.quick else 11


def _bare() -> float:
    pin(0, SERVER_CORE)
    try:
        begun = time.monotonic()
        subprocess.run([sys.executable, "-c", IMPORTS], check=True)
        return time.monotonic() - begun
    finally:
        pin(0, LOAD_CORE)


def _left_over(place: Path, leases: int) -> Daemon:
    """Make what a daemon leaves that was killed while it had so many leases."""
    daemon = Daemon(place, 64)
    with daemon, daemon.client() as client:
        for _ in range(leases):
            client.call("Acquire", count=1, ttl=3600)
        daemon.kill()
    shutil.copy(place / "journal", place / "kept")
    return daemon


def _long_journal(place: Path, records: int) -> Daemon:
    """Make a journal of so many records, with no lease left."""
    daemon = Daemon(place, 16)
    with daemon:
        daemon.kill()
    journal = Journal(place, processes.boot_id())
    journal.start(1, [(time.time(), Opened("abcd"))])
    numbers = itertools.count(1)
    for seq in range(2, records, 2):
        lease_id = f"abcd-{next(numbers)}"
        lease = Lease(lease_id, "active", Owner(0, "root"), Want(1), ByConnection(1), time.time(), (0,))
        events: tuple[Event, Event] = LeaseGranted(lease), LeaseEnded(lease_id, "released by root")
        for number, event in enumerate(events):
            journal.append([encode_event(seq + number, time.time(), event)])
    journal.flush()
    journal.close()
    shutil.copy(place / "journal", place / "kept")
    return daemon
