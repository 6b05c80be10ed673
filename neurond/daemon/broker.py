"""Facts and wishes in, rules applied, effects out: the one owner of the ledger's state.

Everything here runs on the loop and never blocks, so each method is atomic. What happens to the ledger passes through
`happened`: journal, watchers, log, bindings and access all learn of it there.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import structlog

from neurond import wire
from neurond.daemon.access import Access
from neurond.daemon.bindings import Bindings
from neurond.daemon.points import reach
from neurond.daemon.server import Connection, Server
from neurond.daemon.usage import GONE, Found, Usage, belongs
from neurond.daemon.watchers import Watchers
from neurond.host import processes
from neurond.host.journal import Journal, JournalError
from neurond.host.opens import Opens
from neurond.ledger.chips import Chip, User, mask_of
from neurond.ledger.errors import NoCapacity, NoSuchLease, Refused, WaitTimedOut
from neurond.ledger.events import (
    ChipAdded,
    ChipChanged,
    ChipForeign,
    ChipRemoved,
    Event,
    LeaseBound,
    LeaseDraining,
    LeaseEnded,
    LeaseGranted,
    LeaseQueued,
    LeaseStuck,
)
from neurond.ledger.leases import Binding, ByContainer, ByTime, Lease, Owner, Want
from neurond.ledger.ledger import Ledger

log = structlog.get_logger()

COMPACT_AFTER = 20_000
"""Records after which the journal is replaced by a snapshot."""
JOURNAL_RETRY = 0.5
CLOCK_SLACK = 1.0
MOST_LOOKS = 3
SHORT_LEASE = 1.0
"""Seconds; of a lease that was shorter, inotify's word is taken for whether its chips were opened."""
STUCK_AFTER = float(os.environ.get("NEUROND_STUCK_AFTER", "30"))
"""Seconds that a lease may drain before it is called stuck."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What is configured: the logical core setting, the group that may lease, and our own uid.

    `note` says what is remarkable about the host, such as why it has no chips.
    """

    lnc: int
    gid: int | None
    uid: int
    note: Callable[[], str | None]


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """Who is told when a queued request has its outcome."""

    granted: Callable[[Lease], None]
    refused: Callable[[Refused], None]


@dataclass(slots=True)
class Waiting:
    """A queued request: who waits for it (several, if they gave the same key), and until when."""

    waiters: list[Waiter]
    timer: asyncio.TimerHandle


@dataclass(frozen=True, slots=True)
class Wish:
    """A request for chips, checked and complete; `wait` and `ttl` (a limit that counts from the grant) in seconds."""

    want: Want
    owner: Owner
    binding: Binding
    name: str = ""
    wait: float = 0
    ttl: float | None = None
    key: str = ""
    enforce: bool = False


