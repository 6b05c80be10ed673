"""What the options for chips and waiting, as read by `add_chips` of options.py, ask of the daemon."""

from __future__ import annotations

TYPE_CHECKING = False  # typing takes longer to import than all that is done here
if TYPE_CHECKING:
    from typing import Any

FOREVER = 365 * 86400.0


def wish(options: Any) -> dict[str, Any]:
    """Return the parameters of a request that `add_chips` has read."""
    return {"count": options.count, "chips": options.chips, "all": options.all} | patience(options)


def patience(options: Any) -> dict[str, Any]:
    """Return how long to wait, in seconds, as `add_waiting` has read it, and whether for missing chips too."""
    wait = 0.0 if options.no_wait else FOREVER if options.wait is None else options.wait
    return {"wait": wait, "missing_ok": options.wait is not None}
