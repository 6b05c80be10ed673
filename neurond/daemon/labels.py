"""The labels that make a container ours. They tell what to look at, and prove nothing: `docker commit` copies them."""

from neurond.ledger.leases import Lease

LEASE = "io.neurond.lease"
HOME = "io.neurond.home"
"""Has the runtime directory of the daemon that a container belongs to: several may share an engine."""
OWNER, CHIPS = "io.neurond.owner", "io.neurond.chips"
NAME, REMOVE = "io.neurond.name", "io.neurond.remove"
TASK, TASK_CONTAINER = "io.neurond.task", "io.neurond.task-container"
PREFIX = "io.neurond."


def labels_of(home: str, lease: Lease) -> dict[str, str]:
    """Return the labels of every container that is started on the chips of a lease."""
    chips = ",".join(map(str, lease.chips))
    return {LEASE: lease.id, HOME: home, OWNER: str(lease.owner.uid), CHIPS: chips}
