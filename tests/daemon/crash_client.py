"""A client that fights for chips and does not give in: test_crash.py runs many, and kills them and the daemon.

Whoever holds a chip has its node open and a lock on it. Both are the kernel's and know nothing of neurond: the lock
goes with the last descriptor, so two holders of a chip, or one who got it while it was still open, are seen at once.
"""

import fcntl
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from neurond.client import Client, NeurondError, Unreachable

SIZES = (1, 1, 1, 1, 1, 1, 1, 1, 4, 4, 4, 8, 16)
SHORT_OF_CHIPS = {"WaitTimedOut", "NoCapacity"}
LEFT_BEHIND = 0.15
"""How often a child has the chips open after the release. 0 for now: a look can miss a child that is born during it."""
LIMIT = 5.0
"""Seconds; a client that is killed before it has bound its lease to itself leaves the chips for that long."""


class Insistent:
    """Calls the daemon until it answers, over as many crashes as there may be; counts calls and grants in files."""

    def __init__(self, address: str, notes: Path) -> None:
        self.address = address
        self.notes = notes
        self.crashes = 0
        self._client: Client | None = None

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method, again after each crash."""
        while True:
            try:
                self._client = self._client or Client(self.address)
                self.note("requests", ".")
                return self._client.call(method, **parameters)
            except Unreachable:
                self.crashes += 1
                if self._client is not None:
                    self._client.close()
                self._client = None
                time.sleep(0.01)

    def note(self, name: str, text: str) -> None:
        """Add to a file that all clients add to."""
        with (self.notes / name).open("a") as file:
            file.write(text)


def main(address: str, nodes: Path, notes: Path) -> None:
    """Lease, hold and give back until killed; in some rounds the holder just ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    daemon = Insistent(address, notes)
    number = 0
    while True:
        number += 1
        lease = acquire(daemon, f"{os.getpid()}-{number}")
        if lease is not None:
            daemon.note("grants", lease["lease"] + "\n")
            hold(daemon, lease["lease"], lease["chips"], nodes)


def acquire(daemon: Insistent, key: str) -> dict[str, Any] | None:
    """Lease chips, bound in the end to this process; None if there are none to be had."""
    bindings: list[dict[str, Any]] = [{"pid": 0}, {"pid": 0}, {"ttl": LIMIT}, {}]
    binding = random.choice(bindings)
    try:
        lease = daemon.call("Acquire", count=random.choice(SIZES), key=key, wait=2.0, **binding)
        if "pid" not in binding:
            daemon.call("Bind", lease=lease["lease"], pid=0)
    except NeurondError as error:
        # What was bound to a connection goes with the daemon, and what has a limit goes with time.
        if error.kind in SHORT_OF_CHIPS or (error.kind == "NoSuchLease" and "pid" not in binding):
            return None
        raise
    return lease


def hold(daemon: Insistent, lease: str, chips: list[int], nodes: Path) -> None:
    """Hold these chips for a moment, and give them back in one way or another."""
    held = [os.open(nodes / f"neuron{chip}", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK) for chip in chips]
    for chip, node in zip(chips, held, strict=True):
        try:
            fcntl.flock(node, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            daemon.note("violations", f"{lease} got chip {chip}, which somebody else had\n")
    time.sleep(random.choice((0.0, 0.01, 0.03, 0.2)))
    try:
        still = daemon.call("Environment", lease=lease)["chips"]
    except NeurondError as error:
        still = str(error)
    if still != chips:
        daemon.note("violations", f"{lease} had {chips}, but: {still}\n")
    way = random.random()
    if way < 0.15:
        os._exit(0)  # the lease ends with the process
    if way > 1 - LEFT_BEHIND:
        for node in held:
            os.set_inheritable(node, True)
        os.posix_spawn("/bin/sleep", ["sleep", "0.05"], {})  # has the chips open after the lease was released
    for node in held:
        os.close(node)
    release(daemon, lease)


def release(daemon: Insistent, lease: str) -> None:
    """Release a lease, sometimes twice; who was not answered for a crash may find that it is done."""
    before = daemon.crashes
    for time_of_asking in range(random.choice((1, 1, 2))):
        try:
            daemon.call("Release", lease=lease)
        except NeurondError as error:
            if error.kind != "NoSuchLease" or (time_of_asking == 0 and daemon.crashes == before):
                raise


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
