"""What clients ask of the ledger: permissions checked, parameters made into wishes, answers given."""

import asyncio
import time
from functools import lru_cache, partial

import structlog

from neurond import wire
from neurond.daemon import views
from neurond.daemon.broker import Broker, Waiter, Wish
from neurond.daemon.fence import Fence
from neurond.daemon.labels import labels_of
from neurond.daemon.server import Answer, Call, Handler, Peer
from neurond.host import processes
from neurond.ledger.errors import InvalidRequest, NotAllowed
from neurond.ledger.leases import Binding, ByConnection, ByProcess, ByTime, Lease, OnContainers, Owner, Want

log = structlog.get_logger()

GONE = "the client went away while it waited"
LONGEST_NAME = 128
MOST_CHIPS_NAMED = 4096


class Requests:
    """Answers the calls about leases and chips."""

    def __init__(self, broker: Broker, home: str, fence: Fence) -> None:
        self.broker = broker
        self.home = home
        self.fence = fence
        self.ledger = broker.ledger

    def handlers(self) -> dict[str, Handler]:
        """Return the functions that answer calls, by the method's name."""
        return {
            "Acquire": self._acquire,
            "Adopt": self._adopt,
            "Bind": self._bind,
            "Release": self._release,
            "Renew": self._renew,
            "Environment": self._environment,
            "ListChips": self._list_chips,
            "ListLeases": self._list_leases,
            "Watch": self.broker.watchers.watch,
        }

    # -- who may ----------------------------------------------------------------------------------------------------

    def may_lease(self, peer: Peer) -> None:
        """Raise NotAllowed unless the peer may hold chips."""
        rules = self.broker.rules
        if peer.uid == 0 or peer.uid == rules.uid or rules.gid in peer.groups:  # noqa: PLR1714 - no set for each call
            return
        group = rules.settings.group
        hint = (
            f"join it (usermod -aG {group}) and log in again"
            if rules.gid is not None
            else f"it does not exist here: groupadd --system {group}, then systemctl reload neurond"
        )
        raise NotAllowed(f"{processes.user_name(peer.uid)} may not lease chips: that takes the group {group}; {hint}")

    def may_start(self, peer: Peer) -> None:
        """Raise NotAllowed unless the peer may start containers."""
        rules = self.broker.rules
        if peer.uid in {0, rules.uid} or (rules.engine_gid is not None and rules.engine_gid in peer.groups):
            return
        raise NotAllowed(
            f"{processes.user_name(peer.uid)} may not start containers: that takes the group "
            f"{rules.settings.container_group}, as it is as good as being root"
        )

    def must_own(self, peer: Peer, lease: Lease, *, force: bool = False, reason: str = "") -> None:
        """Raise NotAllowed unless the lease is the peer's, or the peer is root and says that and why it insists."""
        if peer.uid == lease.owner.uid:
            return
        whose = f"lease {lease.id} belongs to {lease.owner.name}"
        if peer.uid != 0:
            others = "" if lease.owner.uid == 0 else f"{lease.owner.name} or "
            raise NotAllowed(f"{whose}: only {others}root may")
        if not force or not reason:
            raise NotAllowed(f"{whose}: root may with --force --reason WHY")
        log.warning("lease.forced", lease=lease.id, owner=lease.owner.name, reason=reason)

    # -- calls ------------------------------------------------------------------------------------------------------

    def _acquire(self, call: Call, request: wire.Acquire) -> Answer:
        peer = call.peer
        self.may_lease(peer)
        if request.enforce and peer.uid != 0:
            raise NotAllowed("only root can set up a device filter, so only root may say that there is one")
        wish = Wish(
            want_of(request.count, request.chips, every=request.all, missing_ok=request.missing_ok),
            owner_of(peer),
            self._binding(peer, request.pid, request.ttl, connection_ok=True),
            checked_name(request.name) if request.name else "",
            seconds("wait", request.wait) if request.wait else 0,
            request.ttl,
            checked_name(request.key, "key") if request.key else "",
            bool(request.enforce),
            request.container or "",
        )
        if request.container:
            self.may_start(peer)
            if not isinstance(wish.binding, ByProcess):
                raise InvalidRequest("a lease for a container is bound to the process of its docker command at first")
        if self.broker.is_known():
            return self._ask(call, request, wish)
        return self._ask_when_known(call, request, wish)

    async def _ask_when_known(self, call: Call, request: wire.Acquire, wish: Wish) -> wire.Acquired | None:
        await self.broker.known()
        return None if call.connection.gone else self._ask(call, request, wish)

    def _ask(self, call: Call, request: wire.Acquire, wish: Wish) -> wire.Acquired | None:
        earlier = self.ledger.by_key(wish.owner.uid, wish.key) if wish.key else None
        if earlier is not None:
            self._join(call, wish, earlier, self._waiter(call, request))
            return None
        lease = self.broker.ask(wish, call.connection)
        if lease.state == "active":
            return self._acquired(call, request, lease)
        waiter = self._waiter(call, request)
        self.broker.join(lease.id, waiter)
        call.on_gone = lambda: self.broker.leave(lease.id, waiter, GONE)
        if call.more:
            call.reply(wire.Acquired(lease.id, [], waiting=self.broker.why_waits(lease)), last=False)
        return None

    def _waiter(self, call: Call, request: wire.Acquire) -> Waiter:
        return Waiter(partial(self._granted, call, request), call.fail)

    def _granted(self, call: Call, request: wire.Acquire, lease: Lease) -> None:
        call.on_gone = None
        call.reply(self._acquired(call, request, lease))

    def _acquired(self, call: Call, request: wire.Acquire, lease: Lease) -> wire.Acquired:
        call.promises = lease.id
        reply = wire.Acquired(lease.id, list(lease.chips))
        if request.env:
            reply.env = views.environment(self.ledger, lease, self.broker.rules.lnc)
            reply.nodes, reply.cdi = views.nodes(self.ledger, lease), self.fence.name_of(lease)
            reply.labels = labels_of(self.home, lease)
        return reply

    def _join(self, call: Call, wish: Wish, earlier: Lease, waiter: Waiter) -> None:
        """Answer a request whose key another one has already: the same wish gets the same lease."""
        same_binding = earlier.binding == wish.binding or (
            earlier.binding.kind == wish.binding.kind and not isinstance(wish.binding, ByProcess)
        )
        if earlier.want != wish.want or not same_binding or earlier.ttl != (wish.ttl or 0):
            raise InvalidRequest(
                f"the key {wish.key!r} belongs to lease {earlier.id}, which was asked for with other parameters"
            )
        if earlier.state == "queued":
            self.broker.join(earlier.id, waiter)
            call.on_gone = lambda: self.broker.leave(earlier.id, waiter, GONE)
        else:
            waiter.granted(earlier)

    def _binding(self, peer: Peer, pid: int | None, ttl: float | None, *, connection_ok: bool = False) -> Binding:
        if pid is None and ttl is None and connection_ok:
            return ByConnection(peer.pid)
        if pid is not None and ttl is not None:
            raise InvalidRequest("a lease is bound to a process or to a time limit, not to both")
        if ttl is not None:
            return ByTime(processes.boottime() + self._ttl(ttl))
        if pid is None:
            raise InvalidRequest("bind a lease to what? A process or a time limit")
        pid = pid or peer.pid  # pid 0 is the caller, whatever its own pid namespace calls it
        try:
            ticks, uid = processes.start_ticks(pid), processes.owner_of(pid)
        except processes.ProcessGone as error:
            raise InvalidRequest(f"{error}: a lease needs a living process to be bound to") from None
        if peer.uid not in {0, uid}:
            owner = processes.user_name(uid)
            raise NotAllowed(f"process {pid} belongs to {owner}: bind a lease to a process of your own")
        return ByProcess(pid, ticks)

    def _ttl(self, ttl: float) -> float:
        return seconds("ttl", ttl, least=0.001, most=self.broker.rules.settings.longest_ttl)

    async def _adopt(self, call: Call, request: wire.Adopt) -> wire.Acquired:
        self.may_lease(call.peer)
        binding = self._binding(call.peer, request.pid, None)
        assert isinstance(binding, ByProcess)  # noqa: S101 - tells mypy
        await self.broker.usage.look()
        users = self.ledger.foreign
        chips = tuple(index for index, who in sorted(users.items()) if any(u.pid == binding.pid for u in who))
        if not chips:
            raise InvalidRequest(f"process {binding.pid} has no chip open that it does not hold a lease for")
        lease = self.broker.adopt(owner_of(call.peer), binding, chips, checked_name(request.name or ""))
        await self.broker.recording.recorded(lease.id)
        await self.broker.usage.look()
        return wire.Acquired(lease.id, list(lease.chips))

    def _bind(self, call: Call, request: wire.Bind) -> wire.Done:
        lease = self.ledger.get(request.lease)
        self.must_own(call.peer, lease)
        _refuse_container(lease)
        if lease.state != "active":
            raise InvalidRequest(f"lease {lease.id} is {lease.state}: only an active lease can be bound to another")
        self.broker.bind(lease.id, self._binding(call.peer, request.pid, request.ttl))
        call.promises = lease.id
        return wire.Done()

    def _release(self, call: Call, request: wire.Release) -> wire.Released:
        lease = self.ledger.get(request.lease)
        reason = checked_name(request.reason, "reason") if request.reason else ""
        peer = call.peer
        if peer.uid != lease.owner.uid:
            self.must_own(peer, lease, force=bool(request.force), reason=reason)
        _refuse_container(lease)
        self.broker.recording.must_work()
        by = owner_of(peer).name
        self.broker.binding_ended(lease.id, f"released by {by}" + (f": {reason}" if reason else ""))
        left = self.ledger.leases.get(lease.id)
        call.promises = lease.id
        return wire.Released(left.state if left else "ended")

    def _renew(self, call: Call, request: wire.Renew) -> wire.Renewed:
        lease = self.ledger.get(request.lease)
        self.must_own(call.peer, lease, force=bool(request.force), reason=checked_name(request.reason or "", "reason"))
        if not isinstance(lease.binding, ByTime):
            raise InvalidRequest(f"lease {lease.id} has no time limit: it is bound to a {lease.binding.kind}")
        if lease.state != "active":
            raise InvalidRequest(f"lease {lease.id} is {lease.state}: only an active lease can be renewed")
        ttl = self._ttl(request.ttl)
        self.broker.bind(lease.id, ByTime(processes.boottime() + ttl))
        call.promises = lease.id
        return wire.Renewed(time.time() + ttl)

    def _environment(self, call: Call, request: wire.OfLease) -> wire.Environment:
        lease = self.ledger.get(request.lease)
        if call.peer.uid != 0:
            self.must_own(call.peer, lease)
        env = views.environment(self.ledger, lease, self.broker.rules.lnc)
        nodes, cdi = views.nodes(self.ledger, lease), self.fence.name_of(lease)
        return wire.Environment(lease.id, list(lease.chips), env, nodes, cdi, labels_of(self.home, lease))

    async def _list_chips(self, call: Call, request: wire.Nothing) -> wire.Chips:
        del call, request
        known = await self._described()
        held = {index for lease in self.ledger.leases.values() for index in lease.chips}
        indices = sorted(self.ledger.chips.keys() | held)
        return wire.Chips(
            self.ledger.instance_type,
            self.ledger.topology.shape,
            [views.chip_view(self.broker, index, known) for index in indices],
            self.broker.rules.note(),
        )

    async def _list_leases(self, call: Call, request: wire.ListLeases) -> wire.Leases:
        del call
        known = await self._described()
        ended = self.ledger.ended if request.ended else ()
        living = (*self.ledger.leases.values(), *self.ledger.queue.values())
        return wire.Leases(
            [views.ended_view(self.broker, lease, reason) for lease, reason in ended]
            + [views.lease_view(self.broker, lease, known) for lease in living]
        )

    async def _described(self) -> views.Described:
        """Look up the processes that leases are bound to, in a thread, as there may be many."""
        bindings = [lease.binding for lease in (*self.ledger.leases.values(), *self.ledger.queue.values())]
        pids = {binding.pid for binding in bindings if isinstance(binding, ByProcess | ByConnection)}
        return await asyncio.to_thread(lambda: {pid: processes.describe(pid) for pid in pids})


