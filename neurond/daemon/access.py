"""How far a lease is enforced, and the entries in the nodes' access control lists that do it for processes."""

from typing import Literal

import structlog

from neurond.host import access
from neurond.ledger.chips import Chip
from neurond.ledger.leases import Lease, OnContainers
from neurond.ledger.ledger import Ledger

log = structlog.get_logger()

Level = Literal["advisory", "acl", "cgroup"]


class Access:
    """Lets exactly the holders open the nodes that are shut to others, and says what is in force."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self._open: dict[int, str] = {}
        """Chips whose nodes everybody can open, or can't be shut, with the reason."""
        self._said: set[str] = set()

    def refresh(self) -> None:
        """Look at all nodes again and set all lists right: after a start, a crash, or news from udev."""
        self._open = {}
        for index, chip in self.ledger.chips.items():
            why = chip.problem or access.why_open(chip.node)
            if why:
                self._open[index] = why
            else:
                self._set(index, chip)

    def refresh_some(self, chips: tuple[int, ...]) -> None:
        """Set the lists of these chips right, after a lease of them began or ended."""
        for index in chips:
            if index not in self._open and index in self.ledger.chips:
                self._set(index, self.ledger.chips[index])

    def give_back(self) -> None:
        """Take all lists away, as nobody will keep them right any more: the nodes' modes count again."""
        for index, chip in self.ledger.chips.items():
            if index not in self._open:
                access.restore(chip.node)

    def level(self, lease: Lease) -> tuple[Level, str]:
        """Return what keeps others off the chips of a lease, and its holder off others' chips; with the reason."""
        if isinstance(lease.binding, OnContainers):
            return "cgroup", "the container's device cgroup allows only its chips"
        if lease.enforce:
            return "cgroup", "its scope's device filter allows only its chips"
        if lease.owner.uid == 0:
            return "advisory", "root can open every node"
        why = next((self._open[index] for index in lease.chips if index in self._open), None)
        return ("advisory", why) if why else ("acl", "only root and the owner can open the nodes of its chips")

    def _set(self, index: int, chip: Chip) -> None:
        holder = self.ledger.holder_of(index)
        wanted = set()
        if (
            holder is not None
            and holder.state == "active"  # at its end nobody may open a chip once more
            and holder.owner.uid != 0
            and not isinstance(holder.binding, OnContainers)
        ):
            wanted = {holder.owner.uid}
        try:
            access.allow(chip.node, wanted)
        except OSError as error:
            self._open[index] = f"{chip.node} takes no access control list ({error.strerror})"
            if self._open[index] not in self._said:  # every look at the chips tries again
                self._said.add(self._open[index])
                log.warning("access.failed", chip=index, error=self._open[index], follows="its leases are advisory")
