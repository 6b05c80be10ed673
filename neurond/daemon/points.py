"""Named points at which a test can have the daemon killed, as by kill -9: NEUROND_CRASH_AT=NAME, or NAME:3 for the
third time that it gets there.
"""  # noqa: D205 - one sentence

import os
import signal

POINTS = (
    "start.recovered",
    "start.journalled",
    "start.listening",
    "journal.before-write",
    "journal.after-write",
    "reply.before-send",
    "lease.granted",
    "lease.draining",
    "lease.ended",
    "lease.bound",
    "container.pulled",
    "container.leased",
    "container.created",
    "container.started",
    "container.bound",
    "container.stopped",
    "container.ended",
    "container.removed",
)

_name, _, _times = os.environ.get("NEUROND_CRASH_AT", "").partition(":")
_left = int(_times or 1)
ARMED = bool(_name)
"""Whether a test asked for a point at all."""


def reach(point: str) -> None:
    """Note that the daemon has got to a point; if a test asked for it, this is the end."""
    global _left  # noqa: PLW0603 - counts down to the one kill of this process
    if point == _name:
        _left -= 1
        if _left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
