"""Everything that can happen to the ledger. The state is the fold of these."""

from typing import ClassVar

from neurond.ledger.chips import Chip, User
from neurond.ledger.leases import Binding, Lease
from neurond.ledger.values import value


@value(frozen=True, slots=True)
class Opened:
    """A ledger began, or goes on after a compaction: lease ids are EPOCH-NUMBER, from `next_number` on."""

    kind: ClassVar[str] = "ledger.opened"
    epoch: str
    next_number: int = 1


@value(frozen=True, slots=True)
class ChipAdded:
    """A chip appeared."""

    kind: ClassVar[str] = "chip.added"
    chip: Chip


@value(frozen=True, slots=True)
class ChipChanged:
    """A chip is still there but other facts hold: a new major after a driver upgrade, cores readable now."""

    kind: ClassVar[str] = "chip.changed"
    chip: Chip


@value(frozen=True, slots=True)
class ChipRemoved:
    """A chip vanished; a lease that holds it keeps it as lost."""

    kind: ClassVar[str] = "chip.removed"
    index: int


@value(frozen=True, slots=True)
class ChipForeign:
    """These processes have a chip open or mapped without a lease; with none of them it is nobody's any more."""

    kind: ClassVar[str] = "chip.foreign"
    index: int
    users: tuple[User, ...]


@value(frozen=True, slots=True)
class LeaseQueued:
    """A request waits its turn."""

    kind: ClassVar[str] = "lease.queued"
    lease: Lease


@value(frozen=True, slots=True)
class LeaseGranted:
    """A request got its chips, at once or after waiting."""

    kind: ClassVar[str] = "lease.granted"
    lease: Lease


@value(frozen=True, slots=True)
class LeaseBound:
    """A lease is bound to something else now: a container instead of an intent, a later deadline."""

    kind: ClassVar[str] = "lease.bound"
    id: str
    binding: Binding


@value(frozen=True, slots=True)
class LeaseDraining:
    """The binding ended; the chips are withheld until no process has them open."""

    kind: ClassVar[str] = "lease.draining"
    id: str
    reason: str


@value(frozen=True, slots=True)
class LeaseStuck:
    """A lease drains for too long: these processes still have its chips open, or can't be looked into."""

    kind: ClassVar[str] = "lease.stuck"
    id: str
    users: tuple[User, ...]


@value(frozen=True, slots=True)
class LeaseRevived:
    """A lease that was at its end goes on: its container was started again before its chips were free."""

    kind: ClassVar[str] = "lease.revived"
    id: str


@value(frozen=True, slots=True)
class LeaseEnded:
    """A lease is over (or a request stopped waiting), and its chips are free."""

    kind: ClassVar[str] = "lease.ended"
    id: str
    reason: str


Event = (
    Opened
    | ChipAdded
    | ChipChanged
    | ChipRemoved
    | ChipForeign
    | LeaseQueued
    | LeaseGranted
    | LeaseBound
    | LeaseDraining
    | LeaseStuck
    | LeaseRevived
    | LeaseEnded
)

KINDS: dict[str, type[Event]] = {
    cls.kind: cls
    for cls in (
        Opened,
        ChipAdded,
        ChipChanged,
        ChipRemoved,
        ChipForeign,
        LeaseQueued,
        LeaseGranted,
        LeaseBound,
        LeaseDraining,
        LeaseStuck,
        LeaseRevived,
        LeaseEnded,
    )
}
"""The event types by the name that the journal and the watchers know them by."""
