"""Requests and facts in, rules applied, effects out: the one owner of the ledger's state.

Everything here runs on the loop and never blocks, so each method is atomic. What happens to the ledger passes through
`_happened`: journal, watchers, log and bindings all learn of it there.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass

import msgspec
import structlog

from neurond import wire
from neurond.daemon import views
from neurond.daemon.bindings import Bindings
from neurond.daemon.server import Call, Connection, Handler, Peer, Server
from neurond.host import processes
from neurond.host.journal import Journal, JournalError, encode_event
from neurond.host.opens import Opens
from neurond.ledger.chips import Chip, mask_of
from neurond.ledger.errors import InvalidRequest, NoCapacity, NoSuchLease, NotAllowed, Refused, WaitTimedOut
from neurond.ledger.events import (
    ChipAdded,
    ChipChanged,
    Event,
    LeaseBound,
    LeaseDraining,
    LeaseEnded,
    LeaseGranted,
    LeaseQueued,
)
from neurond.ledger.leases import Binding, ByConnection, ByContainer, ByProcess, ByTime, Lease, Owner, Want
from neurond.ledger.ledger import Ledger

log = structlog.get_logger()

KEPT_EVENTS = 10_000
COMPACT_AFTER = 20_000
"""Records after which the journal is replaced by a snapshot."""
LONGEST_NAME = 128
JOURNAL_RETRY = 0.5
DRAIN_FIRST, DRAIN_LAST = 0.05, 1.0
"""Seconds between two looks at who still has a draining chip open: the first pause and the longest."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What is configured: the logical core setting, the group that may lease, and our own uid.

    `note` says what is remarkable about the host, such as why it has no chips.
    """

    lnc: int
    gid: int | None
    uid: int
    note: Callable[[], str | None]


@dataclass(slots=True)
class Waiter:
    """Who is told when a queued request has its outcome."""

    granted: Callable[[Lease], None]
    refused: Callable[[Refused], None]
    ttl: float | None
    timer: asyncio.TimerHandle | None = None


class Broker:
    """Owns the ledger. `server` is set once it exists."""

    def __init__(self, ledger: Ledger, journal: Journal, opens: Opens, rules: Rules, seq: int) -> None:
        self.ledger = ledger
        self.rules = rules
        self.seq = seq
        self.server: Server | None = None
        self.on_ended: list[Callable[[str], None]] = []
        self._journal = journal
        self._opens = opens
        self._bindings = Bindings(self.binding_ended)
        self._waiters: dict[str, Waiter] = {}
        self._events: deque[tuple[int, float, Event]] = deque(maxlen=KEPT_EVENTS)
        self._watchers: dict[Call, int] = {}
        self._unwritten: list[str] = []
        self._recorded: list[tuple[str, asyncio.Future[None]]] = []
        self._compact_after = COMPACT_AFTER
        self._retrying = False
        self._devices: dict[int, processes.Device] = {}
        self._draining: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    # -- start and news ---------------------------------------------------------------------------------------------

    async def start(self, events: Iterable[Event]) -> None:
        """Take over a recovered ledger and what recovery just decided: begin to follow every lease that lives.

        When this returns, the journal holds the present state, and what could be drained at once is free.
        """
        self._devices = {index: (chip.major, chip.minor) for index, chip in self.ledger.chips.items()}
        self._opens.watch({chip.node: index for index, chip in self.ledger.chips.items()})
        for lease in self.ledger.leases.values():
            if lease.state == "active":
                self._bindings.follow(lease.id, lease.binding)
        self.happened(events)
        self.commit()
        await self._drain_once()
        self._drain_soon()

    def take_chips(self, found: dict[int, Chip]) -> None:
        """Take in the whole set of chips that the host has now."""
        self._opens.watch({chip.node: index for index, chip in found.items()})
        self.happened(self.ledger.look(found, time.time()))

    def binding_ended(self, lease_id: str, reason: str) -> None:
        """End a lease whose binding has ended; one that is over already is none of anybody's business.

        Its chips are free at once if nobody can have them open, else when nobody has.
        """
        lease = self.ledger.leases.get(lease_id) or self.ledger.queue.get(lease_id)
        if lease is None:
            return
        in_container = isinstance(lease.binding, ByContainer)  # whose nodes are not the ones that are watched
        if lease.state == "active" and (in_container or self._opens.look() & mask_of(lease.chips)):
            self.happened(self.ledger.drain(lease_id, reason, time.time()))
        elif lease.state != "draining":
            self.end(lease_id, reason)

    def disconnected(self, connection: Connection) -> None:
        """Take note that a client is gone."""
        self._bindings.disconnected(connection)
        for call in [call for call in self._watchers if call.connection is connection]:
            del self._watchers[call]

    # -- every change -----------------------------------------------------------------------------------------------

    def happened(self, events: Iterable[Event]) -> None:
        """Let everybody know what has happened to the ledger."""
        now = time.time()
        for event in events:
            self.seq += 1
            if self._journal.is_open:  # else the snapshot that it will begin with has this too
                self._journal.append(self.seq, now, event)
            self._events.append((self.seq, now, event))
            log.info(event.kind, **_fields(event))
            match event:
                case LeaseGranted(lease):
                    self._granted(lease)
                case LeaseEnded(lease_id) | LeaseDraining(lease_id):
                    self._let_go(event, lease_id)
                case LeaseBound(lease_id, binding):
                    self._bindings.follow(lease_id, binding)
                case ChipAdded(chip) | ChipChanged(chip):
                    self._devices[chip.index] = chip.major, chip.minor
                case _:
                    pass
        if self.server is not None:
            self.server.flush_soon()

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
        for call, told in list(self._watchers.items()):
            self._tell(call, told)
        return revoked

    async def recorded(self, lease_id: str) -> None:
        """Wait until a grant of this turn is in the journal. Raises JournalFull if it could not be."""
        future: asyncio.Future[None] = self._loop.create_future()
        self._recorded.append((lease_id, future))
        await future

    def _write(self) -> None:
        if not self._journal.is_open:
            self._write_snapshot()
        self._journal.flush()
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
            self.happened(self.ledger.resume(time.time()))

    def _granted(self, lease: Lease) -> None:
        self._unwritten.append(lease.id)
        waiter = self._waiters.pop(lease.id, None)
        if waiter is not None:
            if waiter.timer is not None:
                waiter.timer.cancel()
            if waiter.ttl is not None:  # a time limit counts from the grant, not from the request
                self.happened(self.ledger.bind(lease.id, ByTime(processes.boottime() + waiter.ttl)))
            waiter.granted(self.ledger.get(lease.id))

    def _let_go(self, event: LeaseEnded | LeaseDraining, lease_id: str) -> None:
        self._bindings.forget(lease_id)
        if isinstance(event, LeaseDraining):
            self._drain_soon()
            return
        waiter = self._waiters.pop(lease_id, None)
        if waiter is not None:
            waiter.refused(NoCapacity(f"request {lease_id} is over: {event.reason}"))
        for told in self.on_ended:
            told(lease_id)

    # -- draining ---------------------------------------------------------------------------------------------------

    def _drain_soon(self) -> None:
        if self._draining is None or self._draining.done():
            self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        pause = DRAIN_FIRST
        while await self._drain_once():
            await asyncio.sleep(pause)
            pause = min(2 * pause, DRAIN_LAST)

    async def _drain_once(self) -> bool:
        """End the draining leases whose chips no process has open; True if some are left to look at again."""
        draining = [lease for lease in self.ledger.leases.values() if lease.state == "draining"]
        if draining:
            chips = {index for lease in draining for index in lease.chips} & self._devices.keys()
            self._opens.forget(mask_of(tuple(chips)))
            users = await asyncio.to_thread(processes.users_of, {self._devices[index] for index in chips})
            self._opens.maybe_open |= mask_of(tuple(index for index in chips if users.get(self._devices[index])))
            for lease in draining:
                if not any(users.get(self._devices[index]) for index in lease.chips if index in chips):
                    self.end(lease.id, "no process has its chips open")
        return any(lease.state == "draining" for lease in self.ledger.leases.values())

    def end(self, lease_id: str, reason: str) -> None:
        """End a lease or a waiting request; nothing happens if it is over already."""
        with suppress(NoSuchLease):
            self.happened(self.ledger.end(lease_id, reason, time.time()))

    # -- requests ---------------------------------------------------------------------------------------------------

    def handlers(self) -> dict[str, Handler]:
        """Return the functions that answer calls, by the method's name."""
        return {
            "Acquire": self._acquire,
            "Release": self._release,
            "Renew": self._renew,
            "Environment": self._environment,
            "ListChips": self._list_chips,
            "ListLeases": self._list_leases,
            "Watch": self._watch,
        }

    def may_lease(self, peer: Peer) -> None:
        """Raise NotAllowed unless the peer may hold chips."""
        if peer.uid in {0, self.rules.uid} or (self.rules.gid is not None and self.rules.gid in peer.groups):
            return
        hint = (
            "join it (usermod -aG neuron) and log in again"
            if self.rules.gid is not None
            else "it does not exist here: groupadd --system neuron, then restart neurond"
        )
        raise NotAllowed(f"{processes.user_name(peer.uid)} may not lease chips: that takes the group neuron; {hint}")

    def must_own(self, peer: Peer, lease: Lease) -> None:
        """Raise NotAllowed unless the lease is the peer's, or the peer is root."""
        if peer.uid not in {0, lease.owner.uid}:
            raise NotAllowed(f"lease {lease.id} belongs to {lease.owner.name}: only {lease.owner.name} or root may")

    def ask(  # noqa: PLR0917 - all of a request
        self, want: Want, peer: Peer, binding: Binding, name: str, wait: float, waiter: Waiter
    ) -> tuple[Lease, NoCapacity | None]:
        """Lease chips now, or queue the request: then `waiter` has the outcome, and why it waits is returned too."""
        now = time.time()
        owner = Owner(peer.uid, processes.user_name(peer.uid))
        if self.ledger.paused:
            raise wire.JournalFull(self.ledger.paused)
        if not self.ledger.chips and not (wait and want.missing_ok):
            raise NoCapacity(self.rules.note() or "this host has no Neuron chips")
        lease, events = self.ledger.acquire(want, owner, binding, now=now, name=name, wait=wait > 0)
        reason = None
        if isinstance(events[0], LeaseQueued):
            reason = self.ledger.why_not(want, now)
            self._waiters[lease.id] = waiter
            waiter.timer = self._loop.call_later(wait, self._waited_long_enough, lease.id, wait)
        self.happened(events)
        return lease, reason

    def _acquire(self, call: Call, request: wire.Acquire) -> wire.Acquired | None:
        self.may_lease(call.peer)
        want = want_of(request.count, request.chips, every=request.all, missing_ok=request.missing_ok)
        wait = seconds("wait", request.wait or 0)
        name = checked_name(request.name or "")
        binding = self._binding(call.peer, request)

        def granted(lease: Lease) -> None:
            call.on_gone = None
            call.reply(self._acquired(lease, request), grants=lease.id)

        lease, reason = self.ask(want, call.peer, binding, name, wait, Waiter(granted, call.fail, request.ttl))
        if reason is None:
            self._bindings.follow(lease.id, binding, call.connection)
            granted(lease)
            return None
        if not isinstance(binding, ByTime):  # a time limit begins with the grant
            self._bindings.follow(lease.id, binding, call.connection)
        call.on_gone = lambda: self.end(lease.id, "the client went away while it waited")
        if call.more:
            call.reply(wire.Acquired(lease.id, [], waiting=str(reason)), last=False)
        return None

    def _acquired(self, lease: Lease, request: wire.Acquire) -> wire.Acquired:
        env = views.environment(self.ledger, lease, self.rules.lnc) if request.env else None
        return wire.Acquired(lease.id, list(lease.chips), env)

    def _waited_long_enough(self, lease_id: str, wait: float) -> None:
        waiter = self._waiters.pop(lease_id, None)
        lease = self.ledger.queue.get(lease_id)
        if waiter is None or lease is None:
            return
        reason = self.ledger.why_not(lease.want, time.time())
        self.end(lease_id, f"waited {wait:g} s in vain")
        waiter.refused(WaitTimedOut(f"waited {wait:g} s: {reason}", reason.holders))

    def _binding(self, peer: Peer, request: wire.Acquire) -> Binding:
        if request.pid is not None and request.ttl is not None:
            raise InvalidRequest("a lease is bound to a process or to a time limit, not to both")
        if request.ttl is not None:
            return ByTime(processes.boottime() + seconds("ttl", request.ttl, least=0.001))
        if request.pid is None:
            return ByConnection(peer.pid)
        pid = request.pid or peer.pid  # pid 0 is the caller, whatever its own pid namespace calls it
        try:
            ticks, uid = processes.start_ticks(pid), processes.owner_of(pid)
        except processes.ProcessGone as error:
            raise InvalidRequest(f"{error}: a lease needs a living process to be bound to") from None
        if peer.uid not in {0, uid}:
            owner = processes.user_name(uid)
            raise NotAllowed(f"process {pid} belongs to {owner}: bind a lease to a process of your own")
        return ByProcess(pid, ticks)

    def _release(self, call: Call, request: wire.OfLease) -> wire.Released:
        lease = self.ledger.get(request.lease)
        self.must_own(call.peer, lease)
        by = processes.user_name(call.peer.uid)
        self.binding_ended(lease.id, f"released by {by}")
        return wire.Released("draining" if lease.id in self.ledger.leases else "ended")

    def _renew(self, call: Call, request: wire.Renew) -> wire.Renewed:
        lease = self.ledger.get(request.lease)
        self.must_own(call.peer, lease)
        if not isinstance(lease.binding, ByTime):
            raise InvalidRequest(f"lease {lease.id} has no time limit: it is bound to a {lease.binding.kind}")
        if lease.state != "active":
            raise InvalidRequest(f"lease {lease.id} is {lease.state}: only an active lease can be renewed")
        ttl = seconds("ttl", request.ttl, least=0.001)
        self.happened(self.ledger.bind(lease.id, ByTime(processes.boottime() + ttl)))
        return wire.Renewed(time.time() + ttl)

    def _environment(self, call: Call, request: wire.OfLease) -> wire.Environment:
        lease = self.ledger.get(request.lease)
        self.must_own(call.peer, lease)
        return wire.Environment(lease.id, list(lease.chips), views.environment(self.ledger, lease, self.rules.lnc))

    def _list_chips(self, call: Call, request: wire.Nothing) -> wire.Chips:
        del call, request
        held = {index for lease in self.ledger.leases.values() for index in lease.chips}
        indices = sorted(self.ledger.chips.keys() | held)
        return wire.Chips(
            self.ledger.instance_type,
            self.ledger.topology.shape,
            [views.chip_view(self.ledger, index, self.rules.lnc) for index in indices],
            self.rules.note(),
        )

    def _list_leases(self, call: Call, request: wire.ListLeases) -> wire.Leases:
        del call
        leases = [views.ended_view(lease, reason) for lease, reason in self.ledger.ended] if request.ended else []
        living = (*self.ledger.leases.values(), *self.ledger.queue.values())
        return wire.Leases(leases + [views.lease_view(lease) for lease in living])

    def _watch(self, call: Call, request: wire.Watch) -> None:
        if not call.more:
            raise InvalidRequest("Watch streams events: call it with more")
        oldest = self._events[0][0] if self._events else self.seq + 1
        if request.since is not None and not oldest <= request.since <= self.seq + 1:
            raise wire.Lagged(f"event {request.since} is not kept: the events {oldest} to {self.seq} are")
        self._watchers[call] = self.seq if request.since is None else request.since - 1
        self._tell(call, self._watchers[call])

    def _tell(self, call: Call, told: int) -> None:
        """Send a watcher the events after number `told`; drop it if it reads too slowly."""
        if call.unread() > wire.MAX_MESSAGE:
            del self._watchers[call]
            call.fail(wire.Lagged(f"events are read too slowly: go on with since={told + 1}"))
            return
        for seq, at, event in self._after(told):
            call.reply(wire.Watched(msgspec.Raw(encode_event(seq, at, event))), last=False)
        self._watchers[call] = self.seq

    def _after(self, told: int) -> list[tuple[int, float, Event]]:
        return [self._events[-n] for n in range(min(self.seq - told, len(self._events)), 0, -1)]


