"""The log in a flood of leases: a sample and a count, while the journal and those who watch get every event."""

from collections import Counter
from collections.abc import Callable

from neurond.daemon.logs import MOST_A_SECOND
from tests.daemon.support import Raw
from tests.harness import Daemon, eventually

KINDS = ("lease.granted", "lease.ended")
LEASES = 1500


def test_a_flood_of_events_is_counted_and_not_logged(daemon: Daemon, connect: Callable[[], Raw]) -> None:
    """Beyond its limit for a second the log has how many events of each kind it passed over; watchers get them all."""
    client = connect()
    for _ in range(LEASES):
        client.ask("Release", lease=client.ask("Acquire", count=1)["lease"])

    def counted() -> list[int]:
        passed = daemon.logged("events.not_logged")
        return [len(daemon.logged(kind)) + sum(line.get(kind, 0) for line in passed) for kind in KINDS]

    eventually(lambda: counted() == [LEASES, LEASES])
    seconds = Counter(line["timestamp"].partition(".")[0] for kind in KINDS for line in daemon.logged(kind))
    assert max(seconds.values()) <= MOST_A_SECOND
    watcher = connect()
    watcher.send("Watch", more=True, since=0)
    told: Counter[str] = Counter()
    while sum(told[kind] for kind in KINDS) < 2 * LEASES:
        told[watcher.expect()["event"]["event"]] += 1
    assert [told[kind] for kind in KINDS] == [LEASES, LEASES]
