"""Many leases in a row: the daemon stays as small as it was.

The ordinary run takes 20,000 leases, NEUROND_TEST_LONG=1 a million.
"""

import os
import time

import pytest

from neurond.daemon.recording import COMPACT_AFTER
from tests.daemon.support import Raw, frame
from tests.daemon.test_abuse import fds, rss
from tests.harness import Daemon, eventually

LEASES = 1_000_000 if os.environ.get("NEUROND_TEST_LONG") == "1" else 20_000
MOST_GROWTH = 16.0
"""MiB."""
LONGEST_RECORD = 1024


@pytest.mark.timeout(3600)
def test_many_leases_in_a_row(daemon: Daemon) -> None:
    """Descriptors, memory and the journal of the daemon are no larger after many leases than after the first tenth."""
    journal = daemon.directory / "journal"
    call = frame("io.neurond.Acquire", {"count": 4, "name": "soak"})
    began, largest = time.monotonic(), 0
    with Raw(daemon) as connection:
        for number in range(LEASES):
            connection.socket.sendall(call)
            lease = connection.expect()["lease"]
            connection.ask("Release", lease=lease)
            if number == LEASES // 10:
                descriptors, memory = fds(daemon.pid), rss(daemon.pid)
            if number % 500 == 0:
                largest = max(largest, journal.stat().st_size)
        growth = rss(daemon.pid) - memory
        took = time.monotonic() - began
        print(
            f"{LEASES} leases in {took:.1f} s: RSS grew by {growth:.1f} MiB from {memory:.1f}, "
            f"the journal was {largest / 1024:.0f} KiB at most"
        )
        assert fds(daemon.pid) <= descriptors + 2  # a look at /proc may be under way
        assert growth < MOST_GROWTH
        assert largest < COMPACT_AFTER * LONGEST_RECORD
    eventually(daemon.all_free)
