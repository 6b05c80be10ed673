"""Facts and wishes in, rules applied, effects out: the one owner of the ledger's state.

Everything here runs on the loop and never blocks, so each method is atomic. What happens to the ledger passes through
`happened`: journal, watchers, log, bindings and access all learn of it there.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import structlog

from neurond.daemon.access import Access
from neurond.daemon.bindings import Bindings
from neurond.daemon.logs import log_events
from neurond.daemon.points import ARMED, reach
from neurond.daemon.recording import Recording
from neurond.daemon.server import Connection, Server
from neurond.daemon.usage import GONE, Found, Usage, belongs
from neurond.daemon.watchers import Watchers
from neurond.host import processes
from neurond.host.journal import Journal
from neurond.host.opens import Opens
from neurond.ledger.chips import Chip, User, mask_of
from neurond.ledger.errors import NoCapacity, NoSuchLease, Refused, WaitTimedOut
from neurond.ledger.events import Event, LeaseBound, LeaseDraining, LeaseEnded, LeaseGranted, LeaseRevived
from neurond.ledger.leases import Binding, ByProcess, ByTime, Lease, OnContainers, Owner, Want
from neurond.ledger.ledger import Ledger
from neurond.ledger.values import value
from neurond.settings.table import Settings

log = structlog.get_logger()

AGE_SLACK = 1.0
"""Seconds by which the age of a process may be wrong: the kernel counts them in ticks."""
MOST_LOOKS = 3
SHORT_LEASE = 1.0
"""Seconds; of a lease that was shorter, inotify's word is taken for whether its chips were opened."""


@value(frozen=True, slots=True)
class Rules:
    """What is configured: the logical core setting, the group that may lease, our own uid, and the settings.

    A reload gives the broker other rules. `engine_gid` is the group that may start containers. `note` says what is
    remarkable about the host, such as why it has no chips.
    """

    lnc: int
    gid: int | None
    engine_gid: int | None
    uid: int
    note: Callable[[], str | None]
    settings: Settings = Settings()


@value(frozen=True, slots=True, eq=False)
class Waiter:
    """Who is told when a queued request has its outcome."""

    granted: Callable[[Lease], None]
    refused: Callable[[Refused], None]


@dataclass(slots=True)
class Waiting:
    """A queued request: who waits for it (several, if they gave the same key), and until when."""

    waiters: list[Waiter]
    timer: asyncio.TimerHandle


@value(frozen=True, slots=True)
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
    for_container: Literal["", "run", "create"] = ""


@value(frozen=True, slots=True)
class Orphan:
    """Why a lease has no holder now, and since when, by the loop's clock."""

    reason: str
    since: float


