"""Names of leases as devices (CDI), which keep a container from coming back on chips that it has no lease for any more.

A container that was given its chips by the lease's name can only be started while that name exists, and the name goes
with the lease: before anybody else can get the chips.
"""

from pathlib import Path

import msgspec
import structlog

from neurond import wire
from neurond.daemon.server import Call, Handler
from neurond.host.cdi import KIND, CdiFile, Node, describe
from neurond.ledger.leases import ByConnection, Lease
from neurond.ledger.ledger import Ledger

log = structlog.get_logger()


class Fence:
    """The names of the leases of one daemon. `file` is None where names are not wanted.

    It is on as soon as an engine is found that resolves such names, or an earlier daemon has left some.
    """

    def __init__(self, ledger: Ledger, file: CdiFile | None) -> None:
        self._ledger = ledger
        self._file = file
        self._named: dict[str, list[Node]] | None = None
        self._failed = False
        self._stale = False
        self.is_on = file is not None and file.exists()

    def found(self, directories: list[str]) -> None:
        """Take in where the engine looks for names; it may have been exchanged for one that does not."""
        on = self._file is not None and any(same(d, self._file.path.parent) for d in directories)
        if on != self.is_on:
            log.info("cdi.on" if on else "cdi.off", directories=directories)
            self.is_on = on
            self._named = None
            self._failed = False
        if on and self._file is not None and (rival := self._file.rival()):
            log.error("cdi.conflict", file=str(rival), follows=f"it gives names of {KIND} too: remove it")
            self.is_on = False
        if not self.is_on and not self._failed:
            self._take_back()

    def name_of(self, lease: Lease) -> str | None:
        """Return the name of a lease as a device; None where the engine knows no such names."""
        return f"{KIND}={lease.id}" if self.is_on else None

    def names(self) -> dict[str, list[Node]]:
        """Return the nodes that each name stands for, with their paths inside."""
        chips = self._ledger.chips
        return {
            lease.id: [(chips[index].node, f"/dev/neuron{index}") for index in lease.chips if index in chips]
            for lease in self._ledger.leases.values()
            if lease.state == "active" and not lease.lost and not isinstance(lease.binding, ByConnection)
        }

    def handlers(self) -> dict[str, Handler]:
        """Return the functions that answer calls, by the method's name."""
        return {"ListNames": self._list}

    def _list(self, call: Call, request: wire.Nothing) -> wire.Names:
        del call, request
        names = self.names()
        leases = self._ledger.leases
        return wire.Names(
            str(self._file.path) if self._file is not None and self.is_on else None,
            {f"{KIND}={name}": list(leases[name].chips) for name in names},
            msgspec.Raw(msgspec.json.encode(describe(names))),
        )

    def update(self) -> None:
        """Make the names those of the leases that live. While that fails, containers get plain devices."""
        if self._file is None or not (self.is_on or self._failed):
            return
        names = self.names()
        if names == self._named and not self._failed:
            return
        try:
            self._file.write(names)
        except OSError as error:
            if not self._failed:
                why = error.strerror
                log.warning(
                    "cdi.failed", file=str(self._file.path), error=why, follows="giving plain devices meanwhile"
                )
            self.is_on, self._failed = False, True
            if self._named is None or any(names.get(name) != nodes for name, nodes in self._named.items()):
                self._take_back()
        else:
            self._named, self._stale = names, False
            if self._failed:
                log.info("cdi.recovered", file=str(self._file.path))
                self.is_on, self._failed = True, False

    def _take_back(self) -> None:
        """Remove all names: a lease that lives can do without its own, but one that has ended must not have any."""
        if self._file is None:
            return
        try:
            self._file.remove()
        except OSError as error:
            if not self._stale:
                follows = "Docker may start containers on the chips of leases that have ended: remove the file"
                log.warning("cdi.not_removed", file=str(self._file.path), error=error.strerror, follows=follows)
            self._named, self._stale = None, True
        else:
            self._named, self._stale = {}, False


def same(directory: str, other: Path) -> bool:
    """Tell whether two directories are one: /var/run is a link to /run."""
    return Path(directory).resolve() == other.resolve()