def _refuse_container(lease: Lease) -> None:
    """Raise InvalidRequest for a lease whose container may run: its chips can't be taken out of it."""
    if isinstance(lease.binding, OnContainers) and lease.state == "active":
        names = " ".join(name or f"neurond-{lease.id}" for name, _ in lease.binding.containers)
        raise InvalidRequest(
            f"lease {lease.id} ends with its container: neurond container stop {lease.id} (or docker stop {names})"
        )


def owner_of(peer: Peer) -> Owner:
    """Return the peer as the owner of a lease."""
    return _owner(peer.uid)


@lru_cache(maxsize=1024)
def _owner(uid: int) -> Owner:
    return Owner(uid, processes.user_name(uid))


def want_of(count: int | None, chips: list[int] | None, *, every: bool | None, missing_ok: bool | None) -> Want:
    """Make the ledger's request of what came over the wire. Raises InvalidRequest."""
    if count is not None and count > 0 and chips is None and not every:
        return _want(count, bool(missing_ok))
    if (count is not None) + (chips is not None) + bool(every) != 1:
        raise InvalidRequest("ask for chips in one way: by count (-n), by number (--chips) or --all")
    if count is not None and count < 1:
        raise InvalidRequest(f"{count} chips asked: ask for at least 1")
    if chips is not None and (not chips or min(chips) < 0):
        raise InvalidRequest(
            f"chips {','.join(map(str, chips)) or 'none'} asked: name chips by their numbers, from 0 on"
        )
    if chips is not None and len(chips) > MOST_CHIPS_NAMED:
        raise InvalidRequest(f"{len(chips)} chips named: no host has as many")
    return Want(0, tuple(chips or ()), bool(every), bool(missing_ok))


@lru_cache(maxsize=256)
def _want(count: int, missing_ok: bool) -> Want:
    return Want(count, missing_ok=missing_ok)


def seconds(what: str, value: float, least: float = 0, most: float = wire.MAX_WAIT) -> float:
    """Check a number of seconds. Raises InvalidRequest."""
    if not least <= value <= most:
        raise InvalidRequest(f"{what} of {value:g} s: between {least:g} and {most:g} s are possible")
    return value


def checked_name(name: str, what: str = "name") -> str:
    """Check a text that people will see on their terminals. Raises InvalidRequest."""
    if len(name) > LONGEST_NAME or not name.isprintable():
        raise InvalidRequest(f"a {what} has at most {LONGEST_NAME} printable characters")
    return name