class Broker:
    """Owns the ledger. `server` is set once it exists."""

    def __init__(self, ledger: Ledger, journal: Journal, rules: Rules, seq: int) -> None:
        self.ledger = ledger
        self.rules = rules
        self.server: Server | None = None
        self.recording = Recording(ledger, journal, seq, self._recorded, self._recording_works_again)
        self.usage = Usage(Opens(), self.take_usage, lambda: self.rules.settings.look_every)
        self.access = Access(ledger)
        self.watchers = Watchers(seq)
        self._bindings = Bindings(self._binding_gone)
        self.orphans: dict[str, Orphan] = {}
        """Leases for a container whose docker command has ended, until it is known what became of the container."""
        self.on_orphan: Callable[[], None] = lambda: None
        self.before_replies: Callable[[], None] = lambda: None
        self._waiting: dict[str, Waiting] = {}
        self._ttls: dict[str, float] = {}
        self._foreign_processes: dict[int, tuple[User, ...]] = {}
        self._foreign_containers: dict[int, tuple[User, ...]] = {}
        self._guests: dict[str, tuple[User, ...]] = {}
        self._draining_since: dict[str, float] = {}
        self._just_draining: set[str] = set()
        self._closed_once: set[str] = set()
        self._left_over: dict[str, tuple[User, ...]] = {}
        self._follow_ups: dict[type[Event], Callable[[Any], None]] = {
            LeaseGranted: self._on_granted,
            LeaseBound: self._on_bound,
            LeaseDraining: self._on_draining,
            LeaseRevived: self._on_revived,
            LeaseEnded: self._on_ended,
        }
        self._now = 0.0  # the wall clock at which the calls of this turn are answered, 0 at other times
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
        # Whether these still have them only the engine can tell: until it does, they have.
        inside = {
            index: tuple(user for user in users if user.container) for index, users in self.ledger.foreign.items()
        }
        self._foreign_containers = {index: users for index, users in inside.items() if users}
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
            here = [*mine.get(lease.id, ()), *self._hidden(lease, found)]
            seen_in = {user.container for user in here}
            here += [guest for guest in self._guests.get(lease.id, ()) if guest.container not in seen_in]
            users = tuple(dict.fromkeys(here))
            self._left_over[lease.id] = users
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

    def take_containers(self, foreign: dict[int, tuple[User, ...]], guests: dict[str, tuple[User, ...]]) -> None:
        """Take in which containers have chips without a lease, and which by right of one (`guests`, by its id)."""
        self._foreign_containers, self._guests = foreign, guests
        self._note_foreign()
        if self._draining_since:
            self.usage.soon()

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
        self.ledger.doubted = self._opened()
        if self.ledger.doubted & self.ledger.free:  # also as the look above took the news from whom it would have woken
            self.usage.soon()

    def _drains_too_long(self, lease_id: str) -> bool:
        return time.monotonic() - self._draining_since[lease_id] > self.rules.settings.stuck_after

    def _binding_gone(self, lease_id: str, reason: str) -> None:
        """Take note of the end of a process, connection or time limit that a lease is bound to."""
        lease = self.ledger.leases.get(lease_id)
        holds = lease is not None and lease.state == "active" and isinstance(lease.binding, ByProcess)
        if lease is not None and holds and lease.for_container:
            self.orphans[lease_id] = Orphan(reason, self._loop.time())
            self.on_orphan()
        else:
            self.binding_ended(lease_id, reason)

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
        if (
            isinstance(lease.binding, OnContainers)
            or lease.id in self._guests
            or processes.boottime() - lease.up >= SHORT_LEASE
        ):
            return True
        return bool(self._opened() & mask_of(lease.chips))

    def end(self, lease_id: str, reason: str) -> None:
        """End a lease or a waiting request; nothing happens if it is over already."""
        if self.ledger.queue:
            self._doubt()
        try:
            events = self.ledger.end(lease_id, reason, self._now or time.time())
        except NoSuchLease:
            return
        self.happened(events)

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
        return not self._just_draining and not self._opened() & self.ledger.free

    async def known(self) -> None:
        """Look who has chips open, until that is known or some status tool opens them all the time."""
        for _ in range(MOST_LOOKS):
            if self.is_known():
                return
            await self.usage.look()

    def ask(self, wish: Wish, connection: Connection | None = None) -> Lease:
        """Lease chips now, or queue the request: then `join` says who is told of its outcome."""
        now = self._now or time.time()
        want = wish.want
        self.recording.must_work()
        if not self.ledger.chips and not (wish.wait and want.missing_ok):
            raise NoCapacity(self.rules.note() or "this host has no Neuron chips")
        lease, events = self.ledger.acquire(
            want,
            wish.owner,
            wish.binding,
            now=now,
            name=wish.name,
            wait=wish.wait > 0 and self._may_wait(wish.owner),
            key=wish.key,
            ttl=wish.ttl or 0,
            enforce=wish.enforce,
            for_container=wish.for_container,
        )
        if lease.state == "queued":
            timer = self._loop.call_later(wish.wait, self._waited_long_enough, lease.id, wish.wait)
            self._waiting[lease.id] = Waiting([], timer)
            if wish.ttl is not None:
                self._ttls[lease.id] = wish.ttl
        self.happened(events)
        if lease.state == "active" or wish.ttl is None:  # a time limit begins with the grant
            self._bindings.follow(lease.id, wish.binding, connection)
        return lease

    def why_waits(self, lease: Lease) -> str:
        """Say why a request waits."""
        return str(self.ledger.why_not(lease.want, time.time()))

    def _may_wait(self, owner: Owner) -> bool:
        waiting = self.ledger.waiting(owner.uid)
        if waiting >= self.rules.settings.most_waiting:
            raise NoCapacity(f"{waiting} requests of {owner.name} wait already, which is the limit for one user")
        return True

    def join(self, lease_id: str, waiter: Waiter) -> None:
        """Let a client wait for the outcome of a queued request."""
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
        self.recording.must_work()
        lease, events = self.ledger.adopt(owner, binding, chips, now=time.time(), name=name)
        self.happened(events)
        self._bindings.follow(lease.id, binding)
        return lease

    def bind(self, lease_id: str, binding: Binding) -> None:
        """Bind a lease to something else, in one step. Raises JournalFull if that can't be recorded now."""
        self.recording.must_work()
        self.happened(self.ledger.bind(lease_id, binding))

    def _waited_long_enough(self, lease_id: str, wait: float) -> None:
        lease = self.ledger.queue.get(lease_id)
        if lease is None:
            return
        waiting = self._waiting.pop(lease_id)
        reason = self.ledger.why_not(lease.want, time.time())
        self.end(lease_id, f"waited {wait:g} s in vain")
        for waiter in waiting.waiters:
            waiter.refused(WaitTimedOut(f"waited {wait:g} s: {reason}", reason.holders))

    # -- turns of the loop ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Take in what was opened, before the calls of a turn are answered: they were all read before this."""
        self.usage.opens.look()
        self._now = time.time()

    def _opened(self) -> int:
        """Return the mask of the chips that may be open; while calls are answered, as of the beginning of that."""
        return self.usage.opens.noted if self._now else self.usage.opens.look()

    # -- every change -----------------------------------------------------------------------------------------------

    def happened(self, events: Iterable[Event]) -> None:
        """Let everybody know what has happened to the ledger."""
        now = self._now or time.time()
        for event in events:
            self.recording.add(now, event)
            if ARMED:
                reach(event.kind)
            follow_up = self._follow_ups.get(type(event))
            if follow_up is not None:
                follow_up(event)
        if self.server is not None and not self._now:  # else the commit of this turn is due anyway
            self.server.flush_soon()

    def _recorded(self, news: list[tuple[float, Event]], encoded: list[bytes]) -> None:
        self.watchers.happened(encoded)
        log_events(news, self._loop.call_later)  # later, when the replies of this turn have left

    def _on_granted(self, event: LeaseGranted) -> None:
        lease = event.lease
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

    def _on_draining(self, event: LeaseDraining) -> None:
        self._bindings.forget(event.id)
        self._draining_since[event.id] = time.monotonic()
        self._just_draining.add(event.id)
        self.access.refresh_some(self.ledger.get(event.id).chips)
        self.usage.soon()

    def _on_revived(self, event: LeaseRevived) -> None:
        self._forget_end(event.id)
        self.access.refresh_some(self.ledger.get(event.id).chips)

    def _on_bound(self, event: LeaseBound) -> None:
        self.orphans.pop(event.id, None)
        self._bindings.forget(event.id)
        self._bindings.follow(event.id, event.binding)

    def _on_ended(self, event: LeaseEnded) -> None:
        lease_id = event.id
        self._bindings.forget(lease_id)
        if lease_id in self._draining_since:
            self._forget_end(lease_id)
        self._ttls.pop(lease_id, None)
        self.orphans.pop(lease_id, None)
        lease = self.ledger.ended[-1][0]
        if lease.id != lease_id:
            lease = next(lease for lease, _ in reversed(self.ledger.ended) if lease.id == lease_id)
        self.access.refresh_some(lease.chips)
        waiting = self._waiting.pop(lease_id, None)
        if waiting is not None:
            waiting.timer.cancel()
            for waiter in waiting.waiters:
                waiter.refused(NoCapacity(f"request {lease_id} is over: {event.reason}"))

    def _forget_end(self, lease_id: str) -> None:
        self._draining_since.pop(lease_id, None)
        self._just_draining.discard(lease_id)
        self._closed_once.discard(lease_id)
        self._left_over.pop(lease_id, None)

    def commit(self) -> dict[str, Refused]:
        """Write the journal and tell the watchers; return the leases whose news could not be written, with the error.

        The server calls this before it sends the replies of a turn.
        """
        self._now = 0.0
        broken = self.recording.commit(lambda lease_id: self.end(lease_id, "it could not be recorded"))
        self.watchers.tell()
        self.before_replies()
        return broken

    def _recording_works_again(self) -> None:
        self._doubt()
        self.happened(self.ledger.resume(time.time()))

    def _hidden(self, lease: Lease, found: Found) -> list[User]:
        """Return the processes that can't be looked into and may be left over from a lease: those not older than it."""
        lease_age = processes.boottime() - lease.up + AGE_SLACK
        hidden = [pid for pid, age in found.unreadable.items() if age < lease_age]
        return [User(pid, "?", "a process that can't be looked into") for pid in hidden]
