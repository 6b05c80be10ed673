"""Ledgers of whole hosts, as most tests of the ledger begin with one."""

from collections.abc import Iterable

from neurond.catalog import look_up
from neurond.ledger.chips import Chip
from neurond.ledger.leases import ByConnection, Lease, Owner, Want
from neurond.ledger.ledger import Ledger

NOW = 1_750_000_000.0
ALICE, BOB, CAROL = Owner(1001, "alice"), Owner(1002, "bob"), Owner(1003, "carol")
SHELL = ByConnection(pid=4711)


def chips(indices: Iterable[int]) -> dict[int, Chip]:
    """Make sound chips, as discovery would find them."""
    return {index: Chip(index, f"/dev/neuron{index}", 240, index, cores=2) for index in indices}


def host(instance_type: str, indices: Iterable[int] | None = None) -> Ledger:
    """Open a ledger in epoch k3mq with all chips of an instance type, or with the given ones only."""
    kind = look_up(instance_type)
    ledger = Ledger(kind.topology, instance_type)
    ledger.open("k3mq")
    ledger.look(chips(range(kind.chips) if indices is None else indices), NOW)
    return ledger


def take(ledger: Ledger, want: Want, owner: Owner = ALICE, *, wait: bool = False) -> Lease:
    """Acquire chips, and return the lease or the waiting request."""
    return ledger.acquire(want, owner, SHELL, now=NOW, wait=wait)[0]


def states(ledger: Ledger, indices: Iterable[int]) -> list[str]:
    """Return the states of chips."""
    return [ledger.state_of(index) for index in indices]


def everything(ledger: Ledger) -> tuple[object, ...]:
    """Return the whole state that events make, in order, for comparison."""
    return (
        ledger.topology,
        ledger.epoch,
        ledger.chips,
        list(ledger.leases.values()),
        list(ledger.queue.values()),
        ledger.free,
        ledger._present,
        ledger._usable,
        ledger._held,
        ledger._next_number,
    )