def want_of(count: int | None, chips: list[int] | None, *, every: bool | None, missing_ok: bool | None) -> Want:
    """Make the ledger's request of what came over the wire. Raises InvalidRequest."""
    if (count is not None) + (chips is not None) + bool(every) != 1:
        raise InvalidRequest("ask for chips in one way: by count (-n), by number (--chips) or --all")
    if count is not None and count < 1:
        raise InvalidRequest(f"{count} chips asked: ask for at least 1")
    if chips is not None and (not chips or min(chips) < 0):
        raise InvalidRequest(
            f"chips {','.join(map(str, chips)) or 'none'} asked: name chips by their numbers, from 0 on"
        )
    if chips is not None and len(chips) > 4096:
        raise InvalidRequest(f"{len(chips)} chips named: no host has as many")
    return Want(count or 0, tuple(chips or ()), bool(every), bool(missing_ok))


def seconds(what: str, value: float, least: float = 0) -> float:
    """Check a number of seconds. Raises InvalidRequest."""
    if not least <= value <= wire.MAX_WAIT:
        raise InvalidRequest(f"{what} of {value:g} s: between {least:g} and {wire.MAX_WAIT:g} s are possible")
    return value


def checked_name(name: str) -> str:
    """Check a name that people will see on their terminals. Raises InvalidRequest."""
    if len(name) > LONGEST_NAME or not (name.isprintable()):
        raise InvalidRequest(f"a name has at most {LONGEST_NAME} printable characters")
    return name


def _fields(event: Event) -> dict[str, object]:
    """Return what the log says of an event."""
    match event:
        case LeaseGranted(lease) | LeaseQueued(lease):
            said = {"lease": lease.id, "owner": lease.owner.name, "binding": lease.binding.kind, "name": lease.name}
            return said | ({"chips": list(lease.chips)} if lease.chips else {"asked": str(lease.want.count or "set")})
        case LeaseEnded(lease_id, reason) | LeaseDraining(lease_id, reason):
            return {"lease": lease_id, "reason": reason}
        case LeaseBound(lease_id, binding):
            return {"lease": lease_id, "binding": binding.kind}
        case ChipAdded(chip) | ChipChanged(chip):
            return {"chip": chip.index, "device": f"{chip.major}:{chip.minor}", "problem": chip.problem}
        case _:
            return {}
