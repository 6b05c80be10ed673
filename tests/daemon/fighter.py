"""A client that fights for chips: run as a process of its own by test_fight.py, and killed by it at any moment.

Whoever holds a chip holds a lock on a file of that chip's number. The locks are the kernel's, and know nothing of
neurond, so two holders of a chip are seen by the second one.
"""

import fcntl
import os
import random
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from neurond.client import Client, NeurondError, Unreachable


def main(address: str, locks: Path, seconds: float) -> None:
    """Lease, hold and give back until the time is over or the daemon goes away."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with Client(address) as client:
            try:
                lease = client.call("Acquire", count=random.choice([1, 1, 1, 4, 4, 8, 16]), pid=0, wait=2.0)
            except NeurondError as error:
                if error.kind in {"WaitTimedOut", "NoCapacity"}:
                    continue
                raise
            hold(lease["chips"], locks)
            if random.random() < 0.7:
                client.call("Release", lease=lease["lease"])
            else:
                os._exit(0)  # the lease ends with the process


def hold(chips: list[int], locks: Path) -> None:
    """Hold the locks of these chips for a moment, and note a chip that somebody else holds."""
    with ExitStack() as held:
        for chip in chips:
            file = held.enter_context((locks / str(chip)).open("w"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                (locks / f"violation-{os.getpid()}").write_text(f"chip {chip} of {chips}")
        with (locks / "grants").open("a") as grants:
            grants.write(f"{os.getpid()} {chips}\n")
        time.sleep(random.uniform(0, 0.03))


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
    except Unreachable:
        sys.exit(0)  # a lease that we may have got without hearing of it ends with us