class Broker:
    """Owns the ledger. `server` is set once it exists."""

    def __init__(self, ledger: Ledger, journal: Journal, rules: Rules, seq: int) -> None:
        self.ledger = ledger
        self.rules = rules
        self.seq = seq
        self.server: Server | None = None
        self.usage = Usage(Opens(), self.take_usage)
        self.access = Access(ledger)
        self.watchers = Watchers(seq)
        self._journal = journal
        self._bindings = Bindings(self.binding_ended)
        self._waiting: dict[str, Waiting] = {}
        self._ttls: dict[str, float] = {}
        self._foreign_processes: dict[int, tuple[User, ...]] = {}
        self._foreign_containers: dict[int, tuple[User, ...]] = {}
        self._draining_since: dict[str, float] = {}
        self._just_draining: set[str] = set()
        self._closed_once: set[str] = set()
        self._left_over: dict[str, tuple[User, ...]] = {}
        self._unwritten: list[str] = []
        self._recorded: list[tuple[str, asyncio.Future[None]]] = []
        self._compact_after = COMPACT_AFTER
        self._retrying = False
        self._loop = asyncio.get_running_loop()

    # -- facts ------------------------------------------------------------------------------------------------------

    async def start(self, events: Iterable[Event]) -> None:
        """Take over a recovered ledger and what recovery just decided: begin to follow every lease that lives.

        When this returns, the journal holds the present state, and who has chips open is known.
        """
        self.usage.watch(self.ledger.chips)
        for lease in self.ledger.leases.values():
            if lease.state == "active":
                self._bindings.follow(lease.id, lease.binding)
            else:
                self._draining_since[lease.id] = time.monotonic()
        self.happened(events)
        self.access.refresh()
        reach("start.recovered")
        self.commit()
        reach("start.journalled")
        for _ in range(2):  # a lease ends at the second look that finds its chips closed
            await self.usage.look()
        self.commit()

    def take_chips(self, found: dict[int, Chip]) -> None:
        """Take in the whole set of chips that the host has now."""
        self.usage.watch(found)
        self._doubt()
        self.happened(self.ledger.look(found, time.time()))
        self.access.refresh()

    def take_usage(self, found: Found) -> bool:
        """Take in which processes have chips open now; return whether to look again before long."""
        mine: dict[str, list[User]] = {}
        foreign: dict[int, tuple[User, ...]] = {}
        for index, seen_here in found.by_chip.items():
            lease = self.ledger.holder_of(index)
            for seen in seen_here:
                if lease is not None and (belongs(seen, lease) or seen.uid == GONE):
                    mine.setdefault(lease.id, []).append(seen.user)
                else:
                    foreign[index] = (*foreign.get(index, ()), seen.user)
        self._foreign_processes = foreign
        self._note_foreign()
        self.happened(self.ledger.settle(found.missed, time.time()))
        for lease in [lease for lease in self.ledger.leases.values() if lease.state in {"draining", "stuck"}]:
            if self._draining_since[lease.id] >= found.began or found.missed & mask_of(lease.chips):
                continue  # this look is too old to tell, and the next one is due
            users = self._left_over[lease.id] = tuple(dict.fromkeys([*mine.get(lease.id, ()), *_hidden(lease, found)]))
            if not users and lease.id in self._closed_once:
                self.end(lease.id, "no process has its chips open")
            elif not users:
                # Not at the first sight: a process that ends hides its descriptors before they are closed, and one that
                # forks and ends may slip through a look.
                self._closed_once.add(lease.id)
                continue
            self._closed_once.discard(lease.id)
            self._just_draining.discard(lease.id)
            if users and self._drains_too_long(lease.id) and (lease.state != "stuck" or lease.users != users):
                self.happened(self.ledger.stick(lease.id, users))
        return bool(self._draining_since or foreign)

    def left_over(self, lease_id: str) -> tuple[User, ...]:
        """Return the processes that still have chips of a draining lease open, as of the last look."""
        return self._left_over.get(lease_id, ())

    def take_containers(self, foreign: dict[int, tuple[User, ...]]) -> None:
        """Take in which containers were given chips that they have no lease for."""
        self._foreign_containers = foreign
        self._note_foreign()

    def _note_foreign(self) -> None:
        both: dict[int, tuple[User, ...]] = {}
        for index in self._foreign_processes.keys() | self._foreign_containers.keys():
            processes_here = self._foreign_processes.get(index, ())
            inside = {user.container for user in processes_here}
            containers_here = self._foreign_containers.get(index, ())
            both[index] = (*processes_here, *(user for user in containers_here if user.container not in inside))
        self._doubt()
        self.happened(self.ledger.used(both, time.time()))

    def _doubt(self) -> None:
        """Have those who wait wait for a look, where a free chip was opened since the last one."""
        self.ledger.doubted = self.usage.opens.look()
        if self.ledger.doubted & self.ledger.free:  # also as the look above took the news from whom it would have woken
            self.usage.soon()

    def _drains_too_long(self, lease_id: str) -> bool:
        return time.monotonic() - self._draining_since[lease_id] > STUCK_AFTER

    def binding_ended(self, lease_id: str, reason: str) -> None:
        """End a lease whose binding has ended; one that is over already is none of anybody's business.

        Its chips are free at once if nobody can have them open, else when nobody has.
        """
        lease = self.ledger.leases.get(lease_id) or self.ledger.queue.get(lease_id)
        if lease is None:
            return
        if lease.state == "active" and self._may_be_open(lease):
            self.happened(self.ledger.drain(lease_id, reason, time.time()))
        elif lease.state in {"active", "queued"}:
            self.end(lease_id, reason)

    def _may_be_open(self, lease: Lease) -> bool:
        """Tell whether somebody may have chips of a lease open.

        An open is only seen on the nodes that are watched: not in a container, nor on a node made by hand. A lease that
        lasted long enough for such a thing is worth a look through /proc; inotify's word is for the shortest only.
        """
        if isinstance(lease.binding, ByContainer) or not 0 <= time.time() - lease.since < SHORT_LEASE:
            return True
        return bool(self.usage.opens.look() & mask_of(lease.chips))

    def end(self, lease_id: str, reason: str) -> None:
        """End a lease or a waiting request; nothing happens if it is over already."""
        self._doubt()
        with suppress(NoSuchLease):
            self.happened(self.ledger.end(lease_id, reason, time.time()))

    def disconnected(self, connection: Connection) -> None:
        """Take note that a client is gone."""
        self._bindings.disconnected(connection)
        self.watchers.disconnected(connection)

    # -- wishes -----------------------------------------------------------------------------------------------------

    def is_known(self) -> bool:
        """Tell whether it is known who has chips open.

        It is not while a free chip was just opened, perhaps by a stranger, or a lease has just begun to drain, perhaps
        with nobody on its chips.
        """
        return not self._just_draining and not self.usage.opens.look() & self.ledger.free

    async def known(self) -> None:
        """Look who has chips open, until that is known or some status tool opens them all the time."""
        for _ in range(MOST_LOOKS):
            if self.is_known():
                return
            await self.usage.look()

    def ask(self, wish: Wish, waiter: Waiter, connection: Connection | None = None) -> tuple[Lease, NoCapacity | None]:
        """Lease chips now, or queue the request: then `waiter` has the outcome, and why it waits is returned too."""
        now = time.time()
        want = wish.want
        if self.ledger.paused:
            raise wire.JournalFull(self.ledger.paused)
        if not self.ledger.chips and not (wish.wait and want.missing_ok):
            raise NoCapacity(self.rules.note() or "this host has no Neuron chips")
        lease, events = self.ledger.acquire(
            want,
            wish.owner,
            wish.binding,
            now=now,
            name=wish.name,
            wait=wish.wait > 0,
            key=wish.key,
            enforce=wish.enforce,
        )
        reason = None
        if isinstance(events[0], LeaseQueued):
            reason = self.ledger.why_not(want, now)
            timer = self._loop.call_later(wish.wait, self._waited_long_enough, lease.id, wish.wait)
            self._waiting[lease.id] = Waiting([waiter], timer)
            if wish.ttl is not None:
                self._ttls[lease.id] = wish.ttl
        if reason is None or wish.ttl is None:  # a time limit begins with the grant
            self._bindings.follow(lease.id, wish.binding, connection)
        self.happened(events)
        return lease, reason

    def join(self, lease_id: str, waiter: Waiter) -> None:
        """Let one more client wait for the outcome of a queued request."""
        self._waiting[lease_id].waiters.append(waiter)

    def leave(self, lease_id: str, waiter: Waiter, reason: str) -> None:
        """Take a client away that waited; the request is over when nobody waits for it any more."""
        waiting = self._waiting.get(lease_id)
        if waiting is not None:
            waiting.waiters.remove(waiter)
            if not waiting.waiters:
                self.end(lease_id, reason)

    def adopt(self, owner: Owner, binding: Binding, chips: tuple[int, ...], name: str) -> Lease:
        """Turn a use without a lease into a lease in place."""
        if self.ledger.paused:
            raise wire.JournalFull(self.ledger.paused)
        lease, events = self.ledger.adopt(owner, binding, chips, now=time.time(), name=name)
        self._bindings.follow(lease.id, binding)
        self.happened(events)
        return lease

    def _waited_long_enough(self, lease_id: str, wait: float) -> None:
        lease = self.ledger.queue.get(lease_id)
        if lease is None:
            return
        waiting = self._waiting.pop(lease_id)
        reason = self.ledger.why_not(lease.want, time.time())
        self.end(lease_id, f"waited {wait:g} s in vain")
        for waiter in waiting.waiters:
            waiter.refused(WaitTimedOut(f"waited {wait:g} s: {reason}", reason.holders))

    # -- every change -----------------------------------------------------------------------------------------------

    def happened(self, events: Iterable[Event]) -> None:
        """Let everybody know what has happened to the ledger."""
        now = time.time()
        for event in events:
            self.seq += 1
            if self._journal.is_open:  # else the snapshot that it will begin with has this too
                self._journal.append(self.seq, now, event)
            self.watchers.happened(self.seq, now, event)
            log.info(event.kind, **_fields(event))
            reach(event.kind)
            match event:
                case LeaseGranted(lease):
                    self._granted(lease)
                case LeaseEnded(lease_id, reason):
                    self._ended(lease_id, reason)
                case LeaseDraining(lease_id):
                    self._bindings.forget(lease_id)
                    self._draining_since[lease_id] = time.monotonic()
                    self._just_draining.add(lease_id)
                    self.access.refresh_some(self.ledger.get(lease_id).chips)
                    self.usage.soon()
                case LeaseBound(lease_id, binding):
                    self._bindings.follow(lease_id, binding)
                case _:
                    pass
        if self.server is not None:
            self.server.flush_soon()

    def _granted(self, lease: Lease) -> None:
        self._unwritten.append(lease.id)
        self.access.refresh_some(lease.chips)
        waiting = self._waiting.pop(lease.id, None)
        if waiting is None:
            return
        waiting.timer.cancel()
        ttl = self._ttls.pop(lease.id, None)
        if ttl is not None:
            self.happened(self.ledger.bind(lease.id, ByTime(processes.boottime() + ttl)))
        for waiter in waiting.waiters:
            waiter.granted(self.ledger.get(lease.id))

    def _ended(self, lease_id: str, reason: str) -> None:
        self._bindings.forget(lease_id)
        self._draining_since.pop(lease_id, None)
        self._just_draining.discard(lease_id)
        self._closed_once.discard(lease_id)
        self._left_over.pop(lease_id, None)
        self._ttls.pop(lease_id, None)
        lease, _ = self.ledger.ended[-1]
        self.access.refresh_some(lease.chips)
        waiting = self._waiting.pop(lease_id, None)
        if waiting is not None:
            waiting.timer.cancel()
            for waiter in waiting.waiters:
                waiter.refused(NoCapacity(f"request {lease_id} is over: {reason}"))

    def commit(self) -> dict[str, Refused]:
        """Write the journal; return the leases granted in this turn if they could not be written, as revoked.

        The server calls this before it sends the replies of a turn.
        """
        revoked: dict[str, Refused] = {}
        try:
            self._write()
        except JournalError as error:
            self._pause(error)
            revoked = dict.fromkeys(self._unwritten, wire.JournalFull(self.ledger.paused))
            for lease_id in revoked:
                self.end(lease_id, "it could not be recorded")
        self._unwritten.clear()
        recorded, self._recorded = self._recorded, []
        for lease_id, future in recorded:
            if not future.done():
                future.set_exception(revoked[lease_id]) if lease_id in revoked else future.set_result(None)
        self.watchers.tell()
        return revoked

    async def recorded(self, lease_id: str) -> None:
        """Wait until a grant of this turn is in the journal. Raises JournalFull if it could not be."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._recorded.append((lease_id, future))
        await future

    def _write(self) -> None:
        reach("journal.before-write")
        if not self._journal.is_open:
            self._write_snapshot()
        self._journal.flush()
        reach("journal.after-write")
        if self._journal.records > self._compact_after:
            self._compact_after = COMPACT_AFTER
            try:
                self._write_snapshot()
            except JournalError as error:
                self._compact_after = self._journal.records + COMPACT_AFTER
                log.warning("journal.not_compacted", error=str(error), follows="appending to the old file")

    def _write_snapshot(self) -> None:
        now = time.time()
        self._journal.start(self.seq, [(now, event) for event in self.ledger.snapshot()])

    def _pause(self, error: JournalError) -> None:
        if not self.ledger.paused:
            log.error("journal.failed", error=str(error), follows="nothing is granted until it can be written")
        self.ledger.paused = f"nothing can be granted: {error}; leases that exist are untouched"
        if not self._retrying:
            self._retrying = True
            self._loop.call_later(JOURNAL_RETRY, self._retry)

    def _retry(self) -> None:
        self._retrying = False
        try:
            self._write()
        except JournalError as error:
            self._pause(error)
        else:
            log.info("journal.recovered")
            self._doubt()
            self.happened(self.ledger.resume(time.time()))


def _hidden(lease: Lease, found: Found) -> list[User]:
    """Return the processes that can't be looked into and may be left over from a lease: those not older than it."""
    lease_age = time.time() - lease.since + CLOCK_SLACK
    hidden = [pid for pid, age in found.unreadable.items() if age < lease_age]
    return [User(pid, "?", "a process that can't be looked into") for pid in hidden]


def _fields(event: Event) -> dict[str, object]:  # noqa: PLR0911 - a case per event
    """Return what the log says of an event."""
    match event:
        case LeaseGranted(lease) | LeaseQueued(lease):
            said = {"lease": lease.id, "owner": lease.owner.name, "binding": lease.binding.kind, "name": lease.name}
            return said | ({"chips": list(lease.chips)} if lease.chips else {"asked": str(lease.want.count or "set")})
        case LeaseEnded(lease_id, reason) | LeaseDraining(lease_id, reason):
            return {"lease": lease_id, "reason": reason}
        case LeaseStuck(lease_id, users):
            return {"lease": lease_id, "users": [str(user) for user in users]}
        case LeaseBound(lease_id, binding):
            return {"lease": lease_id, "binding": binding.kind}
        case ChipAdded(chip) | ChipChanged(chip):
            return {"chip": chip.index, "device": f"{chip.major}:{chip.minor}", "problem": chip.problem}
        case ChipRemoved(index):
            return {"chip": index}
        case ChipForeign(index, users):
            return {"chip": index, "users": [str(user) for user in users]}
        case _:
            return {}
