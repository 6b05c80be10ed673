"""Running containers that have chips and no lease for them: strangers, guests of a lease, our own that came back."""

import asyncio
import math
from collections.abc import Awaitable, Callable

import structlog

from neurond.daemon import labels
from neurond.daemon.broker import Broker
from neurond.daemon.look import Look
from neurond.daemon.openable import chips_in
from neurond.daemon.threads import in_thread
from neurond.host import processes
from neurond.host.docker import Container, Engine, EngineError
from neurond.ledger.chips import User
from neurond.ledger.errors import NoCapacity, Refused
from neurond.ledger.leases import ByContainer, Lease, OnContainers, Owner, container_ids
from neurond.ledger.words import ranges

log = structlog.get_logger()


class Strangers:
    """Looks for containers that use chips without a lease, and tells the broker.

    `is_ready` tells whether a container is no longer in the hands of who launches it; `end` stops one for good;
    `look_soon` asks for another look.
    """

    def __init__(
        self,
        broker: Broker,
        engine: Engine,
        home: str,
        *,
        is_ready: Callable[[Container], bool],
        end: Callable[[str, int], Awaitable[None]],
        look_soon: Callable[[], None],
    ) -> None:
        self.broker = broker
        self.engine = engine
        self.home = home
        self.conflicts: dict[str, str] = {}
        """Containers that run on chips leased to others, by id: what is said about them."""
        self._is_ready = is_ready
        self._end = end
        self._look_soon = look_soon
        self._known: dict[str, Container] = {}
        self._stopping: dict[str, asyncio.Task[None]] = {}

    def privileged(self) -> list[Container]:
        """Return the running containers that may open every device there is, as of the last look."""
        return [container for container in self._known.values() if container.privileged]

    async def find(self, look: Look) -> None:
        """Tell the broker of running containers that have chips and no lease for them.

        One of our own that was started again gets its lease again, if its chips are free.
        """
        running = await in_thread(self.engine.running)
        now_known: dict[str, Container] = {}
        strangers: dict[int, tuple[User, ...]] = {}
        guests: dict[str, tuple[User, ...]] = {}
        conflicts: dict[str, str] = {}
        found = await asyncio.gather(*(self._as_it_is(listed, look) for listed in running))
        for listed, known in zip(running, found, strict=True):
            if isinstance(known, EngineError):  # what an earlier daemon knew of it counts
                for index, user in self._noted(listed):
                    strangers[index] = (*strangers.get(index, ()), user)
                continue
            if known is None or not known.lives or not self._is_ready(known):
                continue
            now_known[known.id] = known
            if self._is_bound(known):
                continue
            chips = chips_in(self.broker.ledger, known, self.home)
            user = User(known.pid, "container", known.name, known.id)
            host = self._host_of(known, chips)
            if host is not None:
                guests[host.id] = (*guests.get(host.id, ()), user)
                continue
            if chips and self.is_our_own(known) and not self._lease_again(known, chips):
                conflicts[known.id] = self._conflict(known, chips)
            for index in () if self._is_bound(known) else chips:
                strangers[index] = (*strangers.get(index, ()), user)
        self._known, self.conflicts = now_known, conflicts
        self.broker.take_containers(strangers, guests)

    def _host_of(self, container: Container, chips: list[int]) -> Lease | None:
        """Return the lease by right of which a container has its chips, though that is bound to something else.

        Such is one that was started with the arguments of `neurond env ID --docker-args`.
        """
        lease = self.broker.ledger.leases.get(container.labels.get(labels.LEASE, ""))
        if lease is None or isinstance(lease.binding, OnContainers):
            return None
        return lease if chips and set(chips) <= set(lease.chips) else None

    def _noted(self, container: Container) -> list[tuple[int, User]]:
        """Return the chips that a container is known to have without a lease, each with the user that it is there."""
        foreign = self.broker.ledger.foreign.items()
        return [(index, user) for index, users in foreign for user in users if user.container == container.id]

    async def _as_it_is(self, listed: Container, look: Look) -> Container | EngineError | None:
        """Return a container that runs; where the engine fails on it, what was known of it counts, or the error."""
        known = self._known.get(listed.id)
        if known is not None and not self._has_chips(known):
            return known
        try:  # also one with chips that is known: it may have ended meanwhile
            return await look.inspect(listed.id)
        except EngineError as error:
            log.warning("container.not_inspected", container=listed.name, error=str(error))
            return known or error

    def _has_chips(self, container: Container) -> bool:
        return bool(chips_in(self.broker.ledger, container, self.home))

    def _is_bound(self, container: Container) -> bool:
        leases = self.broker.ledger.leases.values()
        return any(container.id in container_ids(lease.binding) for lease in leases)

    def is_our_own(self, container: Container) -> bool:
        """Tell whether a container has or had a lease of ours: by its id, or by the name that we gave it."""
        if container.labels.get(labels.HOME) != self.home:
            return False
        ledger = self.broker.ledger
        leases = [*ledger.leases.values(), *(lease for lease, _ in ledger.ended)]
        return container.labels.get(labels.NAME) == container.name or any(
            container.id in container_ids(lease.binding) for lease in leases
        )

    def _lease_again(self, container: Container, chips: list[int]) -> bool:
        """Lease the chips of a container that was started again; False if somebody else has one of them."""
        uid = labels.uid_of(container.labels) or 0
        owner = Owner(uid, processes.user_name(uid))
        binding = ByContainer(container.name, container.id)
        try:
            lease = self.broker.adopt(owner, binding, tuple(chips), container.name)
        except NoCapacity:
            return False
        except Refused as error:  # nothing can be recorded now: that is no conflict, and the next look tries again
            log.info("container.not_leased_again", container=container.name, reason=str(error))
            return True
        log.info("container.leased_again", container=container.name, lease=lease.id, chips=chips)
        return True

    def _conflict(self, container: Container, chips: list[int]) -> str:
        """Say that a container runs on chips of others, and stop it if that is wanted."""
        holders = {self.broker.ledger.holder_of(index) for index in chips}
        whose = ", ".join(f"{lease.id} ({lease.owner.name})" for lease in holders if lease is not None) or "nobody"
        sentence = f"container {container.name} was started again on chips {ranges(chips)}, which belong to {whose} now"
        stop = self.broker.rules.settings.stop_conflicts
        if container.id not in self.conflicts or (stop and container.id not in self._stopping):
            follows = "stopping it" if stop else "it is named in neurond ls and check; stop it"
            log.warning("container.conflict", container=container.name, chips=chips, leases=whose, follows=follows)
        if stop and container.id not in self._stopping:
            self._stopping[container.id] = asyncio.get_running_loop().create_task(self._stop(container))
        return sentence

    async def _stop(self, container: Container) -> None:
        """Stop a container. No look waits for that, as its grace may be long."""
        try:
            await self._end(container.id, math.ceil(self.broker.rules.settings.conflict_grace))
        except EngineError as error:
            log.warning("container.not_stopped", container=container.name, error=str(error), follows="trying again")
        finally:
            del self._stopping[container.id]
            self._look_soon()
