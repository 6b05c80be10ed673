"""What the ledger refuses, as attributes and one sentence each.

Every error has a `kind`, which is also the name of the varlink error that a client sees.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime

from neurond.ledger.chips import chips_of
from neurond.ledger.leases import Lease
from neurond.ledger.words import ranges


class Refused(Exception):
    """A request that changed nothing; the sentence says why and what to do next."""

    kind = "Refused"

    def parameters(self) -> dict[str, object]:
        """Return what the client gets beside the name of the error."""
        return {"message": str(self)}


class InvalidRequest(Refused):
    """The request makes no sense on this kind of host, now or later."""

    kind = "InvalidRequest"


class NoSuchChip(Refused):
    """A chip was named that this host does not have."""

    kind = "NoSuchChip"


class NoSuchLease(Refused):
    """A lease was named that does not exist (any more)."""

    kind = "NoSuchLease"


class NotAllowed(Refused):
    """The caller may not do this."""

    kind = "NotAllowed"


class NoCapacity(Refused):
    """Legal, but not to be had now. `holders` are the leases in the way, oldest first."""

    kind = "NoCapacity"

    def __init__(self, sentence: str, holders: Sequence[Lease] = ()) -> None:
        super().__init__(sentence)
        self.holders = tuple(holders)

    def parameters(self) -> dict[str, object]:
        """Return the sentence and the ids of the leases in the way."""
        return {"message": str(self), "holders": [lease.id for lease in self.holders]}


class WaitTimedOut(NoCapacity):
    """The request waited as long as it was told to."""

    kind = "WaitTimedOut"


def clock(at: float, now: float) -> str:
    """Write a moment as people say it: the time of day, with the date if it was not today."""
    then, today = datetime.fromtimestamp(at).astimezone(), datetime.fromtimestamp(now).astimezone()
    return then.strftime("%H:%M" if then.date() == today.date() else "%Y-%m-%d %H:%M")


def name_holders(holders: Sequence[Lease], now: float, most: int = 4) -> str:
    """Say who holds what, as in "0-3 by alice (lease k3mq-7, train.py, since 14:02)"."""
    words = [
        f"{ranges(lease.chips)} by {lease.owner.name} (lease {lease.id}"
        + (f", {lease.name}" if lease.name else "")
        + f", since {clock(lease.since, now)}{'' if lease.state == 'active' else ', ' + lease.state})"
        for lease in holders[:most]
    ]
    if len(holders) > most:
        words.append(f"{len(holders) - most} more")
    return "; ".join(words)


def why_not(
    asked: str, free: int, size: int, *, fits: bool, holders: Sequence[Lease], problems: Mapping[int, str], now: float
) -> str:
    """Write the sentence of a NoCapacity: what was asked, what is free, and who is in the way."""
    count = free.bit_count()
    if count >= size and not fits:
        sentence = f"{asked}, {count} free but not a legal set (free: {ranges(chips_of(free))})"
    else:
        sentence = f"{asked}, {count} free" + (f" (free: {ranges(chips_of(free))})" if count else "")
    if problems:
        sentence += "; withheld: " + ", ".join(f"{chip} ({why})" for chip, why in sorted(problems.items()))
    if holders:
        sentence += f"; held: {name_holders(holders, now)}"
    return sentence
