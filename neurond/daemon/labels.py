"""The labels that make a container ours. They tell what to look at, and prove nothing: `docker commit` copies them."""

import re
from collections.abc import Mapping

from neurond.ledger.leases import Lease

LEASE = "io.neurond.lease"
HOME = "io.neurond.home"
"""Has the runtime directory of the daemon that a container belongs to: several may share an engine."""
OWNER, CHIPS = "io.neurond.owner", "io.neurond.chips"
NAME, REMOVE = "io.neurond.name", "io.neurond.remove"
TASK, TASK_CONTAINER = "io.neurond.task", "io.neurond.task-container"
PREFIX = "io.neurond."


def labels_of(home: str, lease: Lease) -> dict[str, str]:
    """Return the labels of every container that is started on the chips of a lease.

    Those that not every container has are there as well, as an image may have them from the one that it was made of.
    """
    chips = ",".join(map(str, lease.chips))
    others = dict.fromkeys((NAME, REMOVE, TASK, TASK_CONTAINER), "")
    return {LEASE: lease.id, HOME: home, OWNER: str(lease.owner.uid), CHIPS: chips, **others}


def uid_of(labels: Mapping[str, str]) -> int | None:
    """Return the uid of a container's owner; None if its label has none."""
    text = labels.get(OWNER, "")
    return int(text) if re.fullmatch("[0-9]{1,10}", text) else None
